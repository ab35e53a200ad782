"""What one micro-batch contributes to a step's loss: the policy's, the critic's and the supervised one.

Each function takes what its head (:mod:`slime_cli.training.network.heads`) read off the network at the response tokens,
and gives the loss (a weighted sum, its weights global: see :func:`slime_cli.training.algorithm.losses.sample_weights`)
and a report for :mod:`slime_cli.training.metrics`. ``out_2R``: log-probabilities and entropies. Masked tokens are cut
out before anything is computed: 0 * nan is nan in a backward pass, so masking the loss is too late.
"""

import types
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import mpu
from torch.distributed.nn.functional import all_reduce

from slime_cli.errors import UsageError
from slime_cli.training.algorithm import losses
from slime_cli.training.batching.microbatch import MicroBatch, filled
from slime_cli.training.metrics import Among, Report
from slime_cli.training.settings import Settings


def total(values_R: torch.Tensor, mb: MicroBatch) -> torch.Tensor:
    """The micro-batch's part of the mean over trajectories (or tokens) of the global batch."""
    return (losses.masked(values_R, mb.mask_R) * mb.weight_R).sum()


def supervised(s: Settings, mb: MicroBatch, out_2R: torch.Tensor) -> tuple[torch.Tensor, Report]:
    """Negative log-likelihood of the answer. The temperature belongs to sampling and has no part in it."""
    log_probs_R = losses.masked(out_2R[0], mb.mask_R)
    return total(-log_probs_R, mb), {"loss": (-log_probs_R, mb.weight_R), "log_probs": log_probs_R}


def value(s: Settings, mb: MicroBatch, values_R: torch.Tensor) -> tuple[torch.Tensor, Report]:
    """The critic's clipped squared error against the returns."""
    values_R = losses.masked(values_R, mb.mask_R)
    loss_R, clipped_R = losses.value_loss(
        values_R, losses.masked(filled(mb.old_values_R), mb.mask_R), filled(mb.returns_R), s.value_clip
    )
    report = {
        "value_loss": (loss_R, mb.weight_R),
        "value_clipfrac": clipped_R,
        "values": values_R,
        "returns": filled(mb.returns_R),
    }
    return total(loss_R, mb), report


def policy(s: Settings, mb: MicroBatch, out_2R: torch.Tensor) -> tuple[torch.Tensor, Report]:
    """The estimator's policy loss, corrected where asked, with the divergence from the reference and the entropy
    bonus."""
    log_probs_R = losses.masked(out_2R[0], mb.mask_R)
    old_R = log_probs_R.detach() if mb.old_log_probs_R is None else losses.masked(mb.old_log_probs_R, mb.mask_R)
    loss_R, report = _surrogate(s, mb, log_probs_R, old_R)
    report["pg_loss"] = (loss_R, mb.weight_R)
    if mb.measured_R is not None and mb.rollout_log_probs_R is not None:
        before_R = log_probs_R if s.use_rollout_logprobs else old_R
        gap_R = (before_R - mb.rollout_log_probs_R).abs()
        report["train_rollout_logprob_abs_diff"] = Among(gap_R, mb.measured_R)
    if s.use_kl_loss:
        ref_R = losses.masked(filled(mb.ref_log_probs_R), mb.mask_R)
        kl_R = losses.kl(log_probs_R, ref_R, s.kl_loss_type, old_R if s.use_unbiased_kl else None)
        report["kl_loss"] = (kl_R, mb.weight_R)
        if s.kl_loss_coef:  # with 0 it is measured only, and 0 * inf would be NaN
            loss_R = loss_R + s.kl_loss_coef * kl_R
    entropy_R = losses.masked(out_2R[1], mb.mask_R)
    if s.entropy_coef:
        loss_R = loss_R - s.entropy_coef * entropy_R
    return total(loss_R, mb), report | {"entropy": entropy_R, "loss": (loss_R, mb.weight_R), "log_probs": log_probs_R}


def _surrogate(
    s: Settings, mb: MicroBatch, log_probs_R: torch.Tensor, old_R: torch.Tensor
) -> tuple[torch.Tensor, Report]:
    """The policy gradient's part of the loss, [R], by estimator: 0, the gradient too, where something leaves a token
    out."""
    advantages_R = filled(mb.advantages_R)
    gap_R = log_probs_R - old_R
    means_R = gap_R  # of samples only where one of the next two reads it
    kept_R = mb.mask_R
    report: Report = {"ppo_kl": -gap_R}
    if s.advantage_estimator == "gspo" or s.use_opsm:
        means_R = losses.sample_means(gap_R, mb.mask_R, mb.sample_R, mb.samples, _over_context)
    if s.use_opsm:
        near_R = losses.off_policy_sequence_mask(-means_R, advantages_R, s.opsm_delta)
        kept_R = kept_R & near_R
        report["opsm_clipfrac"] = ~near_R
    if mb.correction_R is not None:
        kept_R = kept_R & (mb.correction_R != 0)
    if s.advantage_estimator == "cispo":
        loss_R, report["pg_clipfrac"] = losses.cispo_loss(
            log_probs_R, old_R, advantages_R, s.eps_clip, s.eps_clip_high, kept_R
        )
    else:
        log_ratio_R = means_R if s.advantage_estimator == "gspo" else gap_R
        loss_R, report["pg_clipfrac"] = losses.clipped_policy_loss(
            log_ratio_R, advantages_R, s.eps_clip, s.eps_clip_high, s.eps_clip_c, kept_R
        )
    return loss_R if mb.correction_R is None else loss_R * mb.correction_R, report


def _over_context(sums_N: torch.Tensor) -> torch.Tensor:
    """Sums of samples whose tokens context parallel ranks share; the gradient is shared alike."""
    if mpu.get_context_parallel_world_size() == 1:
        return sums_N
    group: Any = mpu.get_context_parallel_group()
    return all_reduce(sums_N, group=group)


def custom(
    function: Callable, args: types.SimpleNamespace, mb: MicroBatch, logits_RV: torch.Tensor
) -> tuple[torch.Tensor, Report]:
    """A user's ``--custom-loss-function-path``: ``f(args, batch, logits, sum_of_sample_mean) -> (loss, {name:
    scalar})``.

    ``batch`` is the micro-batch's columns as a dict, ``logits`` the rows that predict response tokens (this rank's
    slice of the vocabulary), and ``sum_of_sample_mean`` turns one value a token into this micro-batch's part of the
    loss. No gradient goes through the rows of masked tokens: what a function computes there, NaN and infinity included,
    changes nothing.
    """
    if logits_RV.requires_grad:
        logits_RV.register_hook(lambda gradient_RV: losses.masked(gradient_RV, mb.mask_R[:, None]))
    answer = function(args, vars(mb), logits_RV, lambda values_R: total(values_R, mb))
    kinds = [type(part) for part in answer] if isinstance(answer, tuple) else [type(answer)]
    if (
        len(kinds) != 2
        or not issubclass(kinds[0], torch.Tensor)
        or answer[0].numel() != 1
        or not issubclass(kinds[1], dict)
    ):
        held = ", ".join(kind.__name__ for kind in kinds)
        raise UsageError(
            f"--custom-loss-function-path returned {held}", "return (loss, metrics): a tensor of one number, and a dict"
        )
    loss, metrics = answer
    return loss, {"loss": loss} | {
        name: torch.as_tensor(value, dtype=torch.float64, device=loss.device) for name, value in metrics.items()
    }
