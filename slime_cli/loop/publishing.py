"""When the engines of a stage get the trainer's weights, and whose weights they held when a commit was made.

It follows from the options and the journal's commits, so that a resume comes to the answer that the attempt before it
had;
the conductor (:mod:`slime_cli.loop.phase`) acts on it. ``s``: slime's options by dest; ``total``: rollouts of the stage.
"""

import pathlib
from collections.abc import Sequence

from slime_cli.buffer.records import Commit
from slime_cli.loop.saving import Step
from slime_cli.options.groups import SlimeOptions
from slime_cli.weights import publish


def evaluated(s: SlimeOptions, rollout_id: int) -> bool:
    """``--eval-interval``: there is an evaluation after this rollout."""
    return bool(s.eval_interval) and (rollout_id + 1) % s.eval_interval == 0


def due(s: SlimeOptions, rollout_id: int, total: int) -> bool:
    """After this rollout: every ``--update-weights-interval``, before an evaluation, and at the end."""
    done = rollout_id + 1
    return done % s.update_weights_interval == 0 or evaluated(s, rollout_id) or done == total


def step_held(s: SlimeOptions, commits: Sequence[Commit | Step], total: int) -> int:
    """The step whose weights generate what comes after the last of ``commits`` (by step): its own, or an earlier
    one's."""
    return next((commit.step for commit in reversed(commits) if due(s, commit.rollout_id, total)), 0)


def complete(stage_folder: pathlib.Path, step: int) -> pathlib.Path | None:
    """The version published at ``step``, if it is still there."""
    folder = publish.folder(stage_folder, step)
    return folder if (folder / "manifest.json").exists() else None
