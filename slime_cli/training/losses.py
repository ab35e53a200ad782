"""The policy loss and its parts: pure functions of per-token tensors. Each is checked against a float64 reference.

Tensors end in the shape they have: ``_T`` tokens of a pack (any order). Natural logarithms throughout. Masked positions
never touch a result, NaN and infinity included: callers pick positions with :func:`masked`, never by multiplying.
"""

import torch

KL_TYPES = ("k1", "k2", "k3", "low_var_kl")
LOW_VAR_KL_LIMIT = 10.0


def masked(values_T: torch.Tensor, mask_T: torch.Tensor) -> torch.Tensor:
    """Values where the mask is set and 0 elsewhere; nothing of a masked value, or of its gradient, gets through."""
    return torch.where(mask_T, values_T, torch.zeros((), dtype=values_T.dtype, device=values_T.device))


def kl(log_probs_T: torch.Tensor, ref_log_probs_T: torch.Tensor, kind: str) -> torch.Tensor:
    """Per-token estimate of KL(policy || reference), shape [T] (J. Schulman, "Approximating KL divergence", 2020).

    k1 = lp - ref; k2 = (lp - ref)^2 / 2; k3 = exp(ref - lp) - 1 - (ref - lp); low_var_kl is k3 clamped to [-10, 10].
    Raises ValueError for another ``kind``.
    """
    log_ratio_T = log_probs_T - ref_log_probs_T
    if kind == "k1":
        return log_ratio_T
    if kind == "k2":
        return log_ratio_T.square() / 2
    if kind == "k3":
        return torch.expm1(-log_ratio_T) + log_ratio_T
    if kind == "low_var_kl":
        # Twice the limit is far into the clamp already; beyond it exp would overflow, and its gradient be 0 * inf.
        reverse_T = (-log_ratio_T).clamp(max=2 * LOW_VAR_KL_LIMIT)
        return (torch.expm1(reverse_T) - reverse_T).clamp(-LOW_VAR_KL_LIMIT, LOW_VAR_KL_LIMIT)
    raise ValueError(f"unknown KL estimator {kind!r}; one of {', '.join(KL_TYPES)}")


def clipped_policy_loss(
    log_probs_T: torch.Tensor, old_log_probs_T: torch.Tensor, advantages_T: torch.Tensor, eps_low: float, eps_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's clipped surrogate (arXiv 1707.06347, eq. 7) with separate bounds (DAPO's clip-higher, arXiv 2503.14476).

    Returns the per-token loss ``max(-r A, -clip(r, 1 - eps_low, 1 + eps_high) A)`` and whether the clip was active,
    both [T].
    """
    ratio_T = torch.exp(log_probs_T - old_log_probs_T)
    plain_T = -ratio_T * advantages_T
    clipped_T = -ratio_T.clamp(1 - eps_low, 1 + eps_high) * advantages_T
    return torch.maximum(plain_T, clipped_T), clipped_T > plain_T


def sample_weights(mask_sums_N: torch.Tensor, global_batch_size: int, per_token: bool) -> torch.Tensor:
    """Weight of each token of a sample in the step's loss, [N].

    Default: the mean over a sample's trained tokens, then over the global batch, ``1 / (max(mask sum, 1) * batch)``.
    With ``per_token`` the weight is 1 and the step divides by all trained tokens of the global batch.
    """
    if per_token:
        return torch.ones_like(mask_sums_N, dtype=torch.float32)
    return 1.0 / (mask_sums_N.clamp(min=1).float() * global_batch_size)
