"""The parts of the policy loss against plain references: values in ``math``, gradients from the formula's
derivative."""

import decimal
import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from slime_cli.training.algorithm import losses

LOG_RATIOS = [-3.0, -2.0, -0.7, -1e-3, -1e-9, 0.0, 1e-9, 1e-3, 0.4, 2.5, 12.0]

KL = {
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.expm1(-d) + d,
    "low_var_kl": lambda d: min(10.0, math.expm1(-d) + d),
}
KL_GRADIENT = {
    "k1": lambda d: 1.0,
    "k2": lambda d: d,
    "k3": lambda d: -math.expm1(-d),
    "low_var_kl": lambda d: -math.expm1(-d) if math.expm1(-d) + d < 10 else 0.0,
}


@pytest.mark.parametrize("kind", losses.KL_TYPES)
def test_kl_values_and_gradients(kind):
    ref_T = torch.linspace(-4, -0.5, len(LOG_RATIOS), dtype=torch.float64)
    log_probs_T = (ref_T + torch.tensor(LOG_RATIOS, dtype=torch.float64)).requires_grad_()
    log_ratios = (log_probs_T - ref_T).tolist()
    got_T = losses.kl(log_probs_T, ref_T, kind)
    torch.testing.assert_close(got_T.tolist(), [KL[kind](d) for d in log_ratios], rtol=1e-12, atol=1e-15)
    got_T.sum().backward()
    torch.testing.assert_close(
        log_probs_T.grad.tolist(), [KL_GRADIENT[kind](d) for d in log_ratios], rtol=1e-12, atol=1e-15
    )


def test_small_kl_keeps_its_digits_in_float32():
    d = 1e-4
    got = losses.kl(torch.tensor([d - 1.0]), torch.tensor([-1.0]), "k3").item()
    assert 0 <= got < 1e-7


@pytest.mark.parametrize("log_ratio", [-100.0, -1000.0, -math.inf])
def test_low_var_kl_far_outside_its_limit_has_no_gradient_rather_than_nan(log_ratio):
    log_probs_T = torch.tensor([log_ratio], requires_grad=True)
    got_T = losses.kl(log_probs_T, torch.zeros(1), "low_var_kl")
    got_T.sum().backward()
    assert got_T.item() == losses.LOW_VAR_KL_LIMIT and log_probs_T.grad.item() == 0


def test_expected_k1_and_k3_are_the_divergence():
    logits_V = torch.tensor([[0.3, -1.0, 2.0, 0.1], [0.0, 0.5, 1.0, -0.4]], dtype=torch.float64).log_softmax(-1)
    p, q = logits_V
    exact = (p.exp() * (p - q)).sum()
    for kind in ("k1", "k3"):
        torch.testing.assert_close((p.exp() * losses.kl(p, q, kind)).sum(), exact, rtol=1e-12, atol=0)


def test_an_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match="k4.*k1, k2, k3"):
        losses.kl(torch.zeros(1), torch.zeros(1), "k4")


def ppo(log_ratio: float, advantage: float, low: float, high: float) -> tuple[float, float, bool]:
    """-min(r A, clip(r) A) of PPO's eq. 7; its derivative in the new log-probability; whether the clip decides."""
    ratio = math.exp(log_ratio)
    clipped = min(max(ratio, 1 - low), 1 + high)
    active = clipped * advantage < ratio * advantage
    return -min(ratio * advantage, clipped * advantage), 0.0 if active else -ratio * advantage, active


