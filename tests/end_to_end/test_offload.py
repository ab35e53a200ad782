"""A colocated run that offloads, on genuine engines: supervised, then reinforcement learning.

1. Engines give their memory back before a rollout is trained, and take it again in the order weights, sync, cache; the
   trainer's memory goes the other way. Where no new weights are due, engines keep theirs.
2. It changes nothing in what is computed: engines are proven, and agree with the trainer.
3. `slime profile memory` shows each phase's prediction beside what was measured.
"""

import json

import pytest

from slime_cli.tracing.reading import spans_of
from tests.end_to_end.conftest import SMALL, slime


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("offload") / "run"
    more = ("--colocate", "--offload", "--update-weights-interval", "2", "--rollout-num-gpus", "1")
    done = slime("train", "--profile", SMALL, "--run-dir", folder, *more)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "engines and trainer take turns" in done.stdout + done.stderr
    return folder


@pytest.mark.timeout(900)
def test_both_sides_take_turns(run):
    spans = sorted(spans_of(run), key=lambda span: span.ts)
    names = {"release", "resume", "offload", "onload", "sync", "train", "begin_phase"}
    of_run = [
        (span.name, *sorted(span.args.get("parts", ())))
        for span in spans
        if span.name in names and (span.process == "conductor" or span.name in ("offload", "onload"))
    ]
    give = [("offload", "gradients", "optimizer"), ("resume",), ("sync",), ("offload", "weights"), ("resume",)]
    take = [("release",), ("onload", "gradients", "optimizer", "weights"), ("train",)]
    keep = [("offload", "gradients", "optimizer", "weights"), ("resume",)]
    supervised = [("release",), ("begin_phase",), ("train",), ("train",)]
    turns = [*take, *keep, *take, *give]
    assert of_run == [*supervised, ("begin_phase",), *give, *turns, *turns, *take, *give]


@pytest.mark.timeout(900)
def test_what_is_computed_is_the_same(run):
    assert json.loads((run / "summary.json").read_text())["engines_verified"] is True
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    grpo = [line for line in lines if line["phase"] == "grpo"]
    assert len(grpo) == 5 and grpo[0]["train/train_rollout_logprob_abs_diff_max"] <= 1e-4
    assert slime("trace", "ledger", run).returncode == 0


@pytest.mark.timeout(900)
def test_memory_was_predicted_and_measured(run):
    done = slime("profile", "memory", run, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) == {"sft", "grpo"}
    grpo = found["grpo"]
    assert grpo["generate"]["trainer"]["predicted"] == {} and grpo["train"]["engine"]["predicted"] == {}
    for phase, side in (("generate", "engine"), ("log_probs", "trainer"), ("train", "trainer"), ("publish", "trainer")):
        assert sum(grpo[phase][side]["predicted"].values()) > 0
        assert grpo[phase][side]["measured"] is not None
