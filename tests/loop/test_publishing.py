"""When engines get weights, and whose they held at a commit: told by replaying every kill point of a run."""

import itertools

import pytest

from slime_cli.buffer.records import Commit
from slime_cli.loop import publishing
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
    s = SlimeOptions(update_weights_interval=interval, eval_interval=evaluated)
    assert publishing.step_held(s, commits, total) == 0
    for rollout_id in range(total):
        pending = [commit(rollout_id * steps + i + 1, rollout_id) for i in range(steps)]
        commits = [*commits, *pending]
        if publishing.due(s, rollout_id, total):
            held = pending[-1].step
        if (rollout_id + 1) % saved == 0:  # a commit; a kill after it finds exactly these
            assert publishing.step_held(s, commits, total) == held
    assert held == total * steps, "the end is always published"


def test_always_before_an_evaluation():
    s = SlimeOptions(update_weights_interval=100, eval_interval=4)
    assert [r for r in range(10) if publishing.due(s, r, 10)] == [3, 7, 9]


def test_a_version_is_there_when_its_manifest_is(tmp_path):
    assert publishing.complete(tmp_path, 3) is None
    (tmp_path / "weights" / "v000003").mkdir(parents=True)
    assert publishing.complete(tmp_path, 3) is None
    (tmp_path / "weights" / "v000003" / "manifest.json").touch()
    assert publishing.complete(tmp_path, 3) == tmp_path / "weights" / "v000003"
