"""The policy loss and its parts: pure functions of per-token tensors. Each is checked against a float64 reference.

Tensors end in the shape they have: ``_T`` tokens of a pack (any order). Natural logarithms throughout. Masked positions
never touch a result, NaN and infinity included: callers pick positions with :func:`masked`, never by multiplying.
Neither does what a clip leaves out: ``exp`` overflows in float32 from 88.7 on and 0 * inf is NaN in the backward pass,
so an exponent is bounded before ``exp`` wherever a larger one would change nothing. What is not left out overflows
visibly, to infinity.
"""

import math
from collections.abc import Callable

import torch

KL_TYPES = ("k1", "k2", "k3", "low_var_kl")
LOW_VAR_KL_LIMIT = 10.0
FINITE_EXPONENT = 80.0
"""``exp`` of it is finite in float32 and bfloat16, and so large that no result which it is a factor of is within a
clip."""


def masked(values_T: torch.Tensor, mask_T: torch.Tensor) -> torch.Tensor:
    """Values where the mask is set and 0 elsewhere; nothing of a masked value, or of its gradient, gets through."""
    return torch.where(mask_T, values_T, torch.zeros((), dtype=values_T.dtype, device=values_T.device))


def kl(
    log_probs_T: torch.Tensor, ref_log_probs_T: torch.Tensor, kind: str, old_log_probs_T: torch.Tensor | None = None
) -> torch.Tensor:
    """Per-token estimate of KL(policy || reference), shape [T] (J. Schulman, "Approximating KL divergence", 2020).

    k1 = lp - ref; k2 = (lp - ref)^2 / 2; k3 = exp(ref - lp) - 1 - (ref - lp); low_var_kl is k3 clamped to [-10, 10].
    With ``old_log_probs_T`` the estimate is weighted by ``exp(lp - old)``, which makes its gradient that of the
    divergence although another policy sampled the tokens (DeepSeek-V3.2, arXiv 2512.02556). Raises ValueError for
    another ``kind``.
    """
    log_ratio_T = log_probs_T - ref_log_probs_T
    log_weight_T = None if old_log_probs_T is None else log_probs_T - old_log_probs_T
    if kind == "k1":
        return log_ratio_T if log_weight_T is None else log_weight_T.exp() * log_ratio_T
    if kind == "k2":
        estimate_T = log_ratio_T.square() / 2
        return estimate_T if log_weight_T is None else _weighted(estimate_T, log_weight_T)
    if kind == "k3":
        return _k3(-log_ratio_T, log_weight_T, math.inf)
    if kind == "low_var_kl":
        return _k3(-log_ratio_T, log_weight_T, FINITE_EXPONENT).clamp(-LOW_VAR_KL_LIMIT, LOW_VAR_KL_LIMIT)
    raise ValueError(f"unknown KL estimator {kind!r}; one of {', '.join(KL_TYPES)}")


def _k3(reverse_T: torch.Tensor, log_weight_T: torch.Tensor | None, highest: float) -> torch.Tensor:
    """``exp(r) - 1 - r`` with r = ref - lp, times ``exp(log_weight)`` where there is one. Exponents stop at
    ``highest``."""
    bounded_T = reverse_T.clamp(max=highest)
    if log_weight_T is None:
        return torch.expm1(bounded_T) - bounded_T
    # The policy has left a token that the reference keeps: exp(r) may overflow though the small weight takes it back.
    # There the product is written out as exp(ref - old) - exp(lp - old) (1 + r), whose first term has no gradient.
    left_T = (reverse_T > 1) & (log_weight_T < 0)
    near_T = masked(bounded_T, ~left_T)
    far_T = masked(reverse_T, left_T)
    small_T = masked(log_weight_T, left_T)
    written_out_T = (far_T + small_T).detach().clamp(max=highest).exp() - small_T.exp() * (1 + far_T)
    return torch.where(left_T, written_out_T, _weighted(torch.expm1(near_T) - near_T, log_weight_T.clamp(max=highest)))


def _weighted(estimate_T: torch.Tensor, log_weight_T: torch.Tensor) -> torch.Tensor:
    """``exp(log_weight) * estimate``. Where the estimate is at its minimum of 0, so are product and gradient, whatever
    the weight."""
    bounded_T = log_weight_T.clamp(max=FINITE_EXPONENT)
    return torch.where(estimate_T == 0, bounded_T, log_weight_T).exp() * estimate_T


