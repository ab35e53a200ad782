"""Off-policy corrections against plain loops; ragged samples, masked tokens poisoned."""

import dataclasses
import math
import statistics

import numpy as np
import pytest

from slime_cli.training import corrections
from slime_cli.training.advantages import Shape
from slime_cli.training.settings import Settings

LENGTHS = [4, 0, 6, 3, 5]


def case() -> tuple[Shape, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    mask = rng.random(sum(LENGTHS)) > 0.25
    mask[10:13] = False  # a sample without a trained token
    old, rollout = rng.normal(-2, 0.8, len(mask)), rng.normal(-2, 0.8, len(mask))
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
            out[t] = math.exp(max(-20.0, min(20.0, d)))
    return out


@pytest.mark.parametrize("level", corrections.LEVELS)
@pytest.mark.parametrize("mode", corrections.MODES)
@pytest.mark.parametrize("normalize", [False, True])
def test_importance_weights(level, mode, normalize):
    shape, old, rollout = case()
    low, high = 0.5, 1.7
    settings = dataclasses.replace(
        Settings(), use_tis=True, tis_level=level, tis_mode=mode, tis_clip_low=low, tis_clip=high, tis_batch_normalize=normalize
    )  # fmt: skip
    got = corrections.correct(settings, old, rollout, shape)
    rule = {
        "truncate": lambda w: min(w, high),
        "clip": lambda w: max(low, min(w, high)),
        "mask": lambda w: w if low <= w <= high else 0.0,
    }[mode]
    want = {t: rule(w) for t, w in ratios(shape, old, rollout, level).items()}
    mean = statistics.fmean(want.values()) if normalize and any(want.values()) else 1.0
    for t, weight in enumerate(got.weights_R):
        assert weight == pytest.approx(want[t] / mean if t in want else 0.0, rel=1e-12, abs=1e-300)
    assert all(math.isfinite(value) for value in got.metrics.values())


@pytest.mark.parametrize("level", corrections.LEVELS)
@pytest.mark.parametrize("veto", [None, 1e-3])
def test_rejection(level, veto):
    shape, old, rollout = case()
    settings = dataclasses.replace(Settings(), use_rs=True, rs_level=level, rs_lower_bound=0.4, rs_upper_bound=2.5, rs_veto_threshold=veto)
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
        settings = dataclasses.replace(Settings(), use_tis=True, tis_level=level, use_rs=True, rs_level=level, rs_veto_threshold=1e-4)
        got = corrections.correct(settings, old, old, shape)
        np.testing.assert_array_equal(got.weights_R, shape.mask_R.astype(float))
        assert got.metrics["mismatch_kl"] == 0 and got.metrics["mismatch_ess"] == pytest.approx(1) and got.metrics["rs_rejected"] == 0


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
