"""A supervised run, which needs no engine, that writes its checkpoints in the background and exports them."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from slime_cli.manifests import checkpoints
from slime_cli.tracing.ledger import balanced, ledgers
from tests.end_to_end.conftest import TINY, slime, start
from tests.end_to_end.test_resume import _kill_when, _lines

DATA = (
    "reasoning-gym:basic_arithmetic?operators=+&min_terms=2&max_terms=2&max_digits=1&allow_parentheses=false"
    "&allow_negation=false&size=99&seed=1"
)


@pytest.mark.timeout(900)
def test_killed_while_it_writes_a_run_trains_every_sample_once_and_exports_what_it_saves(tmp_path):
    run = tmp_path / "run"
    words = (
        "train",
        "--run-dir",
        run,
        "--hf-checkpoint",
        TINY,
        "--loss-type",
        "sft_loss",
        "--prompt-data",
        DATA,
        "--apply-chat-template",
        "--num-rollout",
        5,
        "--rollout-batch-size",
        16,
        "--num-steps-per-rollout",
        2,
        "--use-dynamic-batch-size",
        "--max-tokens-per-gpu",
        512,
        "--lr",
        "1e-3",
        "--min-lr",
        "1e-3",
        "--save-interval",
        1,
        "--async-save",
        "--keep-checkpoints",
        1,
        "--save-hf",
        run / "hf" / "{rollout_id}",
    )
    _kill_when(start(*words, log=tmp_path / "out.log"), lambda: _lines(run / "metrics.jsonl") >= 2)
    (before,) = ledgers(run).values()
    assert before.trained_twice == 0 and before.trained < 5 * 16
    done = slime(*words)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert balanced(ledgers(run))
    (after,) = ledgers(run).values()
    assert (after.dispatched, after.trained, after.in_flight, after.dropped) == (80, 80, {}, {})
    assert json.loads((run / "run.json").read_text())["attempt"] == 2
    assert (
        checkpoints.iterations(run / "checkpoints") == [10]
        and checkpoints.damage(run / "checkpoints" / "iter_0000010") == ""
    )

    converted = slime("convert", "dist-to-hf", "--load", run / "checkpoints", "--save", tmp_path / "converted")
    assert converted.returncode == 0, converted.stderr
    exported = run / "hf" / "4"
    model, info = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    want = {
        name: tensor
        for file in (tmp_path / "converted").glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    got = model.state_dict()
    assert len(want) > 20 and all(torch.equal(got[name], tensor) for name, tensor in want.items())
    assert AutoTokenizer.from_pretrained(exported)("1 + 1 =")["input_ids"]
