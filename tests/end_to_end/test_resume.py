"""`slime train` killed with -9 at several points and started again: nothing trained twice, nothing lost, one line of
metrics a rollout;
also when the newest checkpoint was damaged meanwhile."""

import json
import os
import pathlib
import random
import signal
import time

import pytest

from slime_cli.buffer.journal import Journal
from slime_cli.tracing.ledger import balanced, ledgers
from tests.end_to_end.conftest import SMALL, slime, start


def _lines(path):
    return len(path.read_text().splitlines()) if path.exists() else 0


def _kill_when(process, reached, deadline=240):
    end = time.time() + deadline
    while not reached():
        assert process.poll() is None, "it ended before it could be killed"
        assert time.time() < end
        time.sleep(0.02)
    time.sleep(random.random() * 0.3)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.timeout(900)
def test_killed_at_several_points_a_run_trains_every_sample_once(served, tmp_path):
    run = tmp_path / "run"
    words = ("train", "--profile", SMALL, "--run-dir", run, "--rollout-endpoint", served / "endpoint.json")
    points = [
        lambda: _lines(run / "metrics.jsonl") >= 1,  # in the first stage
        lambda: (run / "grpo" / "rollouts" / "000001" / "samples.parquet").exists(),  # a batch is made, not committed
        lambda: _lines(run / "metrics.jsonl") >= 5,  # around the save after four rollouts
    ]
    for point in points:
        _kill_when(start(*words, log=tmp_path / "out.log"), point)
        assert all(part.trained_twice == 0 for part in ledgers(run).values())
        for tracker in run.glob("*/checkpoints/latest_checkpointed_iteration.txt"):
            tracker.write_text("")  # Megatron would end the process: the journal knows the commit
    with Journal.open_readonly(run / "grpo" / "journal.sqlite") as journal:
        newest = pathlib.Path(journal.commits()[-1].checkpoint)
    os.truncate(next(newest.glob("*.distcp")), 100)
    done = slime(*words)
    assert done.returncode == 3 and str(newest) in done.stderr and "--on-damaged-checkpoint rollback" in done.stderr
    done = slime(*words, "--on-damaged-checkpoint", "rollback")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "\x1b" not in done.stdout + done.stderr
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [(line["phase"], line["rollout_id"]) for line in lines] == [("sft", r) for r in range(2)] + [
        ("grpo", r) for r in range(5)
    ]
    parts = ledgers(run)
    assert len(parts["grpo"].rollbacks) == 1 and str(newest) in parts["grpo"].rollbacks[0].reason
    assert balanced(parts)
    assert {name: (p.dispatched, p.trained, p.in_flight, p.dropped) for name, p in parts.items()} == {
        "sft": (128, 128, {}, {}),
        "grpo": (160, 160, {}, {}),
    }
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps_by_phase"] == {"sft": 8, "grpo": 10} and summary["engines_verified"] is True
    assert json.loads((run / "run.json").read_text())["attempt"] == len(points) + 2
