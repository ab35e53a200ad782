"""The schedules' benchmark: each schedule's phase runs over the scripted parts to its end, and what it dispatched is
trained (:func:`bench.schedules.measured` raises otherwise). How fast it is, is no matter of a test."""

import pytest

from bench import schedules, scripted
from slime_cli.models import tiny

pytestmark = pytest.mark.slow


def test_every_schedule_trains_all_that_it_dispatched(tmp_path, monkeypatch):
    monkeypatch.setattr(scripted, "SECONDS", 0.01)
    monkeypatch.setattr(schedules, "ROLLOUTS", 3)
    model = tiny.make("tiny:qwen3?num_hidden_layers=1&hidden_size=32&head_dim=8", tmp_path / "model")
    found = schedules.ratios(str(model), tmp_path / "runs")
    assert set(found) == {"sync", "one-step-off", "async"} and found["sync"]["ratio"] == 1
    for schedule, one in found.items():
        assert one["ratio"] > 0 and 0 <= one["trainer_idle"] <= 1, schedule
        assert one["rollout_idle"] is not None, "generation was seen"
