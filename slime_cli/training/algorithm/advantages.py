"""Advantages from the rewards of a global batch. Pure numpy in float64; torch-free.

Everything is computed over the whole batch at once, so nothing here can depend on packing, micro-batches or layout.
Groups are ragged by design and distinguished by id, never by position; what is compared in them are trajectories, each
once, however many samples it fanned out into. Recurrences over a response run over its trained tokens only: what is
masked (a tool's words, padding) is stepped over, NaN and infinity included.

References: GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1), Dr. GRPO (arXiv 2503.20783), REINFORCE++ and its
baseline variant (arXiv 2501.03262), generalised advantage estimation (arXiv 1506.02438, eq. 16).
"""

import dataclasses

import numpy as np

from slime_cli.options.estimators import ESTIMATORS, GROUP_RELATIVE
from slime_cli.training.settings import Settings

STD_EPSILON = 1e-6
"""Added to a group's standard deviation, as slime does."""
SPREAD_TOLERANCE = 2.0**-22
"""Relative spread within which a group's rewards count as equal: two roundings of float32, which is what reward models
and services answer in. Noise must not become an advantage."""
WHITEN_EPSILON = 1e-8
"""Added to the variance when advantages are whitened, as slime does."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """Where the response tokens of N samples are in the ``_R`` columns of a batch, and which of them are trained."""

    response_lengths_N: np.ndarray
    mask_R: np.ndarray
    """bool."""

    @property
    def owner_R(self) -> np.ndarray:
        """The sample that each response token belongs to."""
        return np.repeat(np.arange(len(self.response_lengths_N)), self.response_lengths_N)

    def over_tokens(self, values_N: np.ndarray) -> np.ndarray:
        """A sample's value at each of its trained tokens, 0 elsewhere, [R]."""
        return np.where(self.mask_R, np.asarray(values_N, np.float64)[self.owner_R], 0.0)

    def masked(self, values_R: np.ndarray) -> np.ndarray:
        return np.where(self.mask_R, np.asarray(values_R, np.float64), 0.0)

    def sums(self, values_R: np.ndarray) -> np.ndarray:
        """Sum over each sample's trained tokens, [N]."""
        return np.bincount(self.owner_R, self.masked(values_R), minlength=len(self.response_lengths_N))

    def counts(self) -> np.ndarray:
        """Trained tokens of each sample, [N]."""
        return np.bincount(self.owner_R[self.mask_R], minlength=len(self.response_lengths_N))

    def last_R(self) -> np.ndarray:
        """bool, True at each sample's last trained token; a sample without one has none."""
        where = np.flatnonzero(self.mask_R)
        owners = self.owner_R[where]
        out = np.zeros(len(self.mask_R), bool)
        out[where[np.flatnonzero(np.append(owners[1:] != owners[:-1], True))] if len(where) else where] = True
        return out