@pytest.mark.parametrize("low, high", [(0.2, 0.2), (0.2, 0.28), (0.1, 0.5)])
def test_clip_and_clip_higher(low, high):
    cases = [
        (d, a) for d in (-1.5, -0.3, -0.2, -0.01, 0.0, 0.01, 0.21, 0.26, 0.6, 2.0) for a in (-2.0, -0.5, 0.0, 0.5, 2.0)
    ]
    old_T = torch.linspace(-5, -0.1, len(cases), dtype=torch.float64)
    log_probs_T = (old_T + torch.tensor([d for d, _ in cases], dtype=torch.float64)).requires_grad_()
    advantages_T = torch.tensor([a for _, a in cases], dtype=torch.float64)
    loss_T, clipped_T = losses.clipped_policy_loss(log_probs_T - old_T, advantages_T, low, high)
    loss_T.sum().backward()
    log_ratios = (log_probs_T - old_T).tolist()
    values, gradients, active = zip(*(ppo(d, a, low, high) for d, (_, a) in zip(log_ratios, cases)))
    torch.testing.assert_close(loss_T.tolist(), list(values), rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(log_probs_T.grad.tolist(), list(gradients), rtol=1e-12, atol=1e-15)
    assert clipped_T.tolist() == list(active)
    assert clipped_T.double().mean().item() == sum(active) / len(active) and any(active)


def test_the_first_step_is_not_clipped_and_has_the_policy_gradient():
    log_probs_T = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64, requires_grad=True)
    advantages_T = torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64)
    loss_T, clipped_T = losses.clipped_policy_loss(log_probs_T - log_probs_T.detach(), advantages_T, 0.2, 0.28)
    loss_T.sum().backward()
    assert not clipped_T.any()
    assert torch.equal(log_probs_T.grad, -advantages_T) and torch.equal(loss_T, -advantages_T)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_masked_positions_change_neither_value_nor_gradient(poison):
    mask_T = torch.tensor([True, False, True, False])

    def run(fill: float):
        values_T = torch.tensor([1.5, fill, -2.0, fill], dtype=torch.float64, requires_grad=True)
        total = (losses.masked(values_T, mask_T) * torch.tensor([0.5, 1.0, 2.0, 1.0])).sum()
        total.backward()
        return total.item(), values_T.grad.tolist()

    assert run(poison) == run(0.0) == (-3.25, [0.5, 0.0, 2.0, 0.0])


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_loss_of_masked_columns_does_not_see_what_they_masked(poison):
    """What the trainer does: mask the columns that come in, then the loss that comes out."""
    mask_T = torch.tensor([True, False, True])

    def run(fill: float):
        log_probs_T = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
        old_T = losses.masked(torch.tensor([-1.1, fill, -0.2], dtype=torch.float64), mask_T)
        now_T = losses.masked(log_probs_T, mask_T)
        loss_T, _ = losses.clipped_policy_loss(now_T - old_T, torch.tensor([1.0, 1.0, -1.0]).double(), 0.2, 0.2)
        total = losses.masked(loss_T + losses.kl(now_T, old_T, "low_var_kl"), mask_T).sum()
        total.backward()
        return total.item(), log_probs_T.grad.tolist()

    assert run(poison) == run(-1.0)
    assert math.isfinite(run(poison)[0]) and run(poison)[1][1] == 0


def test_sample_weights_average_over_tokens_then_samples():
    sums_N = torch.tensor([4, 0, 1, 10])
    weights_N = losses.sample_weights(sums_N, torch.arange(4), 4, per_token=False)
    torch.testing.assert_close(weights_N.tolist(), [1 / 16, 1 / 4, 1 / 4, 1 / 40])
    assert torch.equal(weights_N, 1.0 / (sums_N.clamp(min=1).float() * 4)), "to the bit what it is without fan-out"
    assert losses.sample_weights(sums_N, torch.arange(4), 4, per_token=True).tolist() == [1, 1, 1, 1]


def test_siblings_share_a_denominator():
    """Three trajectories: of 1, 3 and 2 samples, apart from one another; the last without a trained token."""
    trajectories = [7, 3, 9, 3, 3, 9]
    sums = [5, 2, 0, 0, 8, 0]
    want = [1 / (max(sum(n for n, e in zip(sums, trajectories) if e == own), 1) * 3) for own in trajectories]
    weights_N = losses.sample_weights(torch.tensor(sums), torch.tensor(trajectories), 3, per_token=False)
    torch.testing.assert_close(weights_N.tolist(), want, rtol=1e-6, atol=0)
    total = {e: sum(w * n for w, n, own in zip(weights_N.tolist(), sums, trajectories) if own == e) for e in (7, 3, 9)}
    assert total == pytest.approx({7: 1 / 3, 3: 1 / 3, 9: 0.0}), "each counts one third, however many samples it has"


# -- other estimators' losses ----------------------------------------------------------------------------------------


def test_unbiased_kl_is_the_estimate_weighted_by_the_ratio():
    log_probs_T = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    ref_T = torch.tensor([-1.5, -1.8, -0.5]).double()
    old_T = torch.tensor([-1.2, -2.4, -0.1]).double()
    for kind in losses.KL_TYPES:
        got_T = losses.kl(log_probs_T, ref_T, kind, old_T)
        want = [
            math.exp(p - o) * KL[kind](p - r) for p, r, o in zip(log_probs_T.tolist(), ref_T.tolist(), old_T.tolist())
        ]
        torch.testing.assert_close(got_T.tolist(), want, rtol=1e-12, atol=1e-15)
    far = torch.tensor([-300.0], requires_grad=True)
    losses.kl(far, torch.zeros(1), "low_var_kl", far.detach()).sum().backward()
    assert far.grad.item() == 0


