"""Saves a phase's checkpoints, and commits the trajectories that each contains.
:class:`slime_cli.loop.phase.Phase` owns it.

Always in this order: a checkpoint is complete on disk, one transaction of the journal names it with the trajectories
that it was trained on, older checkpoints are removed. With ``--async-save`` the first is written while training
continues, and the others follow at the next :meth:`Saver.commit` that finds it done; one checkpoint at a time is under
way.
"""

import contextlib
import dataclasses
import pathlib
import shutil
from collections.abc import Callable, Sequence
from typing import Any

from slime_cli.buffer.buffer import DataBuffer
from slime_cli.cluster.learner import Learner
from slime_cli.loop import targets
from slime_cli.manifests import layout
from slime_cli.manifests.layout import version_name
from slime_cli.options.groups import SlimeOptions


@dataclasses.dataclass(frozen=True)
class Step:
    """An optimizer step, as :meth:`slime_cli.buffer.journal.Journal.commit` takes it."""

    step: int
    rollout_id: int
    version: str
    samples: Sequence[int]


@dataclasses.dataclass(frozen=True)
class Saving:
    """A checkpoint under way, and what is committed with it."""

    checkpoint: str
    steps: list[Step]
    seconds: float
    """The phase's duration so far."""
    stopped: bool
    """``--stop-at-loss`` was reached in it."""


class Saver:
    """``folder`` is the phase's in ``run_dir``; ``span`` a tracer's. Its methods block: the loop calls them in a
    thread."""

    def __init__(
        self,
        slime: SlimeOptions,
        folder: pathlib.Path,
        run_dir: pathlib.Path,
        buffer: DataBuffer,
        learner: Learner,
        span: Callable[..., contextlib.AbstractContextManager[Any]],
    ) -> None:
        self.s = slime
        self.folder = folder
        self.buffer = buffer
        self.learner = learner
        self.span = span
        self.phase = folder.relative_to(run_dir)
        self.root = targets.root(slime, folder, run_dir)
        self._trained: list[Step] = []
        self._saving: Saving | None = None

    def trained(self, step: int, rollout_id: int, samples: Sequence[int]) -> None:
        """A step was taken; the next :meth:`save` has it."""
        self._trained.append(Step(step, rollout_id, version_name(step), samples))

    def save(self, *, seconds: float, stopped: bool) -> None:
        """A checkpoint after the last step, and what else is taken from the present weights. Committed at once if that
        can be."""
        self.commit(wait=True)
        last = self._trained[-1]
        self.buffer.put_state(saving=last.step)
        with self.span("save"):
            path = self.learner.save(str(self.root))
        self._saving = Saving(path, self._trained, seconds, stopped)
        self._trained = []
        if self.reference_due(last.rollout_id):
            self.learner.keep("reference")
        if self.s.save_hf:
            target = (pathlib.Path(self.s.save_hf.format(rollout_id=last.rollout_id)) / self.phase).resolve()
            self.learner.publish(str(target), last.version)
        self.commit(wait=False)

    def commit(self, wait: bool) -> None:
        """Commits the checkpoint under way if it is durable; it can be waited for. Nothing to do when none is under
        way."""
        if self._saving is None or not self.learner.saved(wait):
            return
        done = self._saving
        self._saving = None
        with self.span("commit"):
            if done.stopped:  # holds once the commit of that rollout is there
                self.buffer.put_state(stopped=done.steps[-1].rollout_id)
            self.buffer.commit(done.steps, done.checkpoint)
            self.buffer.put_state(seconds=done.seconds)
            self.learner.remove(self._outdated())
            self._prune_rollouts(done.steps[-1].rollout_id)

    def under_way(self) -> list[Step]:
        """Steps that the next commit has."""
        return self._saving.steps if self._saving else []

    def reference_due(self, rollout_id: int) -> bool:
        return targets.reference_due(self.s, rollout_id)

    def updated_reference(self) -> str | None:
        """The checkpoint that became the reference last; None before the first time."""
        return targets.reference(self.s, self.buffer.commits())

    def _outdated(self) -> list[str]:
        """Checkpoints of this phase that nothing needs any more. Others beside them are somebody else's."""
        made = list(dict.fromkeys(c.checkpoint for c in self.buffer.commits()))
        kept = {*made[-self.s.keep_checkpoints :], self.updated_reference()}
        return [path for path in made if path not in kept and pathlib.Path(path).exists()]

    def _prune_rollouts(self, committed: int) -> None:
        """``--keep-rollouts``; what is not ``committed`` a resume would train again."""
        keep = self.s.keep_rollouts
        if keep is not None:
            for folder in layout.rollouts(self.folder)[: -keep or None]:
                if int(folder.name) <= committed:
                    shutil.rmtree(folder)
