"""The Data Buffer, by hand: rows that cannot be rendered end the run or are passed over and counted by kind, across a
restart too; groups that go out again, and which of them first."""

import dataclasses
import types

import pytest

from slime_cli.buffer.buffer import DataBuffer
from slime_cli.buffer.gate import Gate
from slime_cli.buffer.journal import Journal
from slime_cli.buffer.types import PromptRow, RowError, Sample, Status
from slime_cli.errors import DataError
from slime_cli.manifests.layout import version_name


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


def opened(folder, letters="abcdef", *, batch=1, size=1, staleness=None) -> DataBuffer:
    rows = Rows(PromptRow(letter, None, {}, "rows.jsonl", i) for i, letter in enumerate(letters, 1))
    dealing = dict(samples_per_prompt=size, shuffle=False, seed=0, render=render)
    return DataBuffer(Journal(folder / "journal.sqlite"), rows, folder=folder, gate=Gate(batch, staleness), **dealing)


def answered(sample: Sample, version: int = 0, *, whole: bool = True) -> Sample:
    made = dataclasses.replace(sample, tokens=[1], status=Status.COMPLETED if whole else Status.ABORTED)
    made.append([2], log_probs=[-0.5], version=version_name(version), trained=True)
    return made


def test_a_trajectory_that_was_finished_and_is_left_out_later_is_in_no_batch(tmp_path):
    """A rollout function leaves out what an earlier attempt had finished."""
    buffer = opened(tmp_path, size=2)
    (group,) = buffer.lease(1, version=0)
    buffer.finish(group, [dataclasses.replace(answered(group.pending[0]), reward=1.0)], {})
    buffer.close()
    buffer = opened(tmp_path, size=2)
    (group,) = buffer.lease(1, version=0)
    buffer.finish(group, [dataclasses.replace(answered(group.pending[0]), reward=1.0)], {0: "rollout_function"})
    buffer.accept(group)
    batch = buffer.make(buffer.choose(0))
    assert [sample.index for sample in batch.samples] == [1]
    assert buffer.ledger().balanced and buffer.ledger().dropped == {"rollout_function": 1}
    buffer.close()


def test_a_sample_that_tells_no_version_counts_from_when_its_group_was_leased(tmp_path):
    buffer = opened(tmp_path, batch=2)
    buffer.steps_per_rollout = 2
    for version, told in ((3, False), (4, True)):
        (group,) = buffer.lease(1, version=version)
        made = dataclasses.replace(answered(group.pending[0], version * 2), reward=1.0)
        buffer.finish(group, [made if told else dataclasses.replace(made, spans=[])], {})
        buffer.accept(group)
    batch = buffer.make(buffer.choose(5))
    assert batch.staleness(10, 2).tolist() == [2, 1] and batch.untold == 1
    buffer.close()
    buffer = opened(tmp_path, batch=2)
    again = buffer.replay(5, buffer.made_before(5))
    assert again.staleness(10, 2).tolist() == [2, 1] and again.untold == 1, "as before the kill"
    buffer.close()


def test_a_group_that_older_weights_would_make_older_goes_out_after_those_that_they_do_not(tmp_path):
    """A kill lost the weights that wrote group 0. There is room for group 1 alone, which lacks its reward only."""
    buffer = opened(tmp_path, staleness=2)
    groups = [buffer.lease(1, version=version)[0] for version in (4, 5)]
    for group, whole in zip(groups, (False, True), strict=True):
        group.pending = [answered(group.pending[0], whole=whole)]
        buffer.release(group, keep=True)
    buffer._next_rollout = 4
    room = buffer.room(1)
    assert room == 1
    assert [group.index for group in buffer.lease(room, version=1)] == [1]
    buffer.close()
