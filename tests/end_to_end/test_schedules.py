"""The schedules on genuine engines and a genuine trainer. Contracts:

1. every rollout is trained, within the bound on staleness, whatever happens to requests while the weights change;
2. every trained token knows its version, and its log-probability is that version's: what the trainer's own weights
wrote
   differs by rounding alone;
3. killed with -9 and resumed, the ledger balances and nothing is trained twice; the bound still holds.
"""

import json
import os
import signal
import time

import pytest

from slime_cli.buffer.batch_files import read_parquet
from slime_cli.buffer.journal import Journal
from slime_cli.manifests import layout
from tests.end_to_end.conftest import HERE, slime, start

RL = HERE / "rl.yaml"
ROLLOUTS = 8


def lines(run):
    path = run / layout.METRICS
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


def check(run, bound):
    found = lines(run)
    assert [line["rollout_id"] for line in found] == list(range(ROLLOUTS))
    assert max(line["staleness_max"] for line in found) <= bound
    measured = [line[name] for line in found if (name := "train/train_rollout_logprob_abs_diff_max") in line]
    assert measured and max(measured) <= 1e-4
    with Journal.open_readonly(run / layout.JOURNAL) as journal:
        ledger = journal.ledger()
    assert ledger.balanced and not ledger.trained_twice and ledger.trained == ROLLOUTS * 32
    samples = [s for folder in layout.rollouts(run) for s in read_parquet(folder / layout.SAMPLES)]
    assert len(samples) == ROLLOUTS * 32
    for sample in samples:
        sample.check()
        assert sum(span.length for span in sample.spans) == sample.response_length <= 60
        assert all(layout.step_of(span.version) is not None for span in sample.spans)
    return found, samples


@pytest.mark.parametrize(
    ("words", "bound"),
    [
        (["--schedule", "one-step-off"], 1),
        (["--partial-rollout", "--over-sampling-batch-size", "16", "--mask-offpolicy-in-partial-rollout"], ROLLOUTS),
    ],
    ids=["one-step-off", "partial"],
)
def test_a_schedule_trains_every_rollout_within_its_bound(served, tmp_path, words, bound):
    done = slime(
        "train", "--profile", RL, "--run-dir", tmp_path, *words, "--rollout-endpoint", served / "endpoint.json"
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found, samples = check(tmp_path, bound)
    if "--partial-rollout" in words:
        for sample in samples:
            versions = [span.version for span in sample.spans]
            mask = sample.effective_mask()
            own = [span.version == versions[-1] for span in sample.spans for _ in range(span.length)]
            assert mask == [int(kept) for kept in own]
    else:
        assert found[-1]["staleness_max"] == 1


def test_asynchronous_and_killed_the_bound_holds_and_the_ledger_balances(served, tmp_path):
    words = ["--schedule", "async", "--max-staleness", "2", "--in-flight", "abort", "--partial-rollout"]
    command = ["train", "--profile", RL, "--run-dir", tmp_path, *words, "--rollout-endpoint", served / "endpoint.json"]
    for after in (2, 5):
        process = start(*command, log=tmp_path / "out.log")
        deadline = time.time() + 240
        while len(lines(tmp_path)) < after:
            assert process.poll() is None and time.time() < deadline, (tmp_path / "out.log").read_text()[-3000:]
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    done = slime(*command)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    check(tmp_path, 2)


def test_weights_that_change_under_requests_are_told_token_by_token(tmp_path):
    words = ["--schedule", "async", "--max-staleness", "2", "--in-flight", "pause"]
    done = slime("train", "--profile", RL, "--run-dir", tmp_path, *words, "--rollout-max-response-len", "60")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    check(tmp_path, 2)
