"""Engines that get the trainer's weights every third rollout, and sample from a cut distribution: trainer and engine
still compare,
also after a kill in between."""

import json

import pyarrow.parquet as pq
import pytest

from slime_cli import manifests
from tests.end_to_end.conftest import TINY, slime, start
from tests.end_to_end.test_resume import _kill_when, _lines

PROMPTS = (
    "reasoning-gym:basic_arithmetic?operators=+&min_terms=2&max_terms=2&max_digits=1&allow_parentheses=false"
    "&allow_negation=false&size=400&seed=2"
)
WORDS = f"""--hf-checkpoint {TINY} --prompt-data {PROMPTS} --apply-chat-template --rm-type reasoning-gym --num-rollout 9
    --rollout-batch-size 4 --n-samples-per-prompt 4 --rollout-max-response-len 6 --rollout-max-prompt-len 32
    --use-dynamic-batch-size --max-tokens-per-gpu 512 --lr 1e-3 --min-lr 1e-3 --save-interval 2
    --update-weights-interval 3 --keep-old-actor --rollout-top-p 0.9 --rollout-top-k 64 --use-top-p-replay""".split()


@pytest.mark.timeout(900)
def test_old_log_probs_are_those_of_the_engines_weights_also_after_a_kill(served, tmp_path):
    run = tmp_path / "run"
    words = ("train", *WORDS, "--run-dir", run, "--rollout-endpoint", served / "endpoint.json")
    # committed after the fourth rollout, published after the third: the trainer is a step ahead of the engines
    _kill_when(start(*words, log=tmp_path / "out.log"), lambda: _lines(run / "metrics.jsonl") >= 4)
    done = slime(*words)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = {line["rollout_id"]: line for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())}
    assert sorted(lines) == list(range(9))
    for rollout_id, line in lines.items():
        folder = run / "rollouts" / f"{rollout_id:06d}"
        held = rollout_id // 3 * 3
        assert manifests.read(folder / "manifest.json", manifests.Rollout).weight_versions == [f"v{held:06d}"]
        assert line["weight_version"] == f"v{(rollout_id + 1) // 3 * 3:06d}" and line["step"] == rollout_id + 1
        assert line["train/train_rollout_logprob_abs_diff_max"] <= 1e-4
        assert (line["train/ppo_kl"] != 0) == (rollout_id % 3 != 0), "the ratio is to the weights that generated"
    rows = pq.read_table(run / "rollouts" / "000004" / "samples.parquet").to_pylist()
    counts = [
        b - a for r in rows for a, b in zip(r["rollout_top_p_token_offsets"], r["rollout_top_p_token_offsets"][1:])
    ]
    assert len(counts) == sum(r["response_length"] for r in rows) and 0 < min(counts) <= max(counts) <= 65
