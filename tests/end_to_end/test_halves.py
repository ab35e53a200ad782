"""One half of a run alone, over genuine engines or a genuine trainer. Contracts:

1. an evaluation alone evaluates once and trains nothing: the HF checkpoint's weights without a trainer, a checkpoint's
through one; the account balances, and the same command again shows the result;
2. --debug-rollout-only starts no trainer, under every schedule: batches are made, and stay in flight;
3. --debug-train-only starts no engines, and trains on saved rollouts what the run that made them trained: the same
batches, log-probabilities, advantages and metrics.
"""

import json
import pathlib

import pyarrow.parquet as pq
import pytest

from slime_cli.manifests import layout
from slime_cli.tracing.ledger import balanced, ledgers
from tests.end_to_end.conftest import HERE, SMALL, TINY, slime

RL = HERE / "rl.yaml"
SUMS = "reasoning-gym:basic_arithmetic?operators=+&min_terms=2&max_terms=2&max_digits=1&size=8&seed=3"
EVALUATES = ("--eval-prompt-data", "sums", SUMS, "--n-samples-per-eval-prompt", "2")


def processes(run: pathlib.Path) -> set[str]:
    """Those that recorded spans, and those that wrote a log."""
    return {path.name.partition("-")[0].partition(".")[0] for path in (run / layout.TRACE).iterdir()}


def done(*words: object) -> str:
    found = slime("train", *words)
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
    return found.stdout


def evaluated(run: pathlib.Path) -> dict:
    (path,) = layout.evaluations(run)
    found = json.loads(path.read_text())
    (result,) = found["results"]
    assert (result["prompts"], result["trajectories"], result["failures"]) == (8, 16, {})
    return found


def test_the_hf_checkpoint_is_evaluated_without_a_trainer(tmp_path):
    answers = ("--apply-chat-template", "--rollout-max-response-len", 6)
    command = ("--hf-checkpoint", TINY, "--run-dir", tmp_path, "--num-rollout", 0, *answers, *EVALUATES)
    done(*command)
    found = evaluated(tmp_path)
    assert (found["step"], found["weight_version"]) == (0, "v000000")
    assert "trainer" not in processes(tmp_path)
    assert not (tmp_path / layout.WEIGHTS).exists() and not (tmp_path / layout.CHECKPOINTS).exists()
    summary = json.loads((tmp_path / layout.SUMMARY).read_text())
    assert summary["steps"] == 0 and summary["reward_after"] == found["results"][0]["reward_mean"]
    (part,) = ledgers(tmp_path).values()
    assert balanced({"train": part}) and part.dispatched == 0
    assert slime("trace", tmp_path).returncode == slime("trace", "ledger", tmp_path).returncode == 0
    assert "this run is finished" in done(*command)


def test_a_checkpoint_is_evaluated_through_the_trainer(trained, served, tmp_path):
    checkpoints = trained / "grpo" / layout.CHECKPOINTS
    more = ("--load", checkpoints, "--rollout-endpoint", served / layout.ENDPOINT, "--run-dir", tmp_path)
    done("--hf-checkpoint", trained / layout.MODEL, *more, "--profile", RL, "--num-rollout", 0, *EVALUATES)
    evaluated(tmp_path)
    summary = json.loads((tmp_path / layout.SUMMARY).read_text())
    assert summary["steps"] == 0 and summary["engines_verified"] is True
    sums = [
        json.loads((folder / layout.MANIFEST).read_text())["tensors"]
        for folder in (layout.version(tmp_path, 0), layout.version(trained / "grpo", 10))
    ]
    assert sums[0] == sums[1], "the weights that are evaluated are the checkpoint's"


@pytest.fixture(scope="module")
def whole(served, tmp_path_factory) -> pathlib.Path:
    """A run with both halves."""
    run = tmp_path_factory.mktemp("whole")
    saved = ("--save-debug-rollout-data", run / "saved" / "{rollout_id}.parquet")
    saved += ("--save-debug-train-data", run / "train-{rollout_id}.parquet")
    engines = ("--rollout-endpoint", served / layout.ENDPOINT)
    done("--profile", RL, "--num-rollout", 2, "--run-dir", run, *engines, *saved)
    return run


