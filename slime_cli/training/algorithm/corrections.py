"""Corrections for samples that another policy generated than the one that training calls old. Numpy in float64;
torch-free.

The engine samples from ``mu`` (its own kernels, perhaps older weights) while the loss takes ``pi_old`` from Megatron.
With ``d = log pi_old - log mu`` at each trained token, an importance weight ``exp(d)`` on the loss corrects the
difference, and samples too far off can be rejected. Both are constants of the batch, computed over the whole of it
before the first step, so they cannot depend on packing or layout. What bounds decide is decided on the ratio itself;
only what is multiplied into the loss has its exponent bounded.

References: truncated importance sampling, TIS (F. Yao et al., "Your efficient RL framework secretly brings you
off-policy RL training", 2025); IcePop (Ring-1T, arXiv 2510.18855): ``--tis-mode mask`` at token level; masked
importance sampling with sequence and geometric levels (MIS, slime's and verl's rollout correction).
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from slime_cli.training.algorithm.advantages import Shape, trajectory_rewards
from slime_cli.training.settings import Settings

LEVELS = ("token", "sequence", "geometric")
MODES = ("truncate", "clip", "mask")
LIMIT = 20.0
"""Bound on an exponent whose value is multiplied or averaged: exp(20) is out of any range that training uses, and
finite in float32."""


@dataclasses.dataclass(frozen=True)
class Correction:
    """What the policy loss is multiplied by."""

    weights_R: np.ndarray
    """Importance weights, 0 where masked or rejected."""
    metrics: dict[str, float]


def log_weights(gap_R: np.ndarray, level: str, shape: Shape) -> np.ndarray:
    """``d`` per token, its sum over the sample, or its mean over the sample, at every trained token, [R]."""
    if level == "token":
        return shape.masked(gap_R)
    sums_N = shape.sums(gap_R)
    if level == "geometric":
        sums_N = sums_N / np.maximum(shape.counts(), 1)
    elif level != "sequence":
        raise ValueError(f"unknown level {level!r}; one of {', '.join(LEVELS)}")
    return shape.over_tokens(sums_N)


def ratios(log_ratio_R: np.ndarray) -> np.ndarray:
    """``exp``, infinity where it overflows: such a ratio is out of any bounds."""
    with np.errstate(over="ignore"):
        return np.exp(log_ratio_R)


def bounded(ratio_R: np.ndarray, mode: str, low: float, high: float) -> np.ndarray:
    """``truncate``: at most ``high``; ``clip``: within [low, high]; ``mask``: 0 outside [low, high]."""
    if mode == "truncate":
        return np.minimum(ratio_R, high)
    if mode == "clip":
        return np.clip(ratio_R, low, high)
    if mode == "mask":
        return np.where((ratio_R < low) | (ratio_R > high), 0.0, ratio_R)
    raise ValueError(f"unknown mode {mode!r}; one of {', '.join(MODES)}")


Custom = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, dict[str, float]]]
"""A user's weights [R] and metrics, of the old and the engine's log-probabilities."""


def mean_weight(weights_R: np.ndarray, level: str, shape: Shape, trajectories_N: np.ndarray | None) -> float:
    """What ``--tis-batch-normalize`` divides by: the mean over all that have a weight of their own, of which there must
    be one.

    At token level those are the trained tokens. At the other levels they are samples, however long they are; siblings
    that one trajectory fanned out count as one together, with their mean. ``trajectories_N``: which trajectory each
    sample came from; each its own when not given.
    """
    if level == "token":
        return float(weights_R[shape.mask_R].mean())
    has_N = shape.counts() > 0
    of_sample_N = (shape.sums(weights_R) / np.maximum(shape.counts(), 1))[has_N]
    of_trajectory_N, first_N = trajectory_rewards(
        of_sample_N, None if trajectories_N is None else trajectories_N[has_N]
    )
    return float(of_trajectory_N[first_N].mean())


def correct(
    settings: Settings,
    old_log_probs_R: np.ndarray,
    rollout_log_probs_R: np.ndarray,
    shape: Shape,
    custom: Custom | None = None,
    trajectories_N: np.ndarray | None = None,
) -> Correction:
    """Weights by ``settings`` (``use_tis``, ``tis_*``, ``use_rs``, ``rs_*``), and what they did. ``custom`` takes the
    place of the ``tis_*``; without ``use_tis`` only its metrics count. ``trajectories_N`` as in :func:`mean_weight`."""
    s = settings
    mask_R = shape.mask_R
    gap_R = shape.masked(old_log_probs_R) - shape.masked(rollout_log_probs_R)
    weights_R = mask_R.astype(np.float64)
    metrics = mismatch(gap_R, shape)
    if custom is not None:
        custom_R, theirs = custom(old_log_probs_R, rollout_log_probs_R)
        weights_R = custom_R if s.use_tis else weights_R
        metrics = metrics | theirs
    elif s.use_tis:
        ratio_R = ratios(log_weights(gap_R, s.tis_level, shape))
        bounded_R = bounded(ratio_R, s.tis_mode, s.tis_clip_low, s.tis_clip)
        weights_R = np.where(mask_R, np.minimum(bounded_R, np.exp(LIMIT)), 0.0)
        metrics["tis_clipfrac"] = float((weights_R[mask_R] != ratio_R[mask_R]).mean()) if mask_R.any() else 0.0
        if s.tis_batch_normalize and weights_R[mask_R].any():
            weights_R = weights_R / mean_weight(weights_R, s.tis_level, shape, trajectories_N)
        metrics["tis"] = float(weights_R[mask_R].mean()) if mask_R.any() else 0.0
    if s.use_rs:
        kept_R = rejection(s, gap_R, shape)
        metrics["rs_rejected"] = float(1 - kept_R[mask_R].mean()) if mask_R.any() else 0.0
        weights_R = np.where(kept_R, weights_R, 0.0)
    return Correction(weights_R, metrics)


def rejection(settings: Settings, gap_R: np.ndarray, shape: Shape) -> np.ndarray:
    """bool [R], False at tokens whose ratio at ``rs_level`` is out of bounds, and in every sample that a veto strikes.

    The veto rejects a whole sample with one token whose ratio is below ``rs_veto_threshold``: the old policy would all
    but never have said it.
    """
    s = settings
    ratio_R = ratios(log_weights(gap_R, s.rs_level, shape))
    kept_R = ~((ratio_R < s.rs_lower_bound) | (ratio_R > s.rs_upper_bound))
    if s.rs_veto_threshold is not None:
        struck_N = shape.sums(ratios(gap_R) < s.rs_veto_threshold) > 0
        kept_R &= ~struck_N[shape.owner_R]
    return kept_R


def mismatch(gap_R: np.ndarray, shape: Shape) -> dict[str, float]:
    """How far the engine's policy is from the old one, over trained tokens: estimates of the divergence of ``pi_old``
    from ``mu`` under samples of ``mu`` (k1 and k3), the ratio's mean, spread and maximum, and the share of samples that
    are left of the batch once importance is accounted for (effective sample size, at sequence level)."""
    gap = gap_R[shape.mask_R]
    if not len(gap):
        return {}
    ratio = np.exp(np.clip(gap, -LIMIT, LIMIT))
    has = shape.counts() > 0
    weight = np.exp(np.clip(shape.sums(gap_R)[has], -LIMIT, LIMIT))
    return {
        "mismatch_kl": float(-gap.mean()),
        "mismatch_k3_kl": float((np.expm1(np.clip(gap, -LIMIT, LIMIT)) - gap).mean()),
        "mismatch_ratio": float(ratio.mean()),
        "mismatch_ratio_std": float(ratio.std()),
        "mismatch_ratio_max": float(ratio.max()),
        "mismatch_ess": float(weight.sum() ** 2 / (weight**2).sum() / len(weight)),
    }
