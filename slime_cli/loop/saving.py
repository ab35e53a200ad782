"""What of a stage outlives it: its checkpoints, and the commits that say what is in them.
:class:`slime_cli.loop.phase.Stage` owns it.

Always in this order: a checkpoint is complete on disk, one transaction of the journal names it with the samples that it
was
trained on, older checkpoints go. With ``--async-save`` the first takes as long as it takes while the stage goes on, and
the
others follow at the next :meth:`Saver.commit` that finds it done; one checkpoint at a time is under way.
"""

import dataclasses
import itertools
import pathlib
import shutil
from collections.abc import Callable, Sequence
from typing import Any

from slime_cli import disk
from slime_cli.buffer.journal import Commit, Journal
from slime_cli.errors import UsageError
from slime_cli.hardware import device as hardware
from slime_cli.manifests import checkpoints, layout
from slime_cli.models import architecture
from slime_cli.options import memory
from slime_cli.options.groups import SlimeOptions
from slime_cli.options.resolve import Resolved


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
    """What the stage took so far."""
    stopped: bool
    """``--stop-at-loss`` was reached in it."""


KEEP_WEIGHTS = 2
"""Published versions that stay, besides those that a resume may need."""


def root(s: SlimeOptions, folder: pathlib.Path, run_dir: pathlib.Path) -> pathlib.Path:
    """The folder of a stage's checkpoints. In ``--save`` each stage of a run with several has a folder of its own, as
    in the run directory."""
    return (pathlib.Path(s.save) / folder.relative_to(run_dir) if s.save else folder / layout.CHECKPOINTS).resolve()


def check_folders(
    s: SlimeOptions,
    folder: pathlib.Path,
    run_dir: pathlib.Path,
    check: Callable[[pathlib.Path, str], None] = disk.writable,
) -> None:
    """Raises UsageError when ``--save`` or ``--save-hf`` cannot be written to, as ``check`` finds it."""
    if s.save:
        check(root(s, folder, run_dir), "--save")
    if s.save_hf:
        check(exports(s), "--save-hf")


def refuse_others(root: pathlib.Path, journal: Journal | None) -> None:
    """Steps are counted from 1 in every stage, so that saving beside another run's checkpoints would replace them."""
    own = journal is not None and (journal.commits() or journal.get("saving") is not None)
    if not own and (found := [i for i in checkpoints.iterations(root) if i]):
        raise UsageError(
            f"--save {root} holds checkpoints of another run already, up to iteration {found[-1]}",
            "give a new folder; --load can name that one",
        )


def exports(s: SlimeOptions) -> pathlib.Path:
    """The folder that all of ``--save-hf`` is in: as far as it has no {rollout_id}."""
    parts = pathlib.Path(s.save_hf).parts
    return pathlib.Path(*itertools.takewhile(lambda part: "{" not in part, parts)).resolve()


