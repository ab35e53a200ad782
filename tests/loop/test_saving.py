"""When a phase saves and commits, and what it removes, over a scripted learner and a genuine journal."""

import contextlib
import dataclasses
import pathlib
import shutil
import types

import pytest

from slime_cli.buffer.buffer import DataBuffer
from slime_cli.buffer.gate import Gate
from slime_cli.buffer.journal import Journal
from slime_cli.buffer.types import PromptRow, Status
from slime_cli.errors import UsageError
from slime_cli.loop import targets
from slime_cli.loop.saving import Saver
from slime_cli.options.resolve import resolve

RL = "--hf-checkpoint h --prompt-data p --num-rollout 9 --rollout-batch-size 2 --n-samples-per-prompt 2 --rm-type math"


class Ranks:
    """A learner whose writes become durable when told, or when waited for."""

    def __init__(self, root: pathlib.Path):
        self.root = root
        self.calls = []
        self.durable = True
        self.step = 0

    def save(self, root):
        self.calls.append(("save",))
        self.durable = False
        folder = self.root / f"iter_{self.step:07d}"
        folder.mkdir(parents=True)
        return str(folder)

    def saved(self, wait):
        self.calls.append((f"saved(wait={wait})",))
        self.durable = self.durable or wait
        return self.durable

    def keep(self, name, path=None):
        self.calls.append(("keep", name))

    def publish(self, folder, version, how=None):
        self.calls.append(("publish", folder, version))

    def remove(self, paths):
        self.calls.append(("remove",))
        for path in paths:
            shutil.rmtree(path)

    def names(self):
        return [call[0] for call in self.calls]


class Rows(list):
    name = "rows"


def render(row):
    return types.SimpleNamespace(text=row.prompt, tokens=[1])


class Run:
    """A saver whose rollouts are two groups of two samples and one step each."""

    def __init__(self, folder: pathlib.Path, more: str = ""):
        self.folder = folder
        self.trainers = Ranks(folder / "checkpoints")
        self.journal = Journal(folder / "journal.sqlite")
        rows = Rows([PromptRow(prompt="q", label="a", metadata={}, source="d", row=1)])
        options = dict(samples_per_prompt=2, shuffle=False, seed=0, render=render, gate=Gate(2, None))
        self.buffer = DataBuffer(self.journal, rows, folder=folder, **options)
        slime = resolve(f"{RL} {more}".split()).slime
        self.saver = Saver(slime, folder, folder, self.buffer, self.trainers, lambda *a, **k: contextlib.nullcontext())

    def rollout(self, rollout_id: int, save: bool = True, stopped: bool = False) -> None:
        groups = self.buffer.lease(2, version=rollout_id)
        for group in groups:
            done = [
                dataclasses.replace(s, tokens=[1, 2], response_length=1, reward=1.0, status=Status.COMPLETED)
                for s in group.pending
            ]
            self.buffer.finish(group, done, {})
        batch = self.buffer.make(self.buffer.supervised(rollout_id, groups))
        self.saver.commit(wait=False)
        self.trainers.step = rollout_id + 1
        self.saver.trained(rollout_id + 1, rollout_id, [sample.index for sample in batch.samples])
        if save:
            self.saver.save(seconds=1.5, stopped=stopped)

    @property
    def committed(self) -> list[int]:
        return [c.step for c in self.journal.commits()]


def test_a_commit_comes_only_after_every_write_is_durable_and_says_only_what_was_saved(tmp_path):
    run = Run(tmp_path)
    run.rollout(0)
    run.rollout(1, save=False)
    assert run.committed == [] and run.trainers.names()[-2:] == ["saved(wait=False)", "saved(wait=False)"]
    run.trainers.durable = True
    run.saver.commit(wait=False)
    assert run.committed == [1] and [s.step for s in run.saver._trained] == [2]
    run.saver.commit(wait=False)  # nothing is under way
    assert run.committed == [1] and run.journal.ledger().trained == 4


