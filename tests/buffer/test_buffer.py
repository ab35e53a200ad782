"""Dealing rows: what cannot be rendered ends the run or is passed over, counted by kind, across a restart too."""

import types

import pytest

from slime_cli.buffer.buffer import DataBuffer
from slime_cli.buffer.gate import Gate
from slime_cli.buffer.journal import Journal
from slime_cli.buffer.types import PromptRow, RowError
from slime_cli.errors import DataError


class Rows(list):
    name = "rows.jsonl"


def render(row: PromptRow):
    if row.prompt == "x":
        raise RowError(row, "rewritten", "it rewrites", "another template")
    return None if row.prompt == "l" else types.SimpleNamespace(text=row.prompt, tokens=[1])


def deal(folder, text: str, on_bad_row: str, said: list) -> DataBuffer:
    rows = Rows(PromptRow(letter, None, {}, "rows.jsonl", i) for i, letter in enumerate(text, 1))
    journal = Journal(folder / "journal.sqlite")
    return DataBuffer(
        journal,
        rows,
        folder=folder,
        gate=Gate(1, None),
        samples_per_prompt=1,
        shuffle=False,
        seed=0,
        render=render,
        on_bad_row=on_bad_row,
        say=said.append,
    )


def test_a_row_that_cannot_be_rendered_ends_the_run_by_its_line(tmp_path):
    buffer = deal(tmp_path, "axb", "fail", [])
    with pytest.raises(RowError, match="rows.jsonl:2: it rewrites"):
        buffer.lease(2, version=0)
    buffer.close()


def test_with_skip_it_is_passed_over_counted_and_said_once(tmp_path):
    said: list[str] = []
    buffer = deal(tmp_path, "axxlb", "skip", said)
    assert [group.row.prompt for group in buffer.lease(2, version=0)] == ["a", "b"]
    assert buffer.prompts.cursor == {
        "epoch": 0,
        "position": 5,
        "skipped": 3,
        "skipped:rewritten": 2,
        "skipped:too_long": 1,
    }
    assert len(said) == 1 and "rows.jsonl:2: it rewrites" in said[0]
    buffer.close()
    again = deal(tmp_path, "axxlb", "skip", said)
    assert again.skipped_by_kind == {"rewritten": 2, "too_long": 1} and again.skipped == 3
    again.close()


def test_rows_of_which_none_can_be_used_are_an_error_with_the_counts(tmp_path):
    buffer = deal(tmp_path, "xl", "skip", [])
    with pytest.raises(DataError, match="none of its 2 rows can be used: .*rewritten.*too_long"):
        buffer.lease(1, version=0)
    buffer.close()
