"""How answers are sampled, rewarded and evaluated."""

import math
import pathlib
from collections.abc import Iterator

from slime_cli.errors import UsageError
from slime_cli.options.checks.common import Problem, no_effect
from slime_cli.options.checks.functions import of_user
from slime_cli.options.checks.off_policy import cut
from slime_cli.options.evaluations import evaluation_sets
from slime_cli.options.groups import SlimeOptions
from slime_cli.options.resolve import Resolved


def sampling(r: Resolved) -> Iterator[Problem | str]:
    s = r.slime
    if not isinstance(s.apply_chat_template_kwargs, dict):
        yield "--apply-chat-template-kwargs is not a JSON object", """write '{"name": value}'"""
    if not 0 < s.rollout_temperature < math.inf:
        yield (
            f"--rollout-temperature is {s.rollout_temperature}",
            "training needs samples with probabilities: above 0",
        )
    if s.loss_type != "sft_loss" and (s.rollout_top_p < 1 or s.rollout_top_k > 0):
        yield from cut(r)
    elif s.use_top_p_replay and s.loss_type != "sft_loss":
        yield no_effect(["--use-top-p-replay"], "without --rollout-top-p or --rollout-top-k: nothing is cut")


def reward(r: Resolved) -> Iterator[Problem | str]:
    s = r.slime
    builtin = all(uri.startswith("reasoning-gym:") for uri in _unrewarded(s))
    if s.loss_type != "sft_loss" and not (s.rm_type or s.custom_rm_path or builtin):
        if of_user(s.rollout_function_path):
            pass  # it rewards what it generates
        elif s.custom_generate_function_path:
            yield "no reward: each sample must come with its own from --custom-generate-function-path, or be dropped"
        else:
            yield (
                "no reward: neither --rm-type nor --custom-rm-path",
                "give one; only reasoning-gym: prompts and --custom-generate-function-path bring their own",
            )
    if s.rm_type in ("remote_rm", "boxed_remote_rm") and not s.rm_url:
        yield f"--rm-type {s.rm_type} needs --rm-url", "give the service's address"
    if s.rm_url and not s.rm_url.startswith(("http://", "https://")):
        yield f"--rm-url {s.rm_url}: not an address", "write http://HOST:PORT/PATH"
    if s.group_rm and not s.custom_rm_path:
        yield "--group-rm needs --custom-rm-path", "built-in rewards look at one sample"


def _unrewarded(s: SlimeOptions) -> list[str]:
    """Sources whose samples no option of their own rewards: the prompts that are trained, or those of an evaluation
    alone."""
    if s.load_debug_rollout_data:
        return []
    if s.num_rollout != 0:
        return [s.prompt_data or ""]
    try:
        return [one.path for one in evaluation_sets(s) if not one.metadata.keys() & {"rm_type", "custom_rm_path"}]
    except UsageError:
        return []  # said elsewhere


def evaluation(r: Resolved) -> Iterator[Problem | str]:
    s = r.slime
    data = s.eval_prompt_data or []
    if len(data) % 2 and len(data) > 1:
        fix = "give pairs: NAME PATH NAME PATH; one PATH alone is named after its file"
        yield f"--eval-prompt-data has {len(data)} words", fix
    elif len(set(data[::2])) < len(data) // 2:
        yield f"--eval-prompt-data names a set twice: {' '.join(data[::2])}", "give each its own name"
    if s.eval_config and data:
        yield "--eval-config with --eval-prompt-data: the sets come from one of them", "leave one out"
    if s.eval_interval and not (data or s.eval_config):
        yield "--eval-interval without --eval-prompt-data or --eval-config", "give a set to evaluate on"
    if s.eval_config and not pathlib.Path(s.eval_config).exists():
        return  # on this machine; whoever opens the data says so
    try:
        sets = evaluation_sets(s)
    except UsageError as error:
        yield error.message, error.fix
        return
    for one in sets:
        if s.custom_rm_path and "rm_type" in one.metadata and "custom_rm_path" not in one.metadata:
            said = f"--eval-config: {one.name} has an rm_type, and --custom-rm-path rewards every sample"
            yield said, "give the set a custom_rm_path too, or train with --rm-type"


TRAIN = (sampling, reward, evaluation)
