"""The loss, the estimator of advantages, and the optimizer."""

import re
from collections.abc import Iterator, Sequence

from slime_cli.options import own
from slime_cli.options.checks.common import Problem, no_effect
from slime_cli.options.estimators import GROUP_RELATIVE
from slime_cli.options.resolve import Resolved


def algorithm(r: Resolved) -> Iterator[Problem | str]:
    s = r.slime
    high = s.eps_clip if s.eps_clip_high is None else s.eps_clip_high
    if not (0 <= s.eps_clip <= 1 and high >= 0):
        yield (
            f"--eps-clip {s.eps_clip} and --eps-clip-high {high}",
            "ratios need 0 <= low <= 1 (1 is no lower bound) and 0 <= high",
        )
    if s.eps_clip_c is not None and s.eps_clip_c <= 1:
        yield f"--eps-clip-c is {s.eps_clip_c}", "the bound of dual clip must be above 1 (3 is usual)"
    if s.use_kl_loss and s.kl_loss_coef == 0:
        yield "--use-kl-loss with --kl-loss-coef 0: the divergence is logged and does not change the gradient"
    if s.loss_type == "custom_loss" and not s.custom_loss_function_path:
        yield "--loss-type custom_loss needs --custom-loss-function-path", "give the function"
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
    learns = s.num_rollout != 0 and not s.debug_rollout_only
    if s.n_samples_per_prompt == 1 and s.rewards_normalization and compared and learns:
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
    if stateless and r.origins["megatron.dist_ckpt_optim_fully_reshardable"] == "flag":
        flag = "--dist-ckpt-optim-fully-reshardable"
        yield no_effect([flag], "with --use-stateless-adam: that format asks for moments by name")
    if megatron.get("async_save") and megatron.get("optimizer_cpu_offload"):
        yield "--async-save cannot write what --optimizer-cpu-offload keeps in pinned memory", "keep one"
    if megatron.get("no_save_optim"):
        yield "--no-save-optim: a run that is killed cannot be resumed; its checkpoints can start another with --load"


def further(r: Resolved) -> Iterator[Problem | str]:
    """Multi-token-prediction (MTP) layers."""
    megatron = r.megatron
    depths = megatron.get("mtp_num_layers")
    if not r.slime.enable_mtp_training:
        given = [d for d in ("mtp_num_layers", "mtp_loss_scaling_factor") if r.origins.get(f"megatron.{d}") == "flag"]
        if given:
            flags = [f"--{dest.replace('_', '-')}" for dest in given]
            yield no_effect(flags, "without --enable-mtp-training: such layers stay as the checkpoint has them")
        return
    if not depths:
        fix = (
            "give their number: num_nextn_predict_layers or mtp_num_hidden_layers of the model's config.json, mostly 1"
        )
        yield "--enable-mtp-training without --mtp-num-layers", fix
    for dest, why in _NOT_WITH_MTP.items():
        if megatron.get(dest):
            yield f"--{dest.replace('_', '-')} with --enable-mtp-training: {why}", "leave one of the two out"
    if r.slime.use_routing_replay or r.slime.use_rollout_routing_replay:
        yield "routing replay with --enable-mtp-training: nobody chooses experts for MTP layers before", "keep one"


_NOT_WITH_MTP = {
    "mtp_use_repeated_layer": "one layer for all depths is not built",
    "pipeline_model_parallel_layout": "MTP layers are trained on the last pipeline stage alone",
    "overlap_grad_reduce": "the last pipeline stage's copy of the embedding has no gradient to wait for",
}

TRAIN = (algorithm, optimizer, further)