def trajectory_rewards(rewards_N: np.ndarray, trajectories_N: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """At each sample its trajectory's reward, the mean over siblings; and bool, True at the first of them. Both [N].

    ``trajectories_N`` names the trajectory of each sample; with None each is its own.
    """
    if trajectories_N is None:
        return rewards_N, np.ones(len(rewards_N), bool)
    _, first, owner_N = np.unique(trajectories_N, return_index=True, return_inverse=True)
    first_N = np.zeros(len(rewards_N), bool)
    first_N[first] = True
    return (np.bincount(owner_N, rewards_N) / np.bincount(owner_N))[owner_N], first_N


def finite(rewards_N: np.ndarray) -> np.ndarray:
    """In float64. Raises ValueError for a reward that is not finite: whitening would spread it over the whole batch."""
    rewards_N = np.asarray(rewards_N, np.float64)
    if not np.isfinite(rewards_N).all():
        raise ValueError(f"reward of sample {int(np.flatnonzero(~np.isfinite(rewards_N))[0])} is not finite")
    return rewards_N


def grpo(
    rewards_N: np.ndarray,
    groups_N: np.ndarray,
    trajectories_N: np.ndarray | None = None,
    *,
    normalise: bool = True,
    divide_by_std: bool = True,
) -> np.ndarray:
    """Group-relative advantages, shape [N].

    ``(r - mean) / (std + 1e-6)`` within each group, with mean and unbiased standard deviation (ddof 1) over the rewards
    of its trajectories, and r the sample's own: siblings that were rewarded apart have advantages apart. A group whose
    trajectories' rewards are equal within float noise, and a group of one trajectory, gets exactly zero.
    ``normalise=False`` returns the rewards as they are; ``divide_by_std=False`` is Dr. GRPO. Raises ValueError for a
    reward that is not finite.
    """
    rewards_N = finite(rewards_N)
    if not normalise:
        return rewards_N.copy()
    out = np.zeros_like(rewards_N)
    of_trajectory_N, first_N = trajectory_rewards(rewards_N, trajectories_N)
    for group in np.unique(groups_N):
        members = groups_N == group
        rewards_G = of_trajectory_N[members & first_N]
        spread = rewards_G.max() - rewards_G.min()
        if len(rewards_G) < 2 or spread <= SPREAD_TOLERANCE * max(1.0, np.abs(rewards_G).max()):
            continue
        centred = rewards_N[members] - rewards_G.mean()
        out[members] = centred / (rewards_G.std(ddof=1) + STD_EPSILON) if divide_by_std else centred
    return out


def groups_without_spread(rewards_N: np.ndarray, groups_N: np.ndarray, trajectories_N: np.ndarray | None = None) -> int:
    """How many groups teach nothing because their trajectories' rewards are equal."""
    advantages_N = grpo(rewards_N, groups_N, trajectories_N, divide_by_std=False)
    return int(sum(not advantages_N[groups_N == g].any() for g in np.unique(groups_N)))


def token_rewards(rewards_N: np.ndarray, kl_R: np.ndarray | None, kl_coef: float, shape: Shape) -> np.ndarray:
    """``-kl_coef * kl`` at every trained token, and the sample's reward on its last trained token besides, [R]."""
    out_R = np.zeros(len(shape.mask_R)) if kl_R is None else -kl_coef * shape.masked(kl_R)
    last_R = shape.last_R()
    out_R[last_R] += np.asarray(rewards_N, np.float64)[shape.owner_R[last_R]]
    return out_R


def discounted(values_R: np.ndarray, decay: float, shape: Shape) -> np.ndarray:
    """``y_t = x_t + decay * y_{t+1}`` over each sample's trained tokens, 0 at masked ones, [R]."""
    from scipy.signal import lfilter

    out_R = np.zeros(len(shape.mask_R))
    where = np.flatnonzero(shape.mask_R)
    ends = np.cumsum(shape.counts())
    for begin, end in zip(np.append(0, ends[:-1]), ends):
        if end > begin:
            backwards = np.asarray(values_R, np.float64)[where[begin:end]][::-1]
            out_R[where[begin:end]] = lfilter([1.0], [1.0, -decay], backwards)[::-1]
    return out_R


def gae(
    rewards_R: np.ndarray, values_R: np.ndarray, gamma: float, lambd: float, shape: Shape
) -> tuple[np.ndarray, np.ndarray]:
    """Generalised advantage estimation over trained tokens: advantages and returns, both [R].

    ``delta_t = r_t + gamma V_{t+1} - V_t`` with a value of 0 after the last token, ``A_t = sum (gamma lambda)^k
    delta_{t+k}`` and ``return_t = A_t + V_t``.
    """
    where = np.flatnonzero(shape.mask_R)
    values = np.asarray(values_R, np.float64)[where]
    following = np.where(shape.last_R()[where], 0.0, np.append(values[1:], 0.0))
    delta_R = np.zeros(len(shape.mask_R))
    delta_R[where] = np.asarray(rewards_R, np.float64)[where] + gamma * following - values
    advantages_R = discounted(delta_R, gamma * lambd, shape)
    returns_R = np.zeros(len(shape.mask_R))
    returns_R[where] = advantages_R[where] + values
    return advantages_R, returns_R


def whiten(advantages_R: np.ndarray, shape: Shape) -> np.ndarray:
    """``(A - mean) / sqrt(var + 1e-8)`` over all trained tokens of the global batch, with the unbiased variance, [R].

    Fewer than two trained tokens have no variance: their advantages come back centred only.
    """
    trained = np.asarray(advantages_R, np.float64)[shape.mask_R]
    out_R = np.zeros(len(shape.mask_R))
    if len(trained):
        variance = trained.var(ddof=1) if len(trained) > 1 else 1.0
        out_R[shape.mask_R] = (trained - trained.mean()) / np.sqrt(variance + WHITEN_EPSILON)
    return out_R


def compute(
    settings: Settings,
    rewards_N: np.ndarray,
    groups_N: np.ndarray,
    shape: Shape,
    *,
    trajectories_N: np.ndarray | None = None,
    kl_R: np.ndarray | None = None,
    values_R: np.ndarray | None = None,
    distil_R: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and returns of every response token, both [R] and 0 where masked, by ``settings.advantage_estimator``.

    ``trajectories_N``: which trajectory each sample came from; each its own when not given. ``kl_R``: divergence from
    the reference that ``--kl-coef`` takes off the reward. ``values_R``: the critic's, for ppo. ``distil_R``: student
    minus teacher log-probabilities, which on-policy distillation takes off the advantage.
    """
    s = settings
    estimator = s.advantage_estimator
    rewards_N = finite(rewards_N)
    if estimator in GROUP_RELATIVE:
        advantages_R = shape.over_tokens(
            grpo(
                rewards_N,
                groups_N,
                trajectories_N,
                normalise=s.rewards_normalization,
                divide_by_std=s.grpo_std_normalization,
            )
        )
        returns_R = advantages_R
    elif estimator == "reinforce_plus_plus":
        advantages_R = discounted(token_rewards(rewards_N, kl_R, s.kl_coef, shape), s.gamma, shape)
        returns_R = advantages_R
    elif estimator == "reinforce_plus_plus_baseline":
        centred_N = grpo(rewards_N, groups_N, trajectories_N, normalise=s.rewards_normalization, divide_by_std=False)
        advantages_R = shape.over_tokens(centred_N) - (0.0 if kl_R is None else s.kl_coef * shape.masked(kl_R))
        returns_R = advantages_R
    elif estimator == "ppo":
        if values_R is None:
            raise ValueError("ppo needs the critic's values")
        advantages_R, returns_R = gae(
            token_rewards(rewards_N, kl_R, s.kl_coef, shape), values_R, s.gamma, s.lambd, shape
        )
    else:
        raise ValueError(f"unknown advantage estimator {estimator!r}; one of {', '.join(ESTIMATORS)}")
    return conclude(s, advantages_R, shape, distil_R), returns_R


def conclude(settings: Settings, advantages_R: np.ndarray, shape: Shape, distil_R: np.ndarray | None) -> np.ndarray:
    """What comes after any estimator, a user's own as well: distillation's part off the advantages, then whitening
    where asked."""
    if distil_R is not None:
        advantages_R = advantages_R - settings.opd_kl_coef * shape.masked(distil_R)
    return whiten(advantages_R, shape) if settings.normalize_advantages else advantages_R