def clipped_policy_loss(
    log_ratio_T: torch.Tensor,
    advantages_T: torch.Tensor,
    eps_low: float,
    eps_high: float,
    dual_clip: float | None = None,
    kept_T: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's clipped surrogate (arXiv 1707.06347, eq. 7) with separate bounds (DAPO's clip-higher, arXiv 2503.14476).

    ``log_ratio_T`` is the logarithm of the ratio r of the new policy to the old one. Returns the per-token loss
    ``max(-r A, -clip(r, 1 - eps_low, 1 + eps_high) A)`` and whether the clip was active, both [T]. ``dual_clip`` c > 1
    bounds the loss of a negative advantage by ``-c A`` (dual-clip PPO, arXiv 1912.09729). Where ``kept_T`` is False the
    loss is 0.
    """
    # The ratio counts without bound only for a negative advantage that no dual clip bounds. Elsewhere its exponent
    # stops above all bounds, where the clip is active and its own gradient 0.
    counts_T = (advantages_T < 0) & (dual_clip is None)
    if kept_T is not None:
        counts_T = counts_T & kept_T
    above = 1.0 + math.log(max(1 + eps_high, dual_clip or 1.0))
    ratio_T = torch.exp(torch.where(counts_T, log_ratio_T, log_ratio_T.clamp(max=above)))
    plain_T = -ratio_T * advantages_T
    clipped_T = -ratio_T.clamp(1 - eps_low, 1 + eps_high) * advantages_T
    loss_T = torch.maximum(plain_T, clipped_T)
    if dual_clip is not None:
        loss_T = torch.where(advantages_T < 0, torch.minimum(loss_T, -dual_clip * advantages_T), loss_T)
    return loss_T if kept_T is None else masked(loss_T, kept_T), clipped_T > plain_T


def cispo_loss(
    log_probs_T: torch.Tensor,
    old_log_probs_T: torch.Tensor,
    advantages_T: torch.Tensor,
    eps_low: float,
    eps_high: float,
    kept_T: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """CISPO (MiniMax-M1, arXiv 2506.13585): ``-sg(clip(r, 1 - eps_low, 1 + eps_high)) A lp``, and whether the clip was
    active. The clip bounds the weight and never the gradient: every token keeps teaching, but those where ``kept_T`` is
    False.
    """
    ratio_T = torch.exp(log_probs_T - old_log_probs_T).detach()
    weight_T = ratio_T.clamp(1 - eps_low, 1 + eps_high)
    loss_T = -weight_T * advantages_T * log_probs_T
    return loss_T if kept_T is None else masked(loss_T, kept_T), weight_T != ratio_T


def sample_means(
    values_T: torch.Tensor,
    mask_T: torch.Tensor,
    sample_T: torch.Tensor,
    count: int,
    over_ranks: Callable = lambda sums_N: sums_N,
) -> torch.Tensor:
    """Mean over the trained tokens of each sample, laid out at its tokens again, [T]; 0 for a sample without any.

    ``sample_T`` says which of ``count`` samples a token belongs to; ``over_ranks`` adds up the ranks that hold parts of
    them. GSPO's sequence ratio is ``exp`` of this over ``lp - old`` (arXiv 2507.18071).
    """
    totals_N = over_ranks(values_T.new_zeros(count).index_add(0, sample_T, masked(values_T, mask_T)))
    counts_N = over_ranks(values_T.new_zeros(count).index_add(0, sample_T, mask_T.to(values_T.dtype)))
    return (totals_N / counts_N.clamp(min=1))[sample_T]


def off_policy_sequence_mask(mean_gap_T: torch.Tensor, advantages_T: torch.Tensor, delta: float) -> torch.Tensor:
    """OPSM (DeepSeek-V3.2, arXiv 2512.02556): bool [T], False in samples with a negative advantage whose mean ``old -
    lp`` (``mean_gap_T``) is above ``delta``: the policy has moved away from them already."""
    return ~((advantages_T < 0) & (mean_gap_T.detach() > delta))


def value_loss(
    values_T: torch.Tensor, old_values_T: torch.Tensor, returns_T: torch.Tensor, clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The critic's loss ``max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2)`` and whether the clip was active, both
    [T] (PPO's reference implementation; no factor of one half)."""
    plain_T = (values_T - returns_T).square()
    moved_T = values_T - old_values_T
    far_T = moved_T.abs() > clip
    near_T = torch.where(far_T, old_values_T + moved_T.clamp(-clip, clip), values_T)
    clipped_T = (near_T - returns_T).square()
    return torch.maximum(plain_T, clipped_T), far_T & (clipped_T > plain_T)


def sample_weights(
    mask_sums_N: torch.Tensor, trajectories_N: torch.Tensor, step_trajectories: int, per_token: bool
) -> torch.Tensor:
    """Weight of each token of a sample in the step's loss, [N].

    Default: the mean over a trajectory's trained tokens, those of all its siblings, then over the trajectories of the
    step: ``1 / (max(mask sum over the trajectory, 1) * step_trajectories)``. What fans out counts no more than what
    does not. With ``per_token`` the weight is 1 and the step divides by all trained tokens of the global batch.
    """
    if per_token:
        return torch.ones_like(mask_sums_N, dtype=torch.float32)
    owners_N = torch.unique(trajectories_N, return_inverse=True)[1]
    totals_N = torch.zeros_like(mask_sums_N).index_add(0, owners_N, mask_sums_N)[owners_N]
    return 1.0 / (totals_N.clamp(min=1).float() * step_trajectories)
