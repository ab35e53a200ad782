"""Off-policy corrections against plain loops; ragged samples, masked tokens poisoned."""

import dataclasses
import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_cli.training.algorithm import corrections
from slime_cli.training.algorithm.advantages import Shape
from slime_cli.training.settings import Settings

LENGTHS = [4, 0, 6, 3, 5]


def case() -> tuple[Shape, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    mask = rng.random(sum(LENGTHS)) > 0.25
    mask[10:13] = False  # a sample without a trained token
    old = rng.normal(-2, 0.8, len(mask))
    rollout = rng.normal(-2, 0.8, len(mask))
    old[1] = rollout[1] - 9  # a token that the old policy would not have said
    mask[1] = True
    poison = rng.choice([np.nan, np.inf, -np.inf], len(mask))
    return Shape(np.array(LENGTHS), mask), np.where(mask, old, poison), np.where(mask, rollout, poison)


def trained(shape: Shape) -> list[list[int]]:
    starts = np.cumsum([0, *LENGTHS])
    return [[t for t in range(a, b) if shape.mask_R[t]] for a, b in zip(starts, starts[1:])]


def ratios(shape, old, rollout, level: str) -> dict[int, float]:
    """Trained token -> ratio at the level."""
    out = {}
    for tokens in trained(shape):
        gaps = [old[t] - rollout[t] for t in tokens]
        for t, gap in zip(tokens, gaps):
            d = {"token": gap, "sequence": math.fsum(gaps), "geometric": math.fsum(gaps) / len(gaps)}[level]
            out[t] = math.exp(d) if d < 709 else math.inf
    return out


@pytest.mark.parametrize("level", corrections.LEVELS)
@pytest.mark.parametrize("mode", corrections.MODES)
@pytest.mark.parametrize("normalize", [False, True])
def test_importance_weights(level, mode, normalize):
    shape, old, rollout = case()
    low = 0.5
    high = 1.7
    settings = dataclasses.replace(
        Settings(),
        use_tis=True,
        tis_level=level,
        tis_mode=mode,
        tis_clip_low=low,
        tis_clip=high,
        tis_batch_normalize=normalize,
    )
    got = corrections.correct(settings, old, rollout, shape)
    rule = {
        "truncate": lambda w: min(w, high),
        "clip": lambda w: max(low, min(w, high)),
        "mask": lambda w: w if low <= w <= high else 0.0,
    }[mode]
    want = {t: rule(w) for t, w in ratios(shape, old, rollout, level).items()}
    each = [want[t] for tokens in trained(shape) for t in (tokens if level == "token" else tokens[:1])]
    mean = statistics.fmean(each) if normalize and any(each) else 1.0
    for t, weight in enumerate(got.weights_R):
        assert weight == pytest.approx(want[t] / mean if t in want else 0.0, rel=1e-12, abs=1e-300)
    assert all(math.isfinite(value) for value in got.metrics.values())


@pytest.mark.parametrize("level", ["sequence", "geometric"])
def test_a_sample_counts_once_in_the_mean_of_weights_however_long_it_is(level):
    shape = Shape(np.array([1, 4]), np.array([True, True, True, False, True]))
    gaps = np.log([2.0, 1.0, 1.0, np.nan, 1.0])
    settings = dataclasses.replace(Settings(), use_tis=True, tis_level=level, tis_batch_normalize=True)
    got = corrections.correct(settings, gaps, np.zeros(5), shape)
    np.testing.assert_allclose(got.weights_R, [4 / 3, 2 / 3, 2 / 3, 0, 2 / 3], rtol=1e-14)
    got = corrections.correct(dataclasses.replace(settings, tis_level="token"), gaps, np.zeros(5), shape)
    np.testing.assert_allclose(got.weights_R, [8 / 5, 4 / 5, 4 / 5, 0, 4 / 5], rtol=1e-14)


fanned_out = st.lists(
    st.lists(st.tuples(st.integers(0, 4), st.floats(-3, 3)), min_size=1, max_size=3), min_size=1, max_size=8
)
"""Executions: of each sibling, its trained tokens and the logarithm of its ratio."""


@given(fanned_out, st.sampled_from(["sequence", "geometric"]), st.randoms(use_true_random=False))
def test_siblings_count_as_one_in_the_mean_of_weights(found, level, random):
    rows = [(trajectory, size, log_ratio) for trajectory, siblings in enumerate(found) for size, log_ratio in siblings]
    random.shuffle(rows)
    trajectories_N, sizes_N, log_ratios_N = (np.array(column) for column in zip(*rows))
    shape = Shape(
        sizes_N + 1, np.concatenate([np.arange(n + 1) < n for n in sizes_N])
    )  # the last token of each is masked
    each_N = log_ratios_N if level == "geometric" else log_ratios_N / np.maximum(sizes_N, 1)
    gaps = np.where(shape.mask_R, each_N[shape.owner_R], np.nan)
    settings = dataclasses.replace(Settings(), use_tis=True, tis_level=level, tis_clip=5.0, tis_batch_normalize=True)
    got = corrections.correct(settings, gaps, np.zeros(len(gaps)), shape, trajectories_N=trajectories_N)
    weights = [[min(math.exp(d), 5.0) for n, d in siblings if n] for siblings in found]
    mean = statistics.fmean([statistics.fmean(of_siblings) for of_siblings in weights if of_siblings] or [1.0])
    want = np.minimum(np.exp(log_ratios_N), 5.0)[shape.owner_R] / mean * shape.mask_R
    np.testing.assert_allclose(got.weights_R, want, rtol=1e-12)
    alone = corrections.correct(settings, gaps, np.zeros(len(gaps)), shape, trajectories_N=np.arange(len(rows)))
    np.testing.assert_array_equal(
        alone.weights_R, corrections.correct(settings, gaps, np.zeros(len(gaps)), shape).weights_R
    )


FAR = [-1e4, -100.0, -25.0, 0.0, 25.0, 100.0, 1e4]


@pytest.mark.parametrize("level", corrections.LEVELS)
@pytest.mark.parametrize("mode", corrections.MODES)
@pytest.mark.parametrize("low, high", [(0.5, 2.0), (1e-30, 1e30)])
def test_ratios_far_out_are_bounded_and_never_nan(level, mode, low, high):
    """Bounds are compared with the ratio itself, further out than any weight may be; masked tokens are anything."""
    shape = Shape(np.full(len(FAR), 2), np.tile([True, False], len(FAR)))
    old = np.stack([FAR, np.resize([math.nan, math.inf, -math.inf], len(FAR))], axis=1).flatten()
    settings = dataclasses.replace(
        Settings(),
        use_tis=True,
        tis_level=level,
        tis_mode=mode,
        tis_clip_low=low,
        tis_clip=high,
        use_rs=True,
        rs_level=level,
        rs_lower_bound=low,
        rs_upper_bound=high,
    )
    got = corrections.correct(settings, old, np.zeros(len(old)), shape)
    inside = [math.log(low) <= d <= math.log(high) for d in FAR]
    want = [math.exp(min(d, 20)) if kept else 0.0 for d, kept in zip(FAR, inside)]
    assert got.weights_R[::2].tolist() == pytest.approx(want, rel=1e-14)
    assert not got.weights_R[1::2].any() and got.metrics["rs_rejected"] == pytest.approx(1 - sum(inside) / len(FAR))


def test_a_veto_strikes_below_any_threshold():
    settings = dataclasses.replace(
        Settings(), use_rs=True, rs_lower_bound=0.0, rs_upper_bound=2.0, rs_veto_threshold=1e-12
    )
    shape = Shape(np.array([2, 2]), np.ones(4, bool))
    got = corrections.correct(settings, np.array([0.0, -27.0, 0.0, -28.0]), np.zeros(4), shape)
    assert got.weights_R.tolist() == [1, 1, 0, 0], "exp(-27) is above 1e-12 and exp(-28) below"


def test_a_log_probability_that_is_none_is_seen_to_and_not_rejected():
    settings = dataclasses.replace(Settings(), use_tis=True, tis_mode="mask", tis_clip_low=0.5, use_rs=True)
    got = corrections.correct(settings, np.array([math.nan, 0.0]), np.zeros(2), Shape(np.array([2]), np.ones(2, bool)))
    assert math.isnan(got.weights_R[0]) and math.isnan(got.metrics["mismatch_kl"])


@pytest.mark.parametrize("level", corrections.LEVELS)
@pytest.mark.parametrize("veto", [None, 1e-3])
def test_rejection(level, veto):
    shape, old, rollout = case()
    settings = dataclasses.replace(
        Settings(), use_rs=True, rs_level=level, rs_lower_bound=0.4, rs_upper_bound=2.5, rs_veto_threshold=veto
    )
    got = corrections.correct(settings, old, rollout, shape)
    want = {t: 0.4 <= w <= 2.5 for t, w in ratios(shape, old, rollout, level).items()}
    for tokens in trained(shape):
        if veto is not None and any(math.exp(old[t] - rollout[t]) < veto for t in tokens):
            want |= dict.fromkeys(tokens, False)
    assert [bool(w) for w in got.weights_R] == [want.get(t, False) for t in range(len(old))]
    assert got.metrics["rs_rejected"] == pytest.approx(1 - sum(want.values()) / len(want))
    if veto is not None:
        assert not got.weights_R[:4].any(), "sample 0 has the token that the veto is about"


def test_equal_policies_are_left_alone():
    shape, old, _ = case()
    for level in corrections.LEVELS:
        settings = dataclasses.replace(
            Settings(), use_tis=True, tis_level=level, use_rs=True, rs_level=level, rs_veto_threshold=1e-4
        )
        got = corrections.correct(settings, old, old, shape)
        np.testing.assert_array_equal(got.weights_R, shape.mask_R.astype(float))
        assert (
            got.metrics["mismatch_kl"] == 0
            and got.metrics["mismatch_ess"] == pytest.approx(1)
            and got.metrics["rs_rejected"] == 0
        )


def test_mismatch_of_known_policies():
    shape = Shape(np.array([2, 1]), np.ones(3, bool))
    gaps = [0.1, -0.3, 0.2]
    got = corrections.correct(Settings(), np.array(gaps), np.zeros(3), shape).metrics
    assert got["mismatch_kl"] == pytest.approx(-sum(gaps) / 3)
    assert got["mismatch_k3_kl"] == pytest.approx(sum(math.exp(d) - 1 - d for d in gaps) / 3)
    assert got["mismatch_ratio_max"] == pytest.approx(math.exp(0.2))
    weights = [math.exp(-0.2), math.exp(0.2)]
    assert got["mismatch_ess"] == pytest.approx(sum(weights) ** 2 / sum(w * w for w in weights) / 2)


def test_unknown_names_are_refused():
    shape, old, rollout = case()
    with pytest.raises(ValueError, match="turn.*token, sequence, geometric"):
        corrections.log_weights(old, "turn", shape)
    with pytest.raises(ValueError, match="cut.*truncate, clip, mask"):
        corrections.bounded(old, "cut", 0, 1)
