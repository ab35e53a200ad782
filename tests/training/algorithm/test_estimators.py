"""Token-level advantages against plain loops written from the papers; what is masked changes nothing."""

import dataclasses
import math
import statistics

import numpy as np
import pytest

from slime_cli.options.estimators import WHITENED
from slime_cli.training.algorithm import advantages
from slime_cli.training.algorithm.advantages import Shape
from slime_cli.training.settings import Settings

LENGTHS = [5, 1, 0, 7, 3, 4, 2]
GROUPS = np.array([0, 0, 0, 1, 1, 2, 3])
REWARDS = np.array([1.0, 0.0, 0.5, 1.0, 0.0, 0.25, 1.0])


def case(seed: int = 0) -> tuple[Shape, np.ndarray, np.ndarray]:
    """Ragged samples: one without response, one wholly masked, holes in others; divergences and values at every
    token."""
    rng = np.random.default_rng(seed)
    mask = rng.random(sum(LENGTHS)) > 0.3
    mask[13:16] = False  # sample 4
    mask[[4, 12]] = [False, True]  # a masked last token, and one that is not
    return Shape(np.array(LENGTHS), mask), rng.normal(size=len(mask)), rng.normal(size=len(mask))


def trained(shape: Shape) -> list[list[int]]:
    """Places of each sample's trained tokens."""
    starts = np.cumsum([0, *LENGTHS])
    return [[t for t in range(a, b) if shape.mask_R[t]] for a, b in zip(starts, starts[1:])]


def rewards_of(tokens: list[int], reward: float, kl, coef: float) -> list[float]:
    out = [-coef * kl[t] for t in tokens]
    if out:
        out[-1] += reward
    return out


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_plus_plus_returns(gamma):
    shape, kl, _ = case()
    got = advantages.discounted(advantages.token_rewards(REWARDS, kl, 0.1, shape), gamma, shape)
    want = np.zeros(len(kl))
    for tokens, reward in zip(trained(shape), REWARDS):
        r = rewards_of(tokens, reward, kl, 0.1)
        for i, t in enumerate(tokens):
            want[t] = math.fsum(gamma ** (k - i) * r[k] for k in range(i, len(r)))
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("gamma, lambd", [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0)])
def test_generalised_advantage_estimation(gamma, lambd):
    shape, kl, values = case()
    got, returns = advantages.gae(advantages.token_rewards(REWARDS, kl, 0.05, shape), values, gamma, lambd, shape)
    want = np.zeros(len(kl))
    want_returns = np.zeros(len(kl))
    for tokens, reward in zip(trained(shape), REWARDS):
        r = rewards_of(tokens, reward, kl, 0.05)
        v = [values[t] for t in tokens] + [0.0]
        delta = [r[i] + gamma * v[i + 1] - v[i] for i in range(len(tokens))]
        for i, t in enumerate(tokens):
            want[t] = math.fsum((gamma * lambd) ** (k - i) * delta[k] for k in range(i, len(tokens)))
            want_returns[t] = want[t] + v[i]
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(returns, want_returns, rtol=1e-12, atol=1e-13)


def test_without_discount_the_return_is_the_reward_and_the_advantage_what_the_value_missed():
    shape, _, values = case()
    got, returns = advantages.gae(advantages.token_rewards(REWARDS, None, 0.0, shape), values, 1.0, 1.0, shape)
    np.testing.assert_allclose(returns, shape.over_tokens(REWARDS), atol=1e-12)
    np.testing.assert_allclose(got, np.where(shape.mask_R, shape.over_tokens(REWARDS) - values, 0), atol=1e-12)


def test_the_reward_is_on_the_last_trained_token_however_short_the_sample():
    """slime puts it on the wrong token, or none, when another rank owns the last one of a short sample."""
    for length in range(1, 40):
        shape = Shape(np.array([length, length]), np.ones(2 * length, bool))
        got = advantages.token_rewards(np.array([2.0, 3.0]), None, 0.0, shape)
        assert got[length - 1] == 2.0 and got[-1] == 3.0 and np.count_nonzero(got) == 2


