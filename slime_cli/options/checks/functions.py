"""Functions of a user's own: which of them are called, and with what they go."""

from collections.abc import Iterator

from slime_cli.options import own
from slime_cli.options.checks.common import Problem
from slime_cli.options.resolve import Resolved

NOT_CALLED = """
    buffer_filter_path rollout_sample_hook_path rollout_sample_filter_path rollout_all_samples_process_path
    custom_reward_post_process_path custom_convert_samples_to_train_data_path custom_rollout_log_function_path
    custom_eval_rollout_log_function_path eval_function_path custom_update_weight_post_write_path
""".split()
"""Nothing calls these yet: whoever makes the call takes the option out of here."""


DISTILLATION = "slime.rollout.on_policy_distillation."
"""slime's own functions that ask a teacher: here it is an option."""


def functions(r: Resolved) -> Iterator[Problem]:
    s = r.slime
    if (s.custom_reward_post_process_path or "").startswith(DISTILLATION):
        fix = "--use-opd --opd-type sglang --opd-teacher-url ADDRESS asks the teacher; --rm-type or --custom-rm-path rewards"
        yield f"--custom-reward-post-process-path {s.custom_reward_post_process_path}: slime's own function", fix
    for dest in NOT_CALLED:
        if getattr(s, dest):
            yield f"{own.flag(dest)}: nothing calls such a function yet", "leave it out"
    if s.data_source_path and s.prompt_data:
        yield "--data-source-path with --prompt-data: prompts come from one of them", "leave one out"


TRAIN = (functions,)
