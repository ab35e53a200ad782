"""Buffers that an engine keeps open for a moment: one opening for many buckets, closed soon, and the writer knows."""

import time
import weakref

import pytest
import torch

from slime_cli.weights import progress
from slime_cli.weights.opened import Opened


class Source:
    def __init__(self) -> None:
        self.times = 0
        self.last: weakref.ref | None = None

    def __call__(self, size: int) -> torch.Tensor:
        self.times += 1
        made = torch.zeros(size)
        self.last = weakref.ref(made)
        return made


@pytest.fixture
def counts(monkeypatch):
    monkeypatch.setattr(progress, "_CLOSED", 30.0)
    made = progress.Written()
    made.begin(1)
    return made


def holds(counts: progress.Written) -> bool:
    return progress._read(counts._file, progress._place(0, progress._OPEN)) == (1,)


def test_a_buffer_is_opened_once_for_buckets_that_follow_each_other_and_closed_soon_after(counts):
    source, opened = Source(), Opened(1.0, lambda buffer: True)
    for _ in range(5):
        with opened.open((source, (3,)), counts.path, 0) as buffer:
            assert buffer.shape == (3,) and holds(counts)
    del buffer
    assert source.times == 1 and source.last() is not None
    counts.wait_closed()
    assert not holds(counts)
    assert source.last() is None, "it was closed before the counts said so"
    with opened.open((source, (3,)), counts.path, 0):
        assert source.times == 2 and holds(counts)
    counts.wait_closed()
    assert not holds(counts)


def test_a_buffer_that_is_read_for_long_stays_open(counts):
    source, opened = Source(), Opened(0.01, lambda buffer: True)
    with opened.open((source, (3,)), counts.path, 0):
        time.sleep(0.2)
        assert source.last() is not None and holds(counts)
        with opened.open((source, (4,)), counts.path, 0):
            pass
        time.sleep(0.1)
        assert source.times == 2 and holds(counts)
    counts.wait_closed()
    assert not holds(counts)


def test_others_are_closed_at_once(counts):
    source, opened = Source(), Opened()
    with opened.open((source, (3,)), counts.path, 0) as buffer:
        assert not holds(counts)
    del buffer
    assert source.last() is None


def test_an_engine_that_was_killed_is_not_waited_for_twice(counts, monkeypatch):
    monkeypatch.setattr(progress, "_CLOSED", 0.2)
    progress.hold(counts.path, 0, True)
    counts.wait_closed()
    monkeypatch.setattr(progress, "_CLOSED", 1e9)
    counts.wait_closed()


def test_a_buffer_that_cannot_be_opened(counts):
    def gone(*arguments):
        raise RuntimeError("no such buffer")

    with pytest.raises(progress.NotWritten, match="no such buffer"), Opened().open((gone, ()), counts.path, 0):
        pass