def test_a_wholly_masked_sample_is_no_error_and_teaches_nothing():
    shape, kl, values = case()
    assert shape.counts()[4] == 0
    for estimator in advantages.ESTIMATORS:
        got, returns = compute(estimator, shape, kl, values)
        assert np.isfinite(got).all() and not got[13:16].any() and not returns[13:16].any()


def test_whitening():
    shape, kl, _ = case()
    got = advantages.whiten(kl, shape)
    x = [kl[t] for tokens in trained(shape) for t in tokens]
    mean = statistics.fmean(x)
    variance = statistics.variance(x)
    np.testing.assert_allclose(got[shape.mask_R], [(v - mean) / math.sqrt(variance + 1e-8) for v in x], rtol=1e-10)
    assert not got[~shape.mask_R].any()
    one = Shape(np.array([2]), np.array([True, False]))
    np.testing.assert_array_equal(advantages.whiten(np.array([5.0, 1.0]), one), 0)
    assert not advantages.whiten(np.zeros(0), Shape(np.zeros(0, int), np.zeros(0, bool))).size


def compute(estimator: str, shape: Shape, kl, values, order=slice(None)):
    settings = dataclasses.replace(
        Settings(), advantage_estimator=estimator, kl_coef=0.1, normalize_advantages=estimator in WHITENED
    )
    return advantages.compute(settings, REWARDS[order], GROUPS[order], shape, kl_R=kl, values_R=values)


def test_reinforce_plus_plus_baseline():
    shape, kl, values = case()
    means = {g: statistics.fmean(REWARDS[GROUPS == g]) for g in set(GROUPS)}
    raw = np.zeros(len(kl))
    for tokens, reward, group in zip(trained(shape), REWARDS, GROUPS):
        alone = (GROUPS == group).sum() == 1
        for t in tokens:
            raw[t] = (0.0 if alone else reward - means[group]) - 0.1 * kl[t]
    got, _ = compute("reinforce_plus_plus_baseline", shape, kl, values)
    np.testing.assert_allclose(got, advantages.whiten(raw, shape), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("estimator", advantages.ESTIMATORS)
def test_what_is_masked_changes_nothing(estimator):
    shape, kl, values = case()
    want = compute(estimator, shape, kl, values)
    poison = np.random.default_rng(1).choice([np.nan, np.inf, -np.inf], len(kl))
    kl = np.where(shape.mask_R, kl, poison)
    values = np.where(shape.mask_R, values, poison)
    for got, expected in zip(compute(estimator, shape, kl, values), want):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("estimator", advantages.ESTIMATORS)
def test_the_order_of_samples_changes_nothing(estimator):
    shape, kl, values = case()
    want, _ = compute(estimator, shape, kl, values)
    order = np.random.default_rng(2).permutation(len(LENGTHS))
    starts = np.cumsum([0, *LENGTHS])
    rows = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in order]).astype(int)
    moved = Shape(np.array(LENGTHS)[order], shape.mask_R[rows])
    got, _ = compute(estimator, moved, kl[rows], values[rows], order)
    np.testing.assert_allclose(got, want[rows], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("estimator", advantages.ESTIMATORS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_refused_by_every_estimator(estimator, bad):
    shape, kl, values = case()
    settings = dataclasses.replace(Settings(), advantage_estimator=estimator, kl_coef=0.1)
    with pytest.raises(ValueError, match="reward of sample 1 is not finite"):
        advantages.compute(
            settings, np.where(np.arange(len(REWARDS)) == 1, bad, REWARDS), GROUPS, shape, kl_R=kl, values_R=values
        )


def test_distillation_takes_the_gap_off_the_advantage():
    shape, gap, _ = case()
    plain, _ = advantages.compute(Settings(), REWARDS, GROUPS, shape)
    got, _ = advantages.compute(dataclasses.replace(Settings(), opd_kl_coef=0.5), REWARDS, GROUPS, shape, distil_R=gap)
    np.testing.assert_allclose(got, plain - np.where(shape.mask_R, 0.5 * gap, 0), rtol=1e-12)
