"""Conversations with a template that rewrites earlier turns, trained by `slime train` on genuine Megatron."""

import collections
import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from slime_cli.buffer import batch_files
from slime_cli.buffer.types import Sample, trajectories
from slime_cli.models import tiny
from slime_cli.tracing.ledger import balanced, ledgers
from tests.end_to_end.conftest import TINY, slime

DROPS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content if loop.last or m.role != 'assistant' else m.content[-1] }}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Qwen3's kind: an earlier turn loses what it began with."""


def conversation(*answers: str) -> dict:
    messages = []
    for number, text in enumerate(answers):
        messages += [{"role": "user", "content": f"{number} + 1"}, {"role": "assistant", "content": text}]
    return {"input": messages}


ROWS = [conversation("=1"), conversation("=1", "+2"), conversation("1+1=2", "= 2", "= 3"), conversation("2")]


def reference(folder, groups: list[list[Sample]]) -> tuple[float, float]:
    """Loss and gradient norm in float64, one sequence at a time: the samples of a group share one denominator."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").double()
    loss = torch.zeros((), dtype=torch.float64)
    for siblings in groups:
        trained = sum(sum(s.effective_mask()) for s in siblings)
        for s in siblings:
            tokens = torch.tensor(s.tokens)
            log_probs = model(tokens[None]).logits[0, :-1].log_softmax(-1)
            own = log_probs[torch.arange(len(tokens) - 1), tokens[1:]][-s.response_length :]
            loss = loss - (own * torch.tensor(s.effective_mask())).sum() / trained / len(groups)
    loss.backward()
    norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    return float(loss.detach()), float(torch.stack(norms).norm())


@pytest.mark.timeout(600)
def test_a_conversation_that_fans_out_is_one_trajectory_with_one_denominator(tmp_path):
    folder = tiny.make(TINY, tmp_path / "model")
    (folder / "chat_template.jinja").write_text(DROPS)
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    words = f"""train --run-dir {tmp_path / "run"} --hf-checkpoint {folder} --prompt-data {data} --apply-chat-template
        --loss-type sft_loss --num-rollout 1 --rollout-batch-size {len(ROWS)} --use-dynamic-batch-size
        --max-tokens-per-gpu 64 --lr 1e-3 --min-lr 1e-3 --clip-grad 0 --no-save-optim"""
    done = slime(*words.split())
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    samples = batch_files.read_parquet(tmp_path / "run/rollouts/000000/samples.parquet")
    assert collections.Counter(s.index for s in samples) == {0: 1, 1: 2, 2: 3, 3: 1}
    assert balanced(ledgers(tmp_path / "run")) and ledgers(tmp_path / "run")[""].trained == len(ROWS)
    line = json.loads((tmp_path / "run/metrics.jsonl").read_text())
    found = (line["train/loss"], line["train/grad_norm"])
    assert found == pytest.approx(reference(folder, list(trajectories(samples).values())), rel=1e-4)
    apart = reference(folder, [[sample] for sample in samples])
    assert abs(found[1] - apart[1]) > 0.05 * apart[1], "siblings apart are another gradient"
