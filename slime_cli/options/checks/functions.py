"""Functions of a user's own: which of them are called, and with what they go."""

from collections.abc import Iterator

from slime_cli.options import own
from slime_cli.options.checks.common import Problem
from slime_cli.options.resolve import Resolved

NOT_CALLED: tuple[str, ...] = ()
"""Options of functions that nothing calls yet: whoever makes the call takes its option out of here."""
DISTILLATION = "slime.rollout.on_policy_distillation."
"""slime's own functions that ask a teacher, which --use-opd does here: :mod:`slime_cli.hooks.distillation`."""


def of_user(path: str | None) -> bool:
    """True for a rollout function of the user's; False for one of slime's own, which options stand for."""
    return bool(path) and not path.startswith("slime.")


def functions(r: Resolved) -> Iterator[Problem]:
    s = r.slime
    for dest in ("custom_rm_path", "custom_reward_post_process_path"):
        if (getattr(s, dest) or "").startswith(DISTILLATION) and not s.use_opd:
            fix = "give --use-opd --opd-teacher-url ADDRESS, or a reward of your own"
            yield f"{own.flag(dest)} {getattr(s, dest)}: every reward is 0, and no teacher is asked", fix
    for dest in NOT_CALLED:
        if getattr(s, dest):
            yield f"{own.flag(dest)}: nothing calls such a function yet", "leave it out"
    if s.buffer_filter_path and s.max_staleness is not None:
        said = (
            f"--buffer-filter-path with --max-staleness {s.max_staleness}: a group that is not chosen would become too"
            " old"
        )
        yield said, "leave one of the two out"
    if s.data_source_path and s.prompt_data:
        yield "--data-source-path with --prompt-data: prompts come from one of them", "leave one out"


TRAIN = (functions,)
