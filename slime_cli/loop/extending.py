"""A finished run that is asked for more rollouts trains them; one that is asked for no more shows its result.
Torch-free.

``slime train`` calls this before it starts anything. A phase is extended by a larger ``--num-rollout`` or
``--num-epoch`` for as long as the next phase has not begun: that one was trained from its weights. What a phase was
stopped by (``--stop-at-loss``) stops it still.
"""

import contextlib
import pathlib
from collections.abc import Callable, Mapping, Sequence

from slime_cli.buffer.journal import Journal
from slime_cli.loop import attempts
from slime_cli.loop.attempts import PhaseOf
from slime_cli.manifests import layout
from slime_cli.options.resolve import Resolved

Say = Callable[[str], None]
AMOUNTS = ("num_rollout", "num_epoch")
"""Options that say how much is trained."""


def finished(resolved: Resolved, run_dir: pathlib.Path, rollouts: Mapping[str, int] | None = None) -> bool:
    """There is a result, and these options ask for no more than it has.

    ``rollouts``: how many each phase makes that runs for a number of epochs. Without them, another number of epochs
    than before counts as more: the data says how many rollouts that is.
    """
    if not (run_dir / layout.SUMMARY).exists():
        return False
    name, options, folder = attempts.phases(resolved, run_dir)[-1]
    total = _asked(options, name, rollouts or {})
    if total is None:
        return not any(change.dest in AMOUNTS for change in attempts.changed(resolved, run_dir))
    if not (folder / layout.JOURNAL).exists():
        return True  # somebody took it away: the result is all that is left
    with Journal.open_readonly(folder / layout.JOURNAL) as journal:
        return _stopped(journal) or total <= _done(journal, options)


def reopen(phases: Sequence[PhaseOf], run_dir: pathlib.Path, rollouts: Mapping[str, int], say: Say) -> None:
    """Takes the mark "finished" from phases that are asked for more, and lets it stand for the new number where a phase
    stays as it is. Killed after it, the run continues from there."""
    for number, (name, options, folder) in enumerate(phases):
        path = folder / layout.JOURNAL
        with Journal(path) if path.exists() else contextlib.nullcontext() as journal:
            total = _asked(options, name, rollouts)
            done = _done(journal, options) if journal else 0
            if journal is None or not journal.get("finished") or total is None or total <= done:
                continue
            what = "made" if options.slime.debug_rollout_only else "trained"
            have = f"{name}: {done} rollouts are {what}, {total} are asked for"
            following = phases[number + 1] if number + 1 < len(phases) else None
            if following and (following[2] / layout.JOURNAL).exists():
                say(f"{have}; it stays as it is, for {following[0]} was trained from its weights")
                journal.put("finished", total)
            elif _stopped(journal):
                say(f"{have}; it stays as it is, for it reached --stop-at-loss")
                journal.put("finished", total)
            else:
                say(have)
                journal.put("finished", None)
    (run_dir / layout.SUMMARY).unlink(missing_ok=True)


def _asked(options: Resolved, name: str, rollouts: Mapping[str, int]) -> int | None:
    """Rollouts that a phase is to have; None where only the data says how many those are."""
    return rollouts.get(name) if options.slime.num_rollout is None else options.slime.num_rollout


def _done(journal: Journal, options: Resolved) -> int:
    """Rollouts that are committed; with ``--debug-rollout-only`` nothing is, and those of a finished phase are
    made."""
    return (journal.get("finished") or 0) if options.slime.debug_rollout_only else _committed(journal)


def _committed(journal: Journal) -> int:
    commits = journal.commits()
    return commits[-1].rollout_id + 1 if commits else 0


def _stopped(journal: Journal) -> bool:
    """By ``--stop-at-loss``, before its number of rollouts."""
    stopped = journal.get("stopped")
    return stopped is not None and _committed(journal) > stopped
