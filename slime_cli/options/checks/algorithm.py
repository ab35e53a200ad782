"""The loss, the estimator of advantages, and the optimizer."""

import collections
import re
from collections.abc import Iterator, Sequence

from slime_cli.options import own
from slime_cli.options.checks.common import Problem, no_effect
from slime_cli.options.estimators import GROUP_RELATIVE
from slime_cli.options.resolve import Resolved


def algorithm(r: Resolved) -> Iterator[Problem | str]:
    s = r.slime
    if not (0 <= s.eps_clip <= 1 and s.eps_clip_high >= 0):
        yield (
            f"--eps-clip {s.eps_clip} and --eps-clip-high {s.eps_clip_high}",
            "ratios need 0 <= low <= 1 (1 is no lower bound) and 0 <= high",
        )
    if s.eps_clip_c is not None and s.eps_clip_c <= 1:
        yield f"--eps-clip-c is {s.eps_clip_c}", "the bound of dual clip must be above 1 (3 is usual)"
    if s.use_kl_loss and s.kl_loss_coef == 0:
        yield "--use-kl-loss with --kl-loss-coef 0: the divergence is logged and does not change the gradient"
    yield from _without_effect(r)
    if s.loss_type == "custom_loss" and not s.custom_loss_function_path:
        yield "--loss-type custom_loss needs --custom-loss-function-path", "give the function"
    if s.loss_type != "custom_loss" and r.origins["slime.custom_loss_function_path"] == "flag":
        yield no_effect(["--custom-loss-function-path"], f"with --loss-type {s.loss_type}")
    if s.loss_type == "custom_loss" and s.custom_pg_loss_reducer_function_path:
        flag = own.flag("custom_pg_loss_reducer_function_path")
        yield no_effect([flag], "with --loss-type custom_loss: your own function reduces the loss")
    for name in ("only_train_params_name_list", "freeze_params_name_list"):
        yield from _patterns(own.flag(name), getattr(s, name) or ())
    if s.only_train_params_name_list and s.freeze_params_name_list:
        yield "--only-train-params-name-list and --freeze-params-name-list exclude each other", "keep one of the two"
    if s.loss_type == "sft_loss":
        return
    if s.advantage_estimator in GROUP_RELATIVE and s.kl_coef and not s.custom_advantage_function_path:
        instead = "--use-kl-loss with --kl-loss-coef has"
        yield no_effect(["--kl-coef"], f"with --advantage-estimator {s.advantage_estimator}; {instead}")
    if s.kl_coef and s.use_kl_loss and s.kl_loss_coef:
        yield (
            "--kl-coef and --kl-loss-coef both weigh the divergence from the reference",
            "keep it in the reward or in the loss",
        )
    compared = s.advantage_estimator in (*GROUP_RELATIVE, "reinforce_plus_plus_baseline")
    if s.n_samples_per_prompt == 1 and s.rewards_normalization and compared:
        yield (
            "--n-samples-per-prompt 1: compared within its group every reward is 0, and nothing is learnt",
            "raise it, or give --disable-rewards-normalization",
        )
    if not s.rewards_normalization and r.origins["slime.grpo_std_normalization"] == "flag":
        yield no_effect(["--disable-grpo-std-normalization"], "with --disable-rewards-normalization")


def _patterns(flag: str, patterns: Sequence[str]) -> Iterator[Problem]:
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            yield f"{flag} {pattern}: not a regular expression ({error})", "escape what is meant literally"


_NEEDS = {
    "kl_loss_coef": ("use_kl_loss",),
    "kl_loss_type": ("use_kl_loss", "kl_coef"),
    "use_unbiased_kl": ("use_kl_loss",),
    "ref_update_interval": ("use_kl_loss", "kl_coef"),
    "opsm_delta": ("use_opsm",),
    **dict.fromkeys(("tis_level", "tis_mode", "tis_clip", "tis_clip_low", "tis_batch_normalize"), ("use_tis",)),
    "custom_tis_function_path": ("use_tis", "get_mismatch_metrics"),
    **dict.fromkeys(("rs_level", "rs_lower_bound", "rs_upper_bound", "rs_veto_threshold"), ("use_rs",)),
    "opd_kl_coef": ("use_opd",),
    **dict.fromkeys(("opd_type", "opd_teacher_load", "opd_teacher_url"), ("use_opd",)),
    "opd_teacher_timeout": ("opd_teacher_url",),
    "ckpt_step": ("load",),
}
"""Option -> options of which one must be given for it to have an effect."""

_OF_ESTIMATORS = {
    "gamma": ("reinforce_plus_plus", "ppo"),
    "lambd": ("ppo",),
    "value_clip": ("ppo",),
    "num_critic_only_steps": ("ppo",),
    "megatron_config_path": ("ppo",),
    "grpo_std_normalization": GROUP_RELATIVE,
    "rewards_normalization": (*GROUP_RELATIVE, "reinforce_plus_plus_baseline"),
    "eps_clip_c": ("grpo", "gspo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"),
}
"""Option -> estimators that read it."""


def _without_effect(r: Resolved) -> Iterator[str]:
    if r.slime.loss_type == "sft_loss":
        return  # supervised.py says so of all of them
    s = r.slime
    found = collections.defaultdict(list)
    for name, needed in _NEEDS.items():
        if r.origins[f"slime.{name}"] == "flag" and not any(getattr(s, other) for other in needed):
            found[f"without {' or '.join(own.flag(other) for other in needed)}"].append(own.flag(name))
    for name, estimators in _OF_ESTIMATORS.items():
        if r.origins[f"slime.{name}"] == "flag" and s.advantage_estimator not in estimators:
            why = f"with --advantage-estimator {s.advantage_estimator}, only with {', '.join(estimators)}"
            found[why].append(own.flag(name))
    for why, flags in found.items():
        yield no_effect(flags, why)


_MOMENTS = ("use_precision_aware_optimizer", "optimizer_cpu_offload", "optimizer_cuda_graph")
"""Megatron options about Adam's moments, or about where they are."""


def optimizer(r: Resolved) -> Iterator[Problem | str]:
    megatron = r.megatron
    stateless = r.slime.use_stateless_adam
    least = megatron.get("min_lr", 0)
    most = megatron.get("lr")
    if most is not None and least > most:
        yield f"--min-lr {least} is above --lr {most}", "Megatron lowers the rate from the latter to the former"
    if stateless and megatron.get("optimizer", "adam") != "adam":
        yield f"--use-stateless-adam with --optimizer {megatron['optimizer']}", "keep one"
    for name in _MOMENTS if stateless else ():
        if megatron.get(name):
            yield f"--{name.replace('_', '-')} is about moments, and --use-stateless-adam keeps none", "keep one"
    if stateless and r.slime.reset_optimizer_states:
        yield no_effect(["--reset-optimizer-states"], "with --use-stateless-adam: there is nothing to forget")
    if megatron.get("async_save") and megatron.get("optimizer_cpu_offload"):
        yield "--async-save cannot write what --optimizer-cpu-offload keeps in pinned memory", "keep one"
    if megatron.get("no_save_optim"):
        yield "--no-save-optim: a run that is killed cannot be resumed; its checkpoints can start another with --load"


TRAIN = (algorithm, optimizer)