def test_the_next_save_and_the_end_wait_for_the_one_under_way(tmp_path):
    run = Run(tmp_path)
    run.rollout(0)
    run.rollout(1)
    names = run.trainers.names()
    assert names.index("saved(wait=True)") < len(names) - 1 - names[::-1].index("save") and run.committed == [1]
    run.saver.commit(wait=True)
    assert run.committed == [1, 2] and run.journal.ledger().trained_twice == 0


def test_killed_between_scheduling_and_the_end_of_a_write_resumes_from_the_commit_before(tmp_path):
    run = Run(tmp_path)
    run.rollout(0)
    run.saver.commit(wait=True)
    run.rollout(1)
    run.rollout(2, save=False)
    run.journal.close()  # and nothing else: the process is gone
    with Journal(tmp_path / "journal.sqlite") as journal:
        recovery = journal.recover()
        assert recovery.committed.step == 1 and recovery.replay == {1: (4, 5, 6, 7), 2: (8, 9, 10, 11)}
        assert journal.ledger().trained == 4 and journal.ledger().trained_twice == 0


def test_what_is_taken_from_the_weights_is_taken_when_they_are_saved(tmp_path):
    run = Run(
        tmp_path, f"--use-kl-loss --kl-loss-coef 0.1 --ref-update-interval 1 --save-hf {tmp_path}/hf/{{rollout_id}}"
    )
    run.rollout(0)
    assert run.committed == [] and ("keep", "reference") in run.trainers.calls
    assert ("publish", str(tmp_path / "hf" / "0"), "v000001") in run.trainers.calls


def test_a_stage_that_stopped_says_so_with_its_commit(tmp_path):
    run = Run(tmp_path)
    run.rollout(0, stopped=True)
    assert run.journal.get("stopped") is None
    run.saver.commit(wait=True)
    assert run.journal.get("stopped") == 0


@pytest.mark.parametrize("keep", [1, 3])
def test_the_newest_of_the_stage_stay_and_what_is_not_its_own(tmp_path, keep):
    run = Run(tmp_path, f"--keep-checkpoints {keep}")
    foreign = tmp_path / "checkpoints" / "iter_0000900"
    foreign.mkdir(parents=True)
    for rollout_id in range(5):
        run.rollout(rollout_id)
        run.saver.commit(wait=True)
        assert pathlib.Path(run.journal.commits()[-1].checkpoint).is_dir()
    left = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert left == [f"iter_{step:07d}" for step in range(6 - keep, 6)] + [foreign.name]


def test_a_folder_with_checkpoints_of_another_run_is_refused_before_the_first_save_only(tmp_path):
    root = tmp_path / "checkpoints"
    run = Run(tmp_path)
    for journal in (run.journal, None):
        targets.refuse_others(root, journal)
    run.rollout(0)
    (root / "iter_0000001" / "checkpoint.json").touch()
    targets.refuse_others(root, run.journal)
    other = Run(tmp_path / "other", f"--save {root}")
    for journal in (other.journal, None):
        with pytest.raises(UsageError, match="another run already, up to iteration 1"):
            targets.refuse_others(root, journal)


def test_the_stages_of_a_run_share_save_without_meeting(tmp_path):
    slime = resolve(f"{RL} --save {tmp_path / 'c'}".split()).slime
    roots = [
        Saver(slime, folder, tmp_path, None, None, None).root
        for folder in (tmp_path, tmp_path / "sft", tmp_path / "grpo")
    ]
    assert roots == [tmp_path / "c", tmp_path / "c" / "sft", tmp_path / "c" / "grpo"]


def test_a_rollout_that_is_not_committed_stays_whatever_keep_rollouts_says(tmp_path):
    run = Run(tmp_path, "--keep-rollouts 1")
    run.rollout(0)
    run.rollout(1, save=False)
    run.rollout(2, save=False)
    run.saver.commit(wait=True)
    assert run.committed == [1] and sorted(p.name for p in (tmp_path / "rollouts").iterdir()) == ["000001", "000002"]


def test_the_checkpoint_of_the_reference_stays(tmp_path):
    run = Run(tmp_path, "--keep-checkpoints 1 --use-kl-loss --kl-loss-coef 0.1 --ref-update-interval 3")
    for rollout_id in range(5):
        run.rollout(rollout_id)
        run.saver.commit(wait=True)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["iter_0000003", "iter_0000005"]