def test_the_unbiased_estimates_gradient_is_that_of_the_divergence():
    """Exact over a whole vocabulary: sum over x ~ old of grad(ratio * k3) is grad KL(policy || reference)."""
    generator = torch.Generator().manual_seed(0)
    logits_V = torch.randn(6, generator=generator, dtype=torch.float64, requires_grad=True)
    ref_V, old_V = (torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    log_p_V = logits_V.log_softmax(-1)
    (want,) = torch.autograd.grad((log_p_V.exp() * (log_p_V - ref_V)).sum(), logits_V, retain_graph=True)
    (got,) = torch.autograd.grad((old_V.exp() * losses.kl(log_p_V, ref_V, "k3", old_V)).sum(), logits_V)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def test_dual_clip_bounds_the_loss_of_negative_advantages_only():
    log_ratio_T = torch.tensor([2.0, 2.0, 0.1, -2.0], dtype=torch.float64, requires_grad=True)
    advantages_T = torch.tensor([-1.0, 1.0, -2.0, -1.0]).double()
    loss_T, _ = losses.clipped_policy_loss(log_ratio_T, advantages_T, 0.2, 0.2, dual_clip=3.0)
    torch.testing.assert_close(loss_T.tolist(), [3.0, -1.2, math.exp(0.1) * 2, 0.8])
    loss_T.sum().backward()
    torch.testing.assert_close(log_ratio_T.grad.tolist(), [0.0, 0.0, math.exp(0.1) * 2, 0.0])


def test_cispo_clips_the_weight_and_keeps_every_gradient():
    log_probs_T = torch.tensor([-0.5, -2.0, -1.0], dtype=torch.float64, requires_grad=True)
    old_T = torch.tensor([-1.5, -0.5, -1.0]).double()
    advantages_T = torch.tensor([1.0, -0.7, 2.0]).double()
    loss_T, clipped_T = losses.cispo_loss(log_probs_T, old_T, advantages_T, 0.2, 0.28)
    weights = [1.28, 0.8, 1.0]
    torch.testing.assert_close(
        loss_T.tolist(), [-w * a * p for w, a, p in zip(weights, advantages_T.tolist(), log_probs_T.tolist())]
    )
    loss_T.sum().backward()
    torch.testing.assert_close(log_probs_T.grad.tolist(), [-w * a for w, a in zip(weights, advantages_T.tolist())])
    assert clipped_T.tolist() == [True, True, False]


def test_sample_means_and_their_gradient_leave_out_what_is_masked():
    values_T = torch.tensor([1.0, math.nan, 3.0, 5.0, math.inf], dtype=torch.float64, requires_grad=True)
    mask_T = torch.tensor([True, False, True, True, False])
    sample_T = torch.tensor([0, 0, 0, 1, 2])
    means_T = losses.sample_means(values_T, mask_T, sample_T, 3)
    assert means_T.tolist() == [2.0, 2.0, 2.0, 5.0, 0.0]
    losses.masked(means_T, mask_T).sum().backward()
    assert values_T.grad.tolist() == [1.0, 0.0, 1.0, 1.0, 0.0]


def test_off_policy_sequence_masking():
    gap_T = torch.tensor([0.5, 0.5, 0.01, -1.0])
    advantages_T = torch.tensor([-1.0, 1.0, -1.0, -1.0])
    assert losses.off_policy_sequence_mask(gap_T, advantages_T, 0.1).tolist() == [False, True, True, True]


def test_value_loss_takes_the_larger_of_clipped_and_plain():
    values_T = torch.tensor([1.0, 0.5, 0.0, 0.3], dtype=torch.float64, requires_grad=True)
    old_T = torch.tensor([0.0, 0.4, 0.0, 0.9]).double()
    returns_T = torch.tensor([1.0, 1.0, -1.0, 0.2]).double()
    loss_T, clipped_T = losses.value_loss(values_T, old_T, returns_T, 0.2)
    want = [
        max((v - r) ** 2, (max(o - 0.2, min(o + 0.2, v)) - r) ** 2)
        for v, o, r in zip(values_T.tolist(), old_T.tolist(), returns_T.tolist())
    ]
    torch.testing.assert_close(loss_T.tolist(), want)
    loss_T.sum().backward()
    assert clipped_T.tolist() == [True, False, False, True] and values_T.grad[[0, 3]].tolist() == [0.0, 0.0]


# -- exponents far out
# -----------------------------------------------------------------------------------------------------

FAR = [-1e4, -100.0, -1.0, -1e-3, 0.0, 1e-3, 1.0, 100.0, 1e4]
FLOAT32_MAX = decimal.Decimal(torch.finfo(torch.float32).max)
SMALLEST_NORMAL = decimal.Decimal(torch.finfo(torch.float32).tiny)


def clipped(
    log_ratio: float, advantage: float, low: float, high: float, dual_clip: float | None
) -> tuple[float, float]:
    """Loss of PPO's eq. 7 with dual clip, and its derivative in the new log-probability, case by case: 0 where a bound
    decides."""
    if advantage == 0:
        return 0.0, 0.0
    if advantage > 0 and log_ratio > math.log1p(high):
        return -(1 + high) * advantage, 0.0
    if advantage < 0 and log_ratio < math.log1p(-low):
        return -(1 - low) * advantage, 0.0
    if advantage < 0 and dual_clip and log_ratio > math.log(dual_clip):
        return -dual_clip * advantage, 0.0
    ratio = math.exp(log_ratio) if log_ratio < 709 else math.inf
    return -ratio * advantage, -ratio * advantage


def same_or_overflown(got: float, want: float, dtype: torch.dtype, scale: float | None = None) -> bool:
    """What a bound leaves out is exact, what overflows is seen to, and the rest is equal within the rounding of a few
    operations on numbers of size ``scale`` (the result's own, unless they cancel); or, below the smallest normal
    number, within that.
    """
    if want in (0.0, math.inf, -math.inf):
        return abs(got) == abs(want)
    return (
        abs(got - want)
        <= 8 * torch.finfo(dtype).eps * (abs(want) if scale is None else scale) + torch.finfo(dtype).tiny
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_what_the_clip_leaves_out_has_no_gradient_however_far_out(dtype, dual_clip):
    cases = [(d, a) for d in (*FAR, math.inf, -math.inf) for a in (-2.0, 0.0, 0.5)]
    log_ratio_T = torch.tensor([d for d, _ in cases], dtype=dtype, requires_grad=True)
    loss_T, _ = losses.clipped_policy_loss(
        log_ratio_T, torch.tensor([a for _, a in cases], dtype=dtype), 0.2, 0.28, dual_clip
    )
    loss_T.sum().backward()
    largest = math.log(torch.finfo(dtype).max)
    for d, (_, a), value, slope in zip(log_ratio_T.tolist(), cases, loss_T.tolist(), log_ratio_T.grad.tolist()):
        for got, want in zip((value, slope), clipped(d if d < largest else math.inf, a, 0.2, 0.28, dual_clip)):
            assert same_or_overflown(got, want, dtype), (d, a, got, want)
    if dual_clip:
        assert torch.isfinite(log_ratio_T.grad).all()


@given(
    st.floats(-1e4, 1e4) | st.floats(-2, 2),
    st.just(0.0) | st.floats(-50, 50),
    st.floats(0, 0.9),
    st.floats(0, 3),
    st.none() | st.floats(1.01, 9),
)
def test_a_clipped_loss_is_the_papers_for_any_ratio_and_advantage(log_ratio, advantage, low, high, dual_clip):
    bounds = [1 - low, 1 + high, dual_clip or 1 + high]
    assume(all(abs(log_ratio - math.log(bound)) > 1e-9 for bound in bounds))
    assume(advantage == 0 or abs(advantage) > 1e-9)
    log_ratio_T = torch.tensor([log_ratio], dtype=torch.float64, requires_grad=True)
    loss_T, _ = losses.clipped_policy_loss(
        log_ratio_T, torch.tensor([advantage], dtype=torch.float64), low, high, dual_clip
    )
    loss_T.sum().backward()
    for got, want in zip((loss_T.item(), log_ratio_T.grad.item()), clipped(log_ratio, advantage, low, high, dual_clip)):
        assert same_or_overflown(got, want, torch.float64), (got, want)


def test_a_token_left_out_has_neither_loss_nor_gradient_whatever_its_ratio():
    """What rejection or OPSM leaves out has a negative advantage as a rule: no bound of the clip is above its ratio."""
    log_ratio_T = torch.tensor([100.0, 1e4, math.inf, 0.1], requires_grad=True)
    advantages_T = torch.tensor([-1.0, -1.0, -1.0, -1.0])
    kept_T = torch.tensor([False, False, False, True])
    loss_T, clipped_T = losses.clipped_policy_loss(log_ratio_T, advantages_T, 0.2, 0.2, kept_T=kept_T)
    loss_T.sum().backward()
    assert loss_T.tolist()[:3] == [0, 0, 0] and log_ratio_T.grad.tolist()[:3] == [0, 0, 0] and not clipped_T.any()
    assert loss_T[3].item() == log_ratio_T.grad[3].item() == pytest.approx(math.exp(0.1))
    log_probs_T = torch.tensor([0.0, -math.inf, -1.0], requires_grad=True)
    kept_T = torch.tensor([False, False, True])
    loss_T, _ = losses.cispo_loss(log_probs_T, torch.tensor([-1e4, -1.0, -1.0]), torch.ones(3), 0.2, 0.2, kept_T)
    loss_T.sum().backward()
    assert loss_T.tolist() == [0, 0, 1] and log_probs_T.grad.tolist() == [0, 0, -1]


@pytest.mark.parametrize("advantage", [-2.0, 0.0, 0.5])
def test_cispo_far_out_has_the_weight_of_its_bound(advantage):
    log_probs_T = torch.full((len(FAR),), -1.0, requires_grad=True)
    loss_T, _ = losses.cispo_loss(log_probs_T, -1.0 - torch.tensor(FAR), torch.full((len(FAR),), advantage), 0.2, 0.28)
    loss_T.sum().backward()
    weights = [0.8 if d <= -1 else 1.28 if d >= 1 else math.exp(d) for d in FAR]
    for got, weight in zip(log_probs_T.grad.tolist(), weights):
        assert same_or_overflown(got, -weight * advantage, torch.float32, scale=2 * abs(advantage))


def kl_reference(kind: str, d: float, e: float) -> tuple[decimal.Decimal, decimal.Decimal, decimal.Decimal]:
    """``exp(e) * estimate(d)`` with d = lp - ref and e = lp - old, its derivative in lp where the weight has one as
    well, and the size of what they are sums of, 0 where a clamp left that out: in decimals, which do not overflow."""
    d = decimal.Decimal(d)
    weight = decimal.Decimal(e).exp()
    size = max(weight, SMALLEST_NORMAL)
    if kind == "k1":
        return weight * d, weight * (1 + d), size * (1 + abs(d))
    if kind == "k2":
        return weight * d * d / 2, weight * (d + d * d / 2), size * (abs(d) + d * d)
    value = weight * ((-d).exp() - 1 + d)
    if kind == "low_var_kl" and value > 10:
        return decimal.Decimal(10), decimal.Decimal(0), decimal.Decimal(0)
    return value, weight * d, size * (1 + (-d).exp() + abs(d))


@pytest.mark.parametrize("kind", losses.KL_TYPES)
@pytest.mark.parametrize("log_weight", FAR)
def test_a_weighted_kl_overflows_only_where_its_terms_do(kind, log_weight):
    """No 0 * inf where a small weight takes a large estimate back, a large weight has nothing to weigh, or a clamp
    leaves it out."""
    log_probs_T = torch.zeros(len(FAR), requires_grad=True)
    d_T = torch.tensor(FAR)
    e_T = torch.full((len(FAR),), log_weight)
    got_T = losses.kl(log_probs_T, -d_T, kind, -e_T)
    got_T.sum().backward()
    with decimal.localcontext(prec=60):
        for d, e, *found in zip(d_T.tolist(), e_T.tolist(), got_T.tolist(), log_probs_T.grad.tolist()):
            *wanted, size = kl_reference(kind, d, e)
            overflows = any(abs(want) > FLOAT32_MAX for want in wanted)
            for got, want in zip(found, wanted):
                if size <= FLOAT32_MAX or (not overflows and math.isfinite(got)):
                    assert same_or_overflown(got, float(want), torch.float32, float(min(size, FLOAT32_MAX))), (
                        d,
                        got,
                        want,
                    )
            assert not overflows or not all(map(math.isfinite, found)), "what overflows is seen to"
