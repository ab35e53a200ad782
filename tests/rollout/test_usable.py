"""Which rows a run can use, before it starts."""

import pytest

from slime_cli.buffer.types import PromptRow, RowError
from slime_cli.errors import DataError
from slime_cli.rollout import usable


class Rows(list):
    name = "rows.jsonl"


def rows(text: str) -> Rows:
    return Rows(PromptRow(letter, None, {}, "rows.jsonl", i) for i, letter in enumerate(text, 1))


def render(row: PromptRow) -> str | None:
    if row.prompt == "x":
        raise RowError(row, "rewritten", "it rewrites", "another template")
    return None if row.prompt == "l" else row.prompt


def test_rows_are_counted_by_what_is_wrong_with_them():
    found = usable.look(rows("axlxb"), render, skip=True, every=True)
    assert (found.looked_at, found.usable, found.problems) == (5, 2, {"rewritten": 2, "too_long": 1})
    assert found.first["rewritten"] == "rows.jsonl:2: it rewrites" and found.first["too_long"].startswith(
        "rows.jsonl:3: longer"
    )


def test_the_first_bad_row_ends_the_command_unless_it_is_to_be_skipped():
    with pytest.raises(RowError, match="rows.jsonl:2: it rewrites"):
        usable.look(rows("axb"), render, skip=False, every=True)


def test_no_usable_row_at_all_is_an_error_with_the_reasons():
    with pytest.raises(
        DataError, match="none of its 2 rows can be used: rows.jsonl:1: it rewrites; rows.jsonl:2: longer"
    ):
        usable.look(rows("xl"), render, skip=True, every=False)


def test_only_the_first_rows_are_looked_at_unless_the_number_of_rollouts_depends_on_all(monkeypatch):
    monkeypatch.setattr(usable, "ROWS", 3)
    assert usable.look(rows("aaaax"), render, skip=False, every=False).looked_at == 3
    with pytest.raises(RowError):
        usable.look(rows("aaaax"), render, skip=False, every=True)


def test_time_bounds_the_look_but_for_a_few_rows(monkeypatch):
    monkeypatch.setattr(usable, "AT_LEAST", 2)
    monkeypatch.setattr(usable, "SECONDS", -1.0)
    assert usable.look(rows("aaaa"), render, skip=False, every=False).looked_at == 2
    assert usable.look(rows("aaaa"), render, skip=False, every=True).looked_at == 4


def test_an_epoch_counts_usable_rows_and_says_what_is_left_over():
    assert usable.rollouts("d", 10, 1, 4) == (2, 2)
    assert usable.rollouts("d", 3, 3, 4) == (2, 1)
    assert usable.rollouts("d", 4, 1, 4) == (1, 0)
    with pytest.raises(
        DataError, match="--num-epoch 1 over 3 rows that can be used is less than one --rollout-batch-size 8"
    ) as caught:
        usable.rollouts("d", 3, 1, 8)
    assert "3 or less" in caught.value.fix and "--num-rollout" in caught.value.fix
