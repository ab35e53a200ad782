"""Contracts of the hooks that weigh tokens: what they are given, and what is refused of what they return."""

import types

import numpy as np
import pytest
import torch

from slime_cli.errors import UsageError
from slime_cli.hooks import kinds as hooks
from slime_cli.training.algorithm import user_weights
from slime_cli.training.algorithm.advantages import Shape

SIZES = np.array([3, 0, 2])
LENGTHS = np.array([5, 4, 3])
MASK = np.array([1, 0, 1, 1, 1], bool)
OLD = np.array([-1, np.nan, -2, -3, -1.0])
ROLLOUT = np.array([-1, np.inf, -1, -3, -2.0])


def weigh(function):
    return user_weights.importance(
        function, types.SimpleNamespace(limit=2.0), LENGTHS, OLD, ROLLOUT, Shape(SIZES, MASK)
    )


def test_a_function_sees_the_whole_batch_sample_by_sample_without_what_is_masked():
    seen = {}

    def tis(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths):
        seen.update(
            vars(), lists=[[x.tolist() for x in column] for column in (train_log_probs, rollout_log_probs, loss_masks)]
        )
        ratio = torch.cat([(a - b).exp() for a, b in zip(train_log_probs, rollout_log_probs)])
        kept = [torch.ones(3), torch.ones(0), torch.tensor([1.0, 0.0])]
        return (
            pg_loss * ratio.clamp(max=args.limit),
            kept,
            {"ratio": ratio, "parts": list(ratio.split([3, 0, 2])), "n": 3},
        )

    weights_R, metrics = weigh(tis)
    assert seen["lists"] == [[[-1, 0, -2], [], [-3, -1]], [[-1, 0, -1], [], [-3, -2]], [[1, 0, 1], [], [1, 1]]]
    assert (
        seen["total_lengths"] == [5, 4, 3]
        and seen["response_lengths"] == [3, 0, 2]
        and seen["pg_loss"].tolist() == [1] * 5
    )
    np.testing.assert_allclose(weights_R, [1, 0, np.exp(-1), 1, 0], rtol=1e-6)
    mean = (1 + np.exp(-1) + 1 + np.exp(1)) / 4
    assert metrics == {"ratio": pytest.approx(mean), "parts": pytest.approx(mean), "n": 3}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda x: x, "returned Tensor, not a tuple"),
        (lambda x: (x[:4], [torch.ones(3), torch.ones(0), torch.ones(2)], {}), "4 values in pg_loss for 5"),
        (lambda x: (x, [torch.ones(2), torch.ones(0), torch.ones(3)], {}), "masks for responses of other lengths"),
        (lambda x: (x * float("inf"), torch.ones(5), {}), "not finite"),
        (lambda x: (x.double() * 1e300, torch.ones(5), {}), "not finite"),
        (lambda x: (x, torch.ones(5), {"m": torch.ones(3)}), "3 values in metric 'm'"),
    ],
)
def test_answers_that_do_not_fit_are_refused(answer, said):
    with pytest.raises(UsageError, match=said):
        weigh(lambda args, *, pg_loss, **kwargs: answer(pg_loss))


@pytest.mark.parametrize("overflown", [float("inf"), float("-inf"), float("nan"), 1e300])
def test_a_weight_that_the_function_masks_may_have_overflown(overflown):
    answer = torch.tensor([1, 1, 2, overflown, 1]).double(), [torch.ones(3), torch.ones(0), torch.tensor([0, 1])], {}
    weights_R, _ = weigh(lambda args, *, pg_loss, **kwargs: answer)
    assert weights_R.tolist() == [1, 0, 2, 0, 1]


def reduce(reducer, per_token=False):
    return user_weights.reduction(lambda *given: reducer, LENGTHS, SIZES, MASK, per_token)


def test_a_reducers_weights():
    given = []

    def dr_grpo(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
        given.extend([total_lengths, response_lengths, [m.tolist() for m in loss_masks], calculate_per_token_loss])
        return lambda x: sum((v * m).sum() / 10 for v, m in zip(x.split(response_lengths), loss_masks))

    got = user_weights.reduction(dr_grpo, LENGTHS, SIZES, MASK, True)
    np.testing.assert_allclose(got, MASK / 10)
    assert given == [[5, 4, 3], [3, 0, 2], [[1, 0, 1], [], [1, 1]], True]


@pytest.mark.parametrize(
    ("reducer", "said"),
    [
        (lambda x: (x * torch.from_numpy(MASK)).square().sum(), "not a weighted sum"),
        (lambda x: (x * torch.from_numpy(MASK)).sum() + 1, "not a weighted sum"),
        (lambda x: x.sum(), "not trained"),
        (lambda x: (x * torch.from_numpy(MASK)).sum() / 0, "not finite"),
        (lambda x: x[:3].sum() + x[3:3].sum() / torch.zeros(0).sum(), "divided by its 0 trained tokens"),
        (lambda x: x, "one number"),
        (lambda x: 0.0, "one number"),
        (None, "returned NoneType"),
    ],
)
def test_a_reducer_that_is_no_weighted_sum_of_trained_tokens_is_refused(reducer, said):
    with pytest.raises(UsageError, match=said):
        reduce(reducer)


def test_a_signature_that_does_not_fit_is_refused_when_loaded(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def tis(args, pg_loss): ...\ndef reducer(lengths): ...\n")
    for name, kind in (("tis", "tis"), ("reducer", "pg_loss_reducer")):
        with pytest.raises(UsageError, match="does not accept the call"):
            hooks.load(f"{file}:{name}", kind)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, "NoneType"),
        (torch.zeros(()), "Tensor"),
        ((torch.zeros(2), {}), "Tensor, dict"),
        ((torch.zeros(()), 1.0), "Tensor, float"),
    ],
)
def test_a_loss_function_that_returns_something_else_is_named(answer, said):
    from slime_cli.training.algorithm import objective  # imports Megatron

    with pytest.raises(UsageError, match=f"--custom-loss-function-path returned {said}$") as caught:
        objective.custom(lambda *_: answer, types.SimpleNamespace(), types.SimpleNamespace(), torch.zeros(1, 2))
    assert caught.value.exit_code == 2
