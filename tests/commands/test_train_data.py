"""What ``slime train`` finds out about its data before anything is started, on a real tokenizer."""

import json

import pytest

from slime_cli.buffer.types import RowError
from slime_cli.commands import train_data
from slime_cli.errors import DataError, UsageError
from slime_cli.models import tiny
from slime_cli.options.resolve import Resolved, resolve


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(tiny.make("tiny:qwen3?num_hidden_layers=1", tmp_path_factory.mktemp("data") / "model"))


def stage(folder, rows: list[dict], model: str, words: str) -> tuple[str, Resolved]:
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = f"--hf-checkpoint {model} --prompt-data {folder}/rows.jsonl --rollout-max-response-len 6 {words}"
    return "train", resolve(given.split(), (), "train")


def check(*found: tuple[str, Resolved]) -> tuple[dict[str, int], list[str]]:
    said: list[str] = []
    opened = [(name, options, train_data.sources(options.slime)) for name, options in found]
    return train_data.check(opened, said.append), said


SHORT = {"input": "1 + 2", "label": "3"}
LONG = {"input": "1 + " * 20, "label": "3"}


def test_epochs_make_rollouts_of_the_rows_that_can_be_used(tmp_path, model):
    rows = [SHORT] * 4 + [LONG] * 6
    found = stage(tmp_path, rows, model, "--num-epoch 3 --rollout-batch-size 5 --rollout-max-prompt-len 20")
    rollouts, said = check(found)
    assert rollouts == {"train": 2}
    assert any("6 of 10 rows looked at are passed over (too_long)" in line for line in said)
    assert any(
        "--num-epoch 3 over 4 of 10 rows makes 2 rollouts of 5 prompts; 2 are left over" in line for line in said
    )


def test_an_epoch_that_fills_no_rollout_is_refused(tmp_path, model):
    with pytest.raises(DataError, match="--num-epoch 1 over 3 rows"):
        check(stage(tmp_path, [SHORT] * 3, model, "--num-epoch 1 --rollout-batch-size 8"))
    rollouts, said = check(stage(tmp_path, [SHORT] * 3, model, "--num-rollout 2 --rollout-batch-size 8"))
    assert rollouts == {} and not said, "with --num-rollout rows are dealt again, as was asked for"


def test_a_prompt_beyond_the_context_is_named_or_passed_over(tmp_path, model):
    rows = [SHORT, {"input": "1+" * 400, "label": "3"}]
    words = "--num-rollout 1 --rollout-batch-size 1"
    with pytest.raises(
        RowError, match="rows.jsonl:2: it has 800 tokens, 7 are kept for the answer, and the model takes 512"
    ):
        check(stage(tmp_path, rows, model, words))
    with pytest.raises(RowError, match="rows.jsonl:1: it has 4 tokens.* takes 10"):
        check(stage(tmp_path, rows, model, f"{words} --sglang-context-length 10"))
    _, said = check(stage(tmp_path, rows, model, f"{words} --on-bad-row skip"))
    assert len(said) == 1 and "(beyond_context), the first:" in said[0] and "rows.jsonl:2" in said[0]


def test_lengths_that_never_fit_are_a_usage_error(tmp_path, model):
    words = "--num-rollout 1 --rollout-batch-size 1 --rollout-max-prompt-len 507"
    with pytest.raises(UsageError, match="507 .* --rollout-max-response-len 6 is more than the model's 512 positions"):
        check(stage(tmp_path, [SHORT], model, words))


def test_evaluation_rows_are_looked_at_too(tmp_path, model):
    (tmp_path / "held.jsonl").write_text(json.dumps({"input": "<|end|>"}))
    with pytest.raises(RowError, match="held.jsonl:1: the prompt holds the control token"):
        check(
            stage(
                tmp_path,
                [SHORT],
                model,
                f"--num-rollout 1 --rollout-batch-size 1 --eval-prompt-data held {tmp_path}/held.jsonl",
            )
        )


def test_supervised_rows_are_rendered_with_their_answers(tmp_path, model):
    words = "--num-rollout 1 --rollout-batch-size 1 --loss-type sft_loss --apply-chat-template --label-key label"
    with pytest.raises(RowError, match="rows.jsonl:2: the label is empty"):
        check(stage(tmp_path, [SHORT, SHORT | {"label": ""}], model, words))
    assert check(stage(tmp_path, [SHORT], "tiny:qwen3?num_hidden_layers=1", words)) == ({}, [])
