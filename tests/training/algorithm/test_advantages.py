"""GRPO and Dr. GRPO advantages against a plain reference written from the papers."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_cli.training.algorithm.advantages import STD_EPSILON, groups_without_spread, grpo


def reference(rewards: list[float], groups: list[int], divide_by_std: bool) -> list[float]:
    """A_i = (r_i - mean(r)) / std(r) over the group of i (DeepSeekMath, section 4.1); Dr. GRPO leaves out the std."""
    out = []
    for reward, group in zip(rewards, groups):
        members = [r for r, g in zip(rewards, groups) if g == group]
        centred = reward - math.fsum(members) / len(members)
        if len(members) < 2 or len(set(members)) == 1:
            out.append(0.0)
        else:
            out.append(centred / (statistics.stdev(members) + STD_EPSILON) if divide_by_std else centred)
    return out


ragged = st.lists(st.tuples(st.integers(0, 5), st.integers(-1000, 1000).map(lambda n: n / 64)), min_size=1, max_size=40)


@given(ragged, st.booleans())
def test_ragged_and_interleaved_groups_match_the_paper(samples, divide_by_std):
    groups = [g for g, _ in samples]
    rewards = [r for _, r in samples]
    got = grpo(np.array(rewards), np.array(groups), divide_by_std=divide_by_std)
    np.testing.assert_allclose(got, reference(rewards, groups, divide_by_std), rtol=1e-9, atol=1e-12)


def test_a_known_group():
    got = grpo(np.array([1.0, 0.0, 0.0, 1.0]), np.zeros(4, int))
    np.testing.assert_allclose(got, np.array([1, -1, -1, 1]) * math.sqrt(3) / 2, rtol=1e-5)
    got = grpo(np.array([1.0, 0.0, 0.0, 1.0]), np.zeros(4, int), divide_by_std=False)
    np.testing.assert_array_equal(got, [0.5, -0.5, -0.5, 0.5])


def test_one_answer_apart_in_the_float32_of_a_reward_model():
    """Noise of rounding among the other seven is neither a spread of its own nor a large advantage."""
    got = grpo(np.array([0.35] * 7 + [0.95], np.float32), np.zeros(8, int))
    np.testing.assert_allclose(got, [-math.sqrt(1 / 8)] * 7 + [7 * math.sqrt(1 / 8)], rtol=1e-5)


@pytest.mark.parametrize("divide_by_std", [True, False])
def test_single_samples_teach_nothing(divide_by_std):
    np.testing.assert_array_equal(grpo(np.array([3.0, -7.0, 0.5]), np.array([4, 1, 9]), divide_by_std=divide_by_std), 0)


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e-20, 7e8])
def test_equal_rewards_give_exactly_zero(value):
    for dtype in (np.float32, np.float64):
        np.testing.assert_array_equal(grpo(np.array([value] * 8, dtype), np.zeros(8, int)), 0)
    noisy = np.array([value, np.nextafter(value, 9e9)] * 4)
    np.testing.assert_array_equal(grpo(noisy, np.zeros(8, int)), 0)


def test_order_of_samples_does_not_matter():
    rng = np.random.default_rng(0)
    rewards = rng.normal(size=30)
    groups = rng.integers(0, 6, 30)
    order = rng.permutation(30)
    np.testing.assert_allclose(grpo(rewards[order], groups[order]), grpo(rewards, groups)[order], rtol=1e-12)


def test_rewards_as_they_are_without_normalisation():
    rewards = np.array([1.0, 2.0, 2.0])
    got = grpo(rewards, np.zeros(3, int), normalise=False)
    np.testing.assert_array_equal(got, rewards)
    assert got is not rewards


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("normalise", [True, False])
def test_a_reward_that_is_not_finite_is_refused_by_its_place(bad, normalise):
    with pytest.raises(ValueError, match="sample 2 is not finite"):
        grpo(np.array([1.0, 0.0, bad, 1.0]), np.zeros(4, int), normalise=normalise)


fanned = st.lists(
    st.tuples(st.integers(0, 3), st.lists(st.integers(-1000, 1000).map(lambda n: n / 64), min_size=1, max_size=4)),
    min_size=1,
    max_size=12,
)
"""Executions: group, and the reward of each sibling."""


@given(fanned, st.booleans(), st.randoms(use_true_random=False))
def test_a_trajectory_counts_once_in_its_group(found, divide_by_std, random):
    """Mean and spread of the paper are over trajectories' mean rewards, the reward compared with them is a sample's
    own."""
    means = [math.fsum(rewards) / len(rewards) for _, rewards in found]
    want = []
    for group, rewards in found:
        members = [mean for mean, (other, _) in zip(means, found) if other == group]
        equal = len(members) < 2 or max(members) - min(members) <= 2.0**-22 * max(1.0, *map(abs, members))
        spread = statistics.stdev(members) + STD_EPSILON if divide_by_std and len(members) > 1 else 1.0
        want += [0.0 if equal else (r - math.fsum(members) / len(members)) / spread for r in rewards]
    rows = [(r, group, e) for e, (group, rewards) in enumerate(found) for r in rewards]
    order = list(range(len(rows)))
    random.shuffle(order)
    rewards_N, groups_N, trajectories_N = (np.array(column) for column in zip(*(rows[i] for i in order)))
    got = grpo(rewards_N, groups_N, trajectories_N, divide_by_std=divide_by_std)
    np.testing.assert_allclose(got, np.array(want)[order], rtol=1e-9, atol=1e-9)


@given(ragged, st.booleans(), st.randoms(use_true_random=False))
def test_without_fan_out_trajectories_change_nothing_to_the_bit(samples, divide_by_std, random):
    groups = np.array([g for g, _ in samples])
    rewards = np.array([r for _, r in samples]) / 3
    trajectories = np.array(random.sample(range(1000), len(samples)))
    np.testing.assert_array_equal(
        grpo(rewards, groups, trajectories, divide_by_std=divide_by_std),
        grpo(rewards, groups, divide_by_std=divide_by_std),
    )


def test_siblings_differ_but_trajectories_do_not():
    rewards = np.array([1.0, 0.0, 0.5])
    trajectories = np.array([4, 4, 5])
    np.testing.assert_array_equal(grpo(rewards, np.zeros(3, int), trajectories), 0)
    assert (
        groups_without_spread(rewards, np.zeros(3, int), trajectories) == 1
        and groups_without_spread(rewards, np.zeros(3, int)) == 0
    )


def test_groups_without_spread_are_counted():
    assert groups_without_spread(np.array([1.0, 1, 0, 1, 5, 0.1, 0.1]), np.array([0, 0, 1, 1, 2, 3, 3])) == 3
