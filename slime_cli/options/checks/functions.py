"""Functions of a user's own: which of them are called, and with what they go."""

from collections.abc import Iterator

from slime_cli.options import own
from slime_cli.options.checks.common import Problem
from slime_cli.options.resolve import Resolved

NOT_CALLED: tuple[str, ...] = ()
"""Options of functions that nothing calls yet: whoever makes the call takes its option out of here."""
DISTILLATION = "slime.rollout.on_policy_distillation."
"""slime's own functions that ask a teacher: here it is an option."""


def of_user(path: str | None) -> bool:
    """Whether a function for a whole rollout is not one of slime's own, which the options name."""
    return bool(path) and not path.startswith("slime.")


def functions(r: Resolved) -> Iterator[Problem]:
    s = r.slime
    if (s.custom_reward_post_process_path or "").startswith(DISTILLATION):
        fix = "--use-opd --opd-type sglang --opd-teacher-url ADDRESS asks the teacher; --rm-type or --custom-rm-path rewards"
        yield f"--custom-reward-post-process-path {s.custom_reward_post_process_path}: slime's own function", fix
    for dest in NOT_CALLED:
        if getattr(s, dest):
            yield f"{own.flag(dest)}: nothing calls such a function yet", "leave it out"
    if s.buffer_filter_path and s.max_staleness is not None:
        said = f"--buffer-filter-path with --max-staleness {s.max_staleness}: a group that is not chosen would become too old"
        yield said, "leave one of the two out"
    if s.data_source_path and s.prompt_data:
        yield "--data-source-path with --prompt-data: prompts come from one of them", "leave one out"


TRAIN = (functions,)
