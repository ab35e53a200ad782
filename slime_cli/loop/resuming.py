"""Checks and repairs what earlier attempts left, before anything is started. Torch-free; ``slime train`` calls it.

:func:`check_starts`, before the run directory is claimed: the checkpoints that training starts from are there.
:func:`prepare`, after
it: the last commit of every phase that is still needed is in a checkpoint that is whole, or the phase is rolled back to
one that
is; ``metrics.jsonl`` has one line for every committed rollout and no others.
"""

import contextlib
import json
import pathlib
from collections.abc import Callable, Sequence

from slime_cli import manifests
from slime_cli.buffer.journal import Commit, Journal, Rollback
from slime_cli.errors import DataError
from slime_cli.loop import targets
from slime_cli.loop.attempts import PhaseOf
from slime_cli.manifests import checkpoints, layout, pickles
from slime_cli.options.groups import SlimeOptions
from slime_cli.tracing.reading import metrics_of
from slime_cli.training.settings import Settings

Say = Callable[[str], None]


def start_root(s: SlimeOptions) -> str | None:
    """``--load``, or ``--ref-load`` when the former holds no checkpoint yet, not even a damaged one."""
    load = s.load
    fallback = s.ref_load
    return fallback if not load or fallback and s.ckpt_step is None and not checkpoints.any_in(load) else load


def start(s: SlimeOptions, say: Say) -> str | None:
    """The checkpoint that the first phase starts from; None for the HF weights alone."""
    root = start_root(s)
    return root and str(checkpoints.complete(root, say, s.ckpt_step if root == s.load else None))


def needs_start(s: SlimeOptions, commits: Sequence[Commit]) -> bool:
    """The weights that the phase begins with are needed: it has not committed, or they are its reference for good."""
    kept = Settings.from_options(s).reference and not (s.load and s.ref_load) and targets.reference(s, commits) is None
    return not commits or kept


def check_starts(phases: Sequence[PhaseOf], run_dir: pathlib.Path) -> None:
    """Raises DataError for a checkpoint that training is to start from and that is not there, not whole or not safe,
    UsageError for a ``--save`` that holds another run's."""
    for number, (_, options, folder) in enumerate(phases):
        s = options.slime
        with (
            Journal(folder / layout.JOURNAL)
            if (folder / layout.JOURNAL).exists()
            else contextlib.nullcontext() as journal
        ):
            commits = journal.commits() if journal else []
            targets.refuse_others(targets.root(s, folder, run_dir), journal)
        if number == 0 and needs_start(s, commits):
            _safe(start(s, lambda text: None))
        settings = Settings.from_options(s)
        if settings.reference and s.load and s.ref_load and targets.reference(s, commits) is None:
            _safe(checkpoints.complete(s.ref_load))
        if settings.use_opd and s.opd_teacher_load:
            _safe(checkpoints.complete(s.opd_teacher_load))


def _safe(checkpoint: str | pathlib.Path | None) -> None:
    """It may be a stranger's: loading it must run nothing."""
    if checkpoint:
        pickles.check(pathlib.Path(checkpoint))


def prepare(phases: Sequence[PhaseOf], run_dir: pathlib.Path, say: Say) -> None:
    """Raises DataError for a damaged checkpoint that the run needs and may not go back behind."""
    with contextlib.ExitStack() as stack:
        journals = [
            stack.enter_context(Journal(f / layout.JOURNAL)) if (f / layout.JOURNAL).exists() else None
            for _, _, f in phases
        ]
        commits = [journal.commits() if journal else [] for journal in journals]
        for i, (name, options, folder) in enumerate(phases):
            needed = i + 1 == len(phases) or needs_start(phases[i + 1][1].slime, commits[i + 1])
            journal = journals[i]
            if journal and commits[i] and needed:
                _whole(name, options.slime, folder, journal, say)
        write_metrics(
            run_dir, {name: journal for (name, _, _), journal in zip(phases, journals, strict=True) if journal}
        )


def _whole(name: str, s: SlimeOptions, folder: pathlib.Path, journal: Journal, say: Say) -> None:
    """The phase's last commit is in a whole checkpoint, if need be after a rollback."""
    commits = journal.commits()
    found = _damage(s, commits[-1].checkpoint)
    if not found:
        return
    to = next((c for c in reversed(commits) if not _damage(s, c.checkpoint)), None)
    reason = f"{commits[-1].checkpoint}: {found}"
    back = f"step {to.step}, in {to.checkpoint}" if to else "its begin, for no checkpoint of it is whole"
    if s.on_damaged_checkpoint != "rollback":
        raise DataError(
            f"{name}: the last commit, step {commits[-1].step}, is in a damaged checkpoint: {reason}",
            f"restore it, or give --on-damaged-checkpoint rollback to go back to {back}, and train again what came"
            " after it",
        )
    lost = [
        r for r in range(to.rollout_id + 1 if to else 0, commits[-1].rollout_id + 1) if not _batch_is_whole(folder, r)
    ]
    done = journal.roll_back(to.step if to else 0, reason, lost)
    for path in layout.evaluations(folder):
        if int(path.stem) > done.to_step:
            path.unlink()  # of weights that are made again
    say(f"{name}: {reason}")
    say(f"{name}: rolled back to {back}: {told(done)}")
    if lost:
        why = (
            f"--keep-rollouts {s.keep_rollouts} removed them"
            if s.keep_rollouts
            else "their files are missing or damaged"
        )
        say(
            f"{name}: the batches of rollouts {', '.join(map(str, lost))} are gone ({why}): new samples take the place"
            " of those dropped"
        )


def told(done: Rollback) -> str:
    """A sentence on the samples of a rollback."""
    dropped = f", {done.dropped:,} dropped (batch_lost)" if done.dropped else ""
    return f"{done.again:,} samples are trained again from their batches{dropped}"


def _damage(s: SlimeOptions, checkpoint: str) -> str:
    found = checkpoints.damage(checkpoint)
    if not found and s.advantage_estimator == "ppo" and s.loss_type != "sft_loss":
        critic = checkpoints.damage(layout.critic(checkpoint))
        found = critic and f"its critic's, {layout.critic(checkpoint)}: {critic}"
    return found


def _batch_is_whole(folder: pathlib.Path, rollout_id: int) -> bool:
    batch = layout.rollout(folder, rollout_id)
    try:
        files = manifests.read(batch / layout.MANIFEST, manifests.Rollout).files
        return all(manifests.file_hash(batch / name) == digest for name, digest in files.items())
    except (DataError, OSError):
        return False


def write_metrics(run_dir: pathlib.Path, journals: dict[str, Journal]) -> None:
    """``metrics.jsonl`` as the journals have it: a killed attempt may have left a committed rollout without its line, a
    line cut short, or lines of rollouts that are trained again."""
    path = run_dir / layout.METRICS
    wanted = []
    for name, journal in journals.items():
        lines = journal.lines()
        commits = journal.commits()
        committed = range(commits[-1].rollout_id + 1 if commits else 0)
        if any(r not in lines for r in committed):  # of a journal that had no lines yet
            lines = {line.get("rollout_id"): line for line in metrics_of(run_dir).get(name, ())} | lines
        wanted += [json.dumps(lines[r]) + "\n" for r in committed if r in lines]
    text = "".join(wanted).encode()
    if text != (path.read_bytes() if path.exists() else b""):
        manifests.write_bytes(path, text)
