"""The peak of each part of a rank's work, and over all parts: the allocator has one count for both."""

import pytest
import torch

from slime_cli.hardware import peak


class Allocator:
    """What torch counts of a GPU."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def becomes(self, size: int) -> None:
        self.now = size
        self.peak = max(self.peak, size)

    def reset(self) -> None:
        self.peak = self.now


@pytest.fixture
def allocator(monkeypatch):
    made = Allocator()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: made.peak)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", made.reset)
    return made


def test_parts_count_anew_and_the_most_of_all_is_kept(allocator):
    allocator.becomes(900)
    allocator.becomes(10)
    peak.forget()
    assert peak.most() == 10
    allocator.becomes(50)  # between two parts
    found = []
    for size in (70, 40):
        about = {}
        with peak.during(about):
            allocator.becomes(size)
            allocator.becomes(20)
        found.append(about["peak_bytes"])
    assert (found, peak.most()) == ([70, 40], 70)
    allocator.becomes(80)
    assert peak.most() == 80
    peak.forget()
    assert peak.most() == 80, "they are there still"
