"""When engines get weights, and whose they held at a commit: told by replaying every kill point of a run."""

import itertools

import pytest

from slime_cli.buffer.records import Commit
from slime_cli.loop.publishing import Timetable
from slime_cli.options.groups import SlimeOptions


def commit(step: int, rollout_id: int) -> Commit:
    return Commit(step, rollout_id, f"v{step:06d}", "c", 1, 0.0)


@pytest.mark.parametrize(
    ("interval", "evaluated", "saved", "steps"), list(itertools.product((1, 2, 3), (None, 2, 5), (1, 2, 4), (1, 2)))
)
def test_a_resume_gives_the_engines_what_they_had(interval, evaluated, saved, steps):
    total = 9
    held = 0
    commits = []
    timetable = Timetable.of(SlimeOptions(update_weights_interval=interval, eval_interval=evaluated), total)
    assert timetable.step_held(commits) == 0
    for rollout_id in range(total):
        pending = [commit(rollout_id * steps + i + 1, rollout_id) for i in range(steps)]
        commits = [*commits, *pending]
        if timetable.due(rollout_id):
            held = pending[-1].step
        if (rollout_id + 1) % saved == 0:  # a commit; a kill after it finds exactly these
            assert timetable.step_held(commits) == held
    assert held == total * steps, "the end is always published"


def test_always_before_an_evaluation():
    timetable = Timetable(total=10, interval=100, evaluation_interval=4)
    assert [r for r in range(10) if timetable.evaluated(r)] == [3, 7]
    assert [r for r in range(10) if timetable.due(r)] == [3, 7, 9]
