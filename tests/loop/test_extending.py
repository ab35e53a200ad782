"""A finished run with a larger number of rollouts is trained further; with the same or a smaller one it shows its
result."""

import pathlib

import pytest

from slime_cli.buffer.journal import Journal
from slime_cli.errors import UsageError
from slime_cli.loop import attempts, extending
from slime_cli.manifests import layout
from slime_cli.options.resolve import Resolved, resolve

BASE = "--hf-checkpoint h --prompt-data p --rollout-batch-size 8 --loss-type sft_loss"


def trained(folder: pathlib.Path, rollouts: int, **marks) -> None:
    folder.mkdir(exist_ok=True)
    with Journal(folder / layout.JOURNAL) as journal:
        for rollout_id in range(rollouts):
            step = rollout_id + 1
            journal.commit(steps=[(step, rollout_id, f"v{step:06d}", [])], checkpoint=f"iter_{step}")
        for mark, value in marks.items():
            journal.put(mark, value)


def options(more: str = "--num-rollout 3", profiles=()) -> Resolved:
    return resolve(f"{BASE} {more}".split(), profiles)


@pytest.fixture
def run(tmp_path):
    attempts.claim(options(), tmp_path)
    trained(tmp_path, 3, finished=3)
    (tmp_path / layout.SUMMARY).write_text("{}")
    return tmp_path


def reopen(resolved: Resolved, run_dir: pathlib.Path, rollouts=None) -> list[str]:
    said = []
    extending.reopen(attempts.phases(resolved, run_dir), run_dir, rollouts or {}, said.append)
    return said


def finished_with(folder: pathlib.Path) -> int | None:
    """Rollouts; a phase that is asked for no more than these is not begun again (loop/phase.py)."""
    with Journal(folder / layout.JOURNAL) as journal:
        return journal.get("finished")


@pytest.mark.parametrize(("rollouts", "ends"), [(1, True), (3, True), (4, False)])
def test_only_a_larger_number_of_rollouts_is_more(run, rollouts, ends):
    assert extending.finished(options(f"--num-rollout {rollouts}"), run) is ends


def test_a_run_without_a_result_is_not_finished(tmp_path):
    assert not extending.finished(options(), tmp_path)


def test_more_rollouts_open_the_phase_again_and_take_its_result_away(run):
    assert reopen(options("--num-rollout 5"), run) == ["train: 3 rollouts are trained, 5 are asked for"]
    assert finished_with(run) is None and not (run / layout.SUMMARY).exists()
    assert reopen(options("--num-rollout 5"), run) == [], "killed and started again, there is nothing left to open"
    assert not extending.finished(options("--num-rollout 5"), run)


def test_a_phase_that_has_enough_stays_finished(run):
    assert reopen(options("--num-rollout 2"), run) == [] and finished_with(run) == 3


def test_epochs_are_counted_in_rollouts_once_the_data_is_known(tmp_path):
    attempts.claim(options("--num-epoch 1"), tmp_path)
    trained(tmp_path, 3, finished=3)
    (tmp_path / layout.SUMMARY).write_text("{}")
    assert extending.finished(options("--num-epoch 1"), tmp_path), "as before: the data need not be looked at"
    more = options("--num-epoch 2")
    assert not extending.finished(more, tmp_path)
    assert extending.finished(more, tmp_path, {"train": 3}) and not extending.finished(more, tmp_path, {"train": 6})
    assert extending.finished(options("--num-rollout 3"), tmp_path)
    assert reopen(more, tmp_path, {"train": 6}) == ["train: 3 rollouts are trained, 6 are asked for"]


def test_a_phase_that_reached_its_loss_stays_stopped(tmp_path):
    attempts.claim(options("--num-rollout 9 --stop-at-loss 1"), tmp_path)
    trained(tmp_path, 3, finished=3, stopped=2)
    (tmp_path / layout.SUMMARY).write_text("{}")
    more = options("--num-rollout 12 --stop-at-loss 1")
    assert extending.finished(more, tmp_path)
    assert "it reached --stop-at-loss" in reopen(more, tmp_path)[0] and finished_with(tmp_path) == 12


def test_a_phase_stays_as_the_next_one_was_trained_from_it(tmp_path):
    path = tmp_path / "two.yaml"
    path.write_text("phases:\n- {name: warm}\n- {name: tune}\n")
    two = options(profiles=[str(path)])
    attempts.claim(two, tmp_path)
    trained(tmp_path / "warm", 3, finished=3)
    more = options("--num-rollout 5", [str(path)])
    assert reopen(more, tmp_path) == ["warm: 3 rollouts are trained, 5 are asked for"], "the next has not begun"
    trained(tmp_path / "tune", 3, finished=3)
    with Journal(tmp_path / "warm" / layout.JOURNAL) as journal:
        journal.put("finished", 3)
    (tmp_path / layout.SUMMARY).write_text("{}")
    assert not extending.finished(more, tmp_path)
    assert reopen(more, tmp_path) == [
        "warm: 3 rollouts are trained, 5 are asked for; it stays as it is, for tune was trained from its weights",
        "tune: 3 rollouts are trained, 5 are asked for",
    ]
    assert finished_with(tmp_path / "warm") == 5 and finished_with(tmp_path / "tune") is None


def test_each_attempt_is_recorded_with_what_it_changed(run):
    attempts.claim(options("--num-rollout 5 --save-interval 2"), run)
    found = attempts.claim(options("--num-rollout 5"), run)
    assert [(a.number, a.changed) for a in found.attempts] == [
        (1, {}),
        (2, {"slime.num_rollout": (3, 5), "slime.save_interval": (None, 2)}),
        (3, {"slime.save_interval": (2, None)}),
    ]
    assert found.attempt == 3 and found.options["slime"]["num_rollout"] == 5
    assert found.attempts[1].argv[-2:] == ["--save-interval", "2"]


def test_what_would_rewrite_the_past_is_refused_by_name(run):
    before = (run / layout.RUN).read_bytes()
    with pytest.raises(UsageError, match="--prompt-data was p, now q; --lr was 1e-06, now 0.1") as caught:
        attempts.claim(
            resolve(
                "--hf-checkpoint h --prompt-data q --rollout-batch-size 8 --loss-type sft_loss "
                "--num-rollout 5 --lr 0.1".split()
            ),
            run,
        )
    assert "--num-rollout" not in caught.value.message and (run / layout.RUN).read_bytes() == before


def test_an_evaluation_alone_is_finished_until_rollouts_are_asked_for(tmp_path):
    attempts.claim(options("--num-rollout 0"), tmp_path)
    trained(tmp_path, 0, finished=0)
    (tmp_path / layout.SUMMARY).write_text("{}")
    assert extending.finished(options("--num-rollout 0"), tmp_path)
    assert not extending.finished(options("--num-rollout 2"), tmp_path)
    assert not reopen(options("--num-rollout 2"), tmp_path) and not (tmp_path / layout.SUMMARY).exists()


def test_rollouts_that_are_made_and_not_trained_count_as_made(tmp_path):
    alone = BASE.replace("sft_loss", "policy_loss") + " --debug-rollout-only"
    wanted = {n: resolve(f"{alone} --num-rollout {n}".split()) for n in (3, 4)}
    attempts.claim(wanted[3], tmp_path)
    trained(tmp_path, 0, finished=3)
    (tmp_path / layout.SUMMARY).write_text("{}")
    assert extending.finished(wanted[3], tmp_path) and not extending.finished(wanted[4], tmp_path)
    assert reopen(wanted[4], tmp_path) == ["train: 3 rollouts are made, 4 are asked for"]
    assert finished_with(tmp_path) is None
