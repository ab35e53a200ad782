"""The example of docs/hooks.md over genuine engines: two turns and a calculator, by the client of ``slime_cli.hooks``.

1. Tool tokens are untrained, have log-probability 0 and no version; all others have the sampled one's, and the
  version's.
2. The trainer computes the same log-probabilities over both turns. 3. The ledger balances. 4. So with engines of the
run's own on a random port, and with an endpoint.
"""

import itertools
import json
import pathlib
import re

import pyarrow.parquet as pq
import pytest

from slime_cli.models import tokens
from slime_cli.tracing.ledger import balanced, ledgers
from tests.end_to_end.conftest import TINY, slime

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "hooks.md"
PROMPTS = "reasoning-gym:basic_arithmetic?operators=+&min_terms=2&max_terms=2&max_digits=1&size=50&seed=1"
BUDGET = 48


def example(folder: pathlib.Path) -> pathlib.Path:
    """``calculator.py`` of the page."""
    file = folder / "calculator.py"
    file.write_text(re.search(r"```python\n(# calculator\.py.*?)```", PAGE.read_text(), re.DOTALL)[1])
    return file


@pytest.mark.parametrize("engines", ["endpoint", "own"])
def test_two_turns_with_a_tool(engines: str, served: pathlib.Path, tmp_path: pathlib.Path):
    mine = example(tmp_path)
    run = tmp_path / "run"
    attached = ["--rollout-endpoint", served / "endpoint.json"] if engines == "endpoint" else []
    done = slime(
        *("train", "--hf-checkpoint", TINY, "--run-dir", run, *attached, "--prompt-data", PROMPTS),
        *("--apply-chat-template", "--rollout-max-response-len", BUDGET, "--num-rollout", 2, "--rollout-batch-size", 2),
        *("--n-samples-per-prompt", 2, "--custom-generate-function-path", f"{mine}:generate"),
        *("--custom-rm-path", f"{mine}:reward", "--use-dynamic-batch-size", "--max-tokens-per-gpu", 256),
        *("--lr", "1e-3", "--skip-eval-before-train"),
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (part,) = ledgers(run).values()
    assert balanced({"train": part}) and part.trained == 8
    tokenizer = tokens.load(str(served / "model"))
    for rollout_id in range(2):
        rows = pq.read_table(run / "rollouts" / f"{rollout_id:06d}" / "samples.parquet").to_pylist()
        assert len(rows) == 4
        for row in rows:
            judge(row, f"v{rollout_id:06d}", tokenizer)
    assert json.loads((run / "summary.json").read_text())["logprob_abs_diff_max"] <= 1e-4


def judge(row: dict, version: str, tokenizer: object) -> None:
    response = row["tokens"][len(row["tokens"]) - row["response_length"] :]
    mask, log_probs = row["loss_mask"], row["rollout_log_probs"]
    runs = [(trained, len(list(part))) for trained, part in itertools.groupby(mask)]
    assert [trained for trained, _ in runs] == [1, 0, 1] and sum(length for _, length in runs) == len(response)
    assert [(span["length"], span["version"]) for span in row["spans"]] == [
        (length, version if trained else None) for trained, length in runs
    ]
    assert row["weight_versions"] == [version, version]
    assert all(value < 0 if trained else value == 0 for trained, value in zip(mask, log_probs, strict=True))
    first, said = runs[0][1], runs[1][1]
    assert first <= BUDGET // 2 and len(response) <= BUDGET + said
    text = tokenizer.decode(response[first : first + said])
    assert re.fullmatch(r" = (-?\d+|\?) ", text) and text in row["response"]
    assert json.loads(row["metadata"])["turn"] == 2
    assert json.loads(row["reward"]) == float(row["label"] in row["response"])
