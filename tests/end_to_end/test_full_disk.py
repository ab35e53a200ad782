"""A disk that fills up while a trainer rank writes its checkpoint: exit 4 with the path, and the same command goes on
when there is room."""

import json
import subprocess

import pytest

from slime_cli.tracing.ledger import balanced, ledgers
from tests.end_to_end.conftest import TINY, slime
from tests.test_disk import FULL, small  # noqa: F401 (a fixture)

PROMPTS = (
    "reasoning-gym:basic_arithmetic?operators=+&min_terms=2&max_terms=2&max_digits=1&allow_parentheses=false"
    "&allow_negation=false&size=400&seed=1"
)
WORDS = f"""--hf-checkpoint {TINY} --prompt-data {PROMPTS} --apply-chat-template --loss-type sft_loss --num-rollout 3
    --rollout-batch-size 16 --save-interval 1 --use-dynamic-batch-size --max-tokens-per-gpu 512
    --lr 1e-3 --min-lr 1e-3""".split()


@pytest.mark.timeout(900)
def test_a_checkpoint_that_does_not_fit_ends_the_run_by_its_path_and_nothing_is_lost(small, tmp_path):  # noqa: F811
    """Written by Megatron's own writer in a process of its own (--async-save), which tells of it in words of its
    own."""
    run = tmp_path / "run"
    size = ["mount", "-o", "remount", str(small)]
    words = ("train", *WORDS, "--async-save", "--run-dir", run, "--save", small / "checkpoints")
    subprocess.run(
        [*size, "-o", "size=3m"], check=True
    )  # two of its checkpoints have 1.3 MB each, and one comes before one goes
    full = slime(*words)
    assert full.returncode == 4, full.stdout[-2000:] + full.stderr[-2000:]
    assert f"error: {small / 'checkpoints'}: {FULL}" in full.stderr and "Traceback" not in full.stderr
    part = ledgers(run)[""]
    assert part.balanced and part.trained < part.dispatched
    subprocess.run([*size, "-o", "size=30m"], check=True)
    done = slime(*words)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert balanced(ledgers(run)) and ledgers(run)[""].trained == 48
    assert [json.loads(line)["rollout_id"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [0, 1, 2]
