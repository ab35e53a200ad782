"""Advantages: one number a sample from the rewards of its group. Pure numpy in float64; torch-free.

Groups are ragged by design and told apart by id, never by position. References: GRPO (DeepSeekMath, arXiv 2402.03300,
section 4.1), Dr. GRPO (arXiv 2503.20783).
"""

import numpy as np

STD_EPSILON = 1e-6
"""Added to a group's standard deviation, as slime does."""
SPREAD_TOLERANCE = 1e-9
"""Relative spread within which a group's rewards count as equal: float noise must not become an advantage."""


def grpo(rewards_N: np.ndarray, groups_N: np.ndarray, *, normalise: bool = True, divide_by_std: bool = True) -> np.ndarray:
    """Group-relative advantages, shape [N].

    ``(r - mean) / (std + 1e-6)`` within each group, with the unbiased standard deviation (ddof 1). A group whose rewards
    are equal within float noise, and a group of one, gets exactly zero. ``normalise=False`` returns the rewards as they
    are; ``divide_by_std=False`` is Dr. GRPO. Raises ValueError for a reward that is not finite.
    """
    rewards_N = np.asarray(rewards_N, np.float64)
    if not np.isfinite(rewards_N).all():
        raise ValueError(f"reward of sample {int(np.flatnonzero(~np.isfinite(rewards_N))[0])} is not finite")
    if not normalise:
        return rewards_N.copy()
    out = np.zeros_like(rewards_N)
    for group in np.unique(groups_N):
        members = groups_N == group
        rewards_G = rewards_N[members]
        spread = rewards_G.max() - rewards_G.min()
        if len(rewards_G) < 2 or spread <= SPREAD_TOLERANCE * max(1.0, np.abs(rewards_G).max()):
            continue
        centred_G = rewards_G - rewards_G.mean()
        out[members] = centred_G / (rewards_G.std(ddof=1) + STD_EPSILON) if divide_by_std else centred_G
    return out


def groups_without_spread(rewards_N: np.ndarray, groups_N: np.ndarray) -> int:
    """How many groups teach nothing because their rewards are equal."""
    advantages_N = grpo(rewards_N, groups_N, divide_by_std=False)
    return int(sum(not advantages_N[groups_N == g].any() for g in np.unique(groups_N)))
