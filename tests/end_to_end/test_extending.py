"""A finished supervised run, which needs no engine, is trained further by a larger --num-rollout, and by
nothing else."""

import json

import pytest

from slime_cli.manifests import checkpoints
from slime_cli.tracing.ledger import balanced, ledgers
from tests.end_to_end.conftest import TINY, slime
from tests.end_to_end.test_async_save import DATA
from tests.end_to_end.test_resume import _lines

OPTIONS = (
    "--loss-type sft_loss --apply-chat-template --rollout-batch-size 8 --num-steps-per-rollout 2 --lr 1e-3 "
    f"--use-dynamic-batch-size --max-tokens-per-gpu 512 --hf-checkpoint {TINY} --prompt-data {DATA}"
).split()


@pytest.mark.timeout(600)
def test_a_larger_number_of_rollouts_goes_on_from_the_last_commit(tmp_path):
    run = tmp_path / "run"
    words = ("train", "--run-dir", run, *OPTIONS)
    first = slime(*words, "--num-rollout", 1, "--save-interval", 1)
    assert first.returncode == 0, first.stdout[-2000:] + first.stderr[-2000:]
    more = slime(*words, "--num-rollout", 3, "--save-interval", 2)
    assert more.returncode == 0, more.stdout[-2000:] + more.stderr[-2000:]
    said = " ".join(more.stdout.split())
    assert "--num-rollout was 1, now 3" in said and "resumed at step 2" in said
    assert json.loads((run / "summary.json").read_text())["steps"] == 6 and _lines(run / "metrics.jsonl") == 3
    assert checkpoints.iterations(run / "checkpoints") == [4, 6] and balanced(ledgers(run))
    (ledger,) = ledgers(run).values()
    assert (ledger.dispatched, ledger.trained, ledger.trained_twice) == (24, 24, 0)

    fewer = slime(*words, "--num-rollout", 2)
    assert fewer.returncode == 0 and "this run is finished" in fewer.stdout
    other = slime(*words, "--num-rollout", 9, "--lr", "1e-2")
    assert other.returncode == 2 and "--lr was 0.001, now 0.01" in other.stderr
    found = json.loads((run / "run.json").read_text())
    assert [attempt["number"] for attempt in found["attempts"]] == [1, 2]
    assert found["attempts"][1]["changed"] == {"slime.num_rollout": [1, 3], "slime.save_interval": [1, 2]}