def room(
    name: str, options: Resolved, folder: pathlib.Path, run_dir: pathlib.Path, config: dict[str, Any]
) -> list[tuple[pathlib.Path, str, int]]:
    """(folder, what, bytes) that a stage keeps at most at a time, estimated from the model's ``config``."""
    s = options.slime
    megatron = options.megatron
    found = memory.estimate(options, architecture.megatron_args(config))
    if found is None:
        return []
    half = (config.get("dtype") or config.get("torch_dtype")) in ("bfloat16", "float16")
    parameters = found["parameters"]
    master = half and hardware.find().kind == "cuda"
    moments = 0 if s.use_stateless_adam else 8
    each = (2 if master else 4) + (0 if megatron.get("no_save_optim") else moments + (4 if master else 0))
    networks = 2 if s.advantage_estimator == "ppo" and s.loss_type != "sft_loss" else 1
    checkpoints_ = root(s, folder, run_dir)
    needs = [
        (
            checkpoints_,
            f"{s.keep_checkpoints} + 1 checkpoints",
            (s.keep_checkpoints + 1) * networks * parameters * each,
        )
    ]
    published = parameters * (2 if half else 4)
    if s.loss_type != "sft_loss":
        needs.append(
            (folder / layout.WEIGHTS, f"{KEEP_WEIGHTS} + 1 published versions", (KEEP_WEIGHTS + 1) * published)
        )
    if s.save_hf:
        count = max(1, (s.num_rollout or 1) // (s.save_interval or 1)) if "{" in s.save_hf else 1
        needs.append((exports(s), f"{count} exports", count * published))
    return needs


def reference_due(s: SlimeOptions, rollout_id: int) -> bool:
    """``--ref-update-interval``: the policy as saved after this rollout becomes the reference."""
    interval = s.ref_update_interval
    return s.loss_type != "sft_loss" and bool(interval) and (rollout_id + 1) % interval == 0


def reference(s: SlimeOptions, commits: Sequence[Commit]) -> str | None:
    """The checkpoint that became the reference last; None before the first time."""
    return next((c.checkpoint for c in reversed(commits) if reference_due(s, c.rollout_id)), None)


class Saver:
    """``folder`` is the stage's in ``run_dir``; ``span`` a tracer's."""

    def __init__(
        self,
        slime: SlimeOptions,
        folder: pathlib.Path,
        run_dir: pathlib.Path,
        journal: Journal,
        trainers,
        span: Callable,
    ):
        self.s = slime
        self.folder = folder
        self.journal = journal
        self.trainers = trainers
        self.span = span
        self.stage = folder.relative_to(run_dir)
        self.root = root(slime, folder, run_dir)
        self._trained: list[Step] = []
        self._saving: Saving | None = None

    def trained(self, step: int, rollout_id: int, version: str, samples: Sequence[int]) -> None:
        """A step was taken; the next :meth:`save` has it."""
        self._trained.append(Step(step, rollout_id, version, samples))

    def save(self, *, seconds: float, stopped: bool) -> None:
        """A checkpoint after the last step, and what else is taken from the present weights. Committed at once if that
        can be."""
        self.commit(wait=True)
        last = self._trained[-1]
        self.journal.put("saving", last.step)
        with self.span("save"):
            path = self.trainers.call("save", str(self.root))
        self._saving = Saving(path, self._trained, seconds, stopped)
        self._trained = []
        if self.reference_due(last.rollout_id):
            self.trainers.call("keep", "reference")
        if self.s.save_hf:
            target = (pathlib.Path(self.s.save_hf.format(rollout_id=last.rollout_id)) / self.stage).resolve()
            self.trainers.call("publish", str(target), last.version)
        self.commit(wait=False)

    def commit(self, wait: bool) -> None:
        """Commits the checkpoint under way if it is durable; it can be waited for. Nothing to do when none is under
        way."""
        if self._saving is None or not self.trainers.call("saved", wait):
            return
        done = self._saving
        self._saving = None
        with self.span("commit"):
            if done.stopped:  # holds once the commit of that rollout is there
                self.journal.put("stopped", done.steps[-1].rollout_id)
            self.journal.commit(steps=[dataclasses.astuple(step) for step in done.steps], checkpoint=done.checkpoint)
            self.journal.put("seconds", done.seconds)
            self.trainers.call("remove", self._outdated())
            self._prune_rollouts(done.steps[-1].rollout_id)

    def under_way(self) -> list[Step]:
        """Steps that the next commit has."""
        return self._saving.steps if self._saving else []

    def reference_due(self, rollout_id: int) -> bool:
        return reference_due(self.s, rollout_id)

    def updated_reference(self) -> str | None:
        """The checkpoint that became the reference last; None before the first time."""
        return reference(self.s, self.journal.commits())

    def _outdated(self) -> list[str]:
        """Checkpoints of this stage that nothing needs any more. Others beside them are somebody else's."""
        made = list(dict.fromkeys(c.checkpoint for c in self.journal.commits()))
        kept = {*made[-self.s.keep_checkpoints :], self.updated_reference()}
        return [path for path in made if path not in kept and pathlib.Path(path).exists()]

    def _prune_rollouts(self, committed: int) -> None:
        """``--keep-rollouts``; what is not ``committed`` a resume would train again."""
        keep = self.s.keep_rollouts
        if keep is not None:
            for folder in layout.rollouts(self.folder)[: -keep or None]:
                if int(folder.name) <= committed:
                    shutil.rmtree(folder)