def test_rollouts_alone(served, tmp_path):
    engines = ("--rollout-endpoint", served / layout.ENDPOINT)
    alone = ("--profile", RL, "--num-rollout", 3, "--run-dir", tmp_path, *engines, "--debug-rollout-only")
    done(*alone, "--schedule", "async", "--max-staleness", 0, *EVALUATES)
    assert "trainer" not in processes(tmp_path)
    (part,) = ledgers(tmp_path).values()
    assert part.balanced and (part.dispatched, part.trained, part.in_flight) == (96, 0, {"BATCHED": 96})
    assert [len(rows(layout.rollout(tmp_path, i) / layout.SAMPLES)) for i in range(3)] == [32, 32, 32]
    assert evaluated(tmp_path)["step"] == 0


def rows(path: pathlib.Path) -> list[dict]:
    return pq.read_table(path).to_pylist()


def test_training_alone_is_the_training_of_the_whole_run(whole, tmp_path):
    loaded = ("--load-debug-rollout-data", whole / "saved" / "{rollout_id}.parquet")
    loaded += ("--save-debug-train-data", tmp_path / "{rollout_id}.parquet")
    done("--profile", RL, "--num-rollout", 2, "--run-dir", tmp_path / "run", *loaded)
    assert "trainer" in processes(tmp_path / "run")
    assert not list((tmp_path / "run" / layout.LOGS).glob("engine-*")), "no engine was started"
    (part,) = ledgers(tmp_path / "run").values()
    assert part.balanced and part.trained == part.dispatched == 64
    mine, theirs = (lines(run) for run in (tmp_path / "run", whole))
    clocks = {"seconds", "trainer_idle", "rollout_idle", "retries"}
    for one, other in zip(mine, theirs, strict=True):
        assert one.keys() - clocks == other.keys() - clocks and len(one) > 20
        for name in one.keys() - clocks:
            assert one[name] == (
                other[name] if not isinstance(other[name], float) else pytest.approx(other[name], 1e-6)
            )
        assert one["train/train_rollout_logprob_abs_diff_max"] <= 1e-4
    for i in range(2):
        one, other = rows(tmp_path / f"{i}.parquet"), rows(whole / f"train-{i}.parquet")
        assert len(one) == 32
        for mine_row, their_row in zip(one, other, strict=True):
            assert mine_row.keys() >= {"advantages", "returns", "log_probs", "rollout_log_probs", "loss_mask"}
            for name, value in their_row.items():
                assert mine_row[name] == (pytest.approx(value, abs=1e-6) if name == "log_probs" else value), name


def lines(run: pathlib.Path) -> list[dict]:
    return [json.loads(text) for text in (run / layout.METRICS).read_text().splitlines()]


def test_a_share_of_saved_rollouts_and_a_file_that_is_none(whole, tmp_path):
    loaded = ("--load-debug-rollout-data", whole / "rollouts" / "{rollout_id:06d}")
    share = ("--load-debug-rollout-data-subsample", 0.5, "--global-batch-size", 16, "--num-steps-per-rollout", 2)
    done("--profile", RL, "--num-rollout", 1, "--run-dir", tmp_path / "run", *loaded, *share)
    kept = rows(layout.rollout(tmp_path / "run", 0) / layout.SAMPLES)
    all_of_them = rows(layout.rollout(whole, 0) / layout.SAMPLES)
    groups = [row["tokens"] for row in all_of_them if row["group_index"] in (0, 1, 6, 7)]
    assert [row["tokens"] for row in kept] == groups
    (tmp_path / "0.pt").write_bytes(b"PK\x03\x04")
    refused = slime(
        *("train", "--profile", RL, "--num-rollout", 1, "--run-dir", tmp_path / "other"),
        *("--load-debug-rollout-data", tmp_path / "{rollout_id}.pt"),
    )
    assert refused.returncode == 3 and "is a pickle" in refused.stderr, refused.stderr


def test_phases_that_train_nothing(served, tmp_path):
    """Every phase of a profile with --num-rollout 0: what is left is the evaluation."""
    engines = ("--rollout-endpoint", served / layout.ENDPOINT)
    done("--profile", SMALL, "--num-rollout", 0, "--run-dir", tmp_path, *engines)
    (path,) = layout.evaluations(tmp_path / "grpo")
    assert json.loads(path.read_text())["results"][0]["prompts"] == 16
    assert balanced(ledgers(tmp_path))
