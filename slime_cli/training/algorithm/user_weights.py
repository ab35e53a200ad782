"""slime's hooks on the policy loss, ``--custom-tis-function-path`` and ``--custom-pg-loss-reducer-function-path``, as
weights of tokens; ``--custom-advantage-function-path``, and ``--rollout-data-postprocess-path``, as masks.

slime calls the first two inside the loss of each micro-batch. Here each is called before the first step, on every rank
alike: the one with all samples of the rollout, the other with all samples of an optimizer step; so what they decide
cannot depend on packing or layout. A function that scales ``pg_loss`` token by token, or sums it with weights, means
the same in both.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from slime_cli.errors import UsageError
from slime_cli.training.algorithm.advantages import Shape

TIS = "--custom-tis-function-path"
REDUCER = "--custom-pg-loss-reducer-function-path"
ADVANTAGE = "--custom-advantage-function-path"
POSTPROCESS = "--rollout-data-postprocess-path"


def importance(
    function: Callable,
    args: Any,
    lengths_N: np.ndarray,
    old_log_probs_R: np.ndarray,
    rollout_log_probs_R: np.ndarray,
    shape: Shape,
) -> tuple[np.ndarray, dict[str, float]]:
    """What the function multiplies the policy loss of each token with, float64 [R], and its metrics as means over
    trained tokens.

    ``f(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths) -> (pg_loss,
    masks, metrics)``, with one tensor a sample in each list. ``pg_loss`` is all ones, [R], so what comes back are the
    weights; a 0 in the returned masks leaves a token out. Raises UsageError when the shapes do not fit or a weight is
    not finite.
    """
    sizes = shape.response_lengths_N.tolist()

    def by_sample(values_R: np.ndarray) -> list[torch.Tensor]:
        return list(torch.from_numpy(shape.masked(values_R)).float().split(sizes))

    masks = by_sample(np.ones(len(shape.mask_R)))
    answer = function(
        args,
        pg_loss=torch.ones(len(shape.mask_R)),
        train_log_probs=by_sample(old_log_probs_R),
        rollout_log_probs=by_sample(rollout_log_probs_R),
        loss_masks=masks,
        total_lengths=lengths_N.tolist(),
        response_lengths=sizes,
    )
    if not isinstance(answer, tuple) or len(answer) != 3:
        raise UsageError(
            f"{TIS} returned {type(answer).__name__}, not a tuple of three", "return (pg_loss, masks, metrics)"
        )
    masks_R = _column(answer[1], shape, "masks")
    weights_R = (
        np.where(masks_R == 0, 0.0, _column(answer[0], shape, "pg_loss")) * masks_R
    )  # what they mask may have overflown
    if not (np.abs(weights_R[shape.mask_R]) <= np.finfo(np.float32).max).all():
        raise UsageError(f"{TIS} returned weights that are not finite", "mask such tokens, or clip the weights")
    return shape.masked(weights_R), {name: _mean(value, shape, name) for name, value in answer[2].items()}


def _column(value: Any, shape: Shape, name: str) -> np.ndarray:
    """One tensor [R], or a list of one a sample, as float64 [R]."""
    parts = list(value) if isinstance(value, Sequence) else [value]
    flat_R = np.concatenate(
        [np.zeros(0), *(torch.as_tensor(part).detach().double().cpu().numpy().reshape(-1) for part in parts)]
    )
    if (
        isinstance(value, Sequence)
        and [len(torch.as_tensor(p).reshape(-1)) for p in parts] != shape.response_lengths_N.tolist()
    ):
        raise UsageError(f"{TIS} returned {name} for responses of other lengths", "keep the lengths that it was given")
    if len(flat_R) != len(shape.mask_R):
        said = f"{TIS} returned {len(flat_R)} values in {name} for {len(shape.mask_R)} response tokens"
        raise UsageError(said, "return one a response token")
    return flat_R


def _mean(value: Any, shape: Shape, name: str) -> float:
    """A number, or the mean of a column over trained tokens."""
    if not isinstance(value, Sequence) and torch.as_tensor(value).numel() == 1:
        return float(value)
    kept = _column(value, shape, f"metric {name!r}")[shape.mask_R]
    return float(kept.mean()) if len(kept) else 0.0


def reduction(
    function: Callable, lengths_N: np.ndarray, response_lengths_N: np.ndarray, mask_R: np.ndarray, per_token: bool
) -> np.ndarray:
    """The weight of each token in what the function's reducer makes of the policy loss, float64 [R].

    ``f(total_lengths, response_lengths, loss_masks, calculate_per_token_loss)`` gives a callable from the losses of the
    response tokens, [R], to their weighted sum; slime divides it by the samples of the step, or by its trained tokens
    with ``--calculate-per-token-loss``. Raises UsageError when it is not such a sum: nothing else is the same however
    it is packed.
    """
    sizes = response_lengths_N.tolist()
    masks = list(torch.from_numpy(mask_R.astype(np.int64)).split(sizes))
    reducer = function(lengths_N.tolist(), sizes, masks, per_token)
    if not callable(reducer):
        raise UsageError(f"{REDUCER} returned {type(reducer).__name__}", "return a function of the losses")
    zeros_R = torch.zeros(len(mask_R), dtype=torch.float64, requires_grad=True)
    value = reducer(zeros_R)
    if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.requires_grad:
        raise UsageError(
            f"{REDUCER}: its reducer must return one number that depends on the losses", "return one tensor of one"
        )
    (weights_R,) = torch.autograd.grad(value.sum(), zeros_R)
    if not (torch.isfinite(value).all() and torch.isfinite(weights_R).all()):
        raise UsageError(
            f"{REDUCER}: its reducer gives weights that are not finite, as of a sample divided by its 0 trained tokens",
            "divide by at least 1",
        )
    probe_R = torch.from_numpy(np.random.default_rng(0).normal(size=len(mask_R)))
    bound = 1e-5 * float((weights_R * probe_R).abs().sum()) + 1e-12
    probed = float(torch.as_tensor(reducer(probe_R)))
    if abs(float(value.detach())) > bound or abs(probed - float(weights_R @ probe_R)) > bound:
        raise UsageError(f"{REDUCER}: its reducer is not a weighted sum of the losses", "sum losses times weights")
    if weights_R[torch.from_numpy(~mask_R)].any():
        raise UsageError(
            f"{REDUCER}: its reducer gives weight to tokens that are not trained", "multiply by loss_masks"
        )
    return weights_R.numpy()


def advantages(
    function: Callable, args: Any, shape: Shape, columns: dict[str, np.ndarray | None]
) -> tuple[np.ndarray, np.ndarray]:
    """What ``--custom-advantage-function-path`` sets as ``advantages``, and as ``returns`` if it has a critic, [R]
    both.

    ``f(args, rollout_data)``: ``columns`` of the whole batch, [N] and [R]. Raises UsageError when it leaves no numbers,
    of other shapes, or none that are finite where a token is trained.
    """
    data: dict[str, Any] = dict(columns)
    function(args, data)
    try:
        found = [np.asarray(data.get("advantages"), np.float64)]
        found.append(np.asarray(data.get("returns", found[0]), np.float64))
    except (TypeError, ValueError) as error:
        fix = "set one number a response token"
        raise UsageError(f"{ADVANTAGE} left no column of numbers: {error}", fix) from None
    for name, column_R in zip(("advantages", "returns"), found, strict=True):
        if column_R.shape != shape.mask_R.shape:
            raise UsageError(
                f"{ADVANTAGE} left {name!r} of shape {column_R.shape} for {len(shape.mask_R)} response tokens",
                "one value for each of them",
            )
        if not np.isfinite(shape.masked(column_R)).all():
            raise UsageError(f"{ADVANTAGE} left {name!r} that are not finite at trained tokens", "set finite numbers")
    return shape.masked(found[0]), shape.masked(found[1])


def masks(
    function: Callable,
    args: Any,
    rollout_id: int,
    mask_R: np.ndarray,
    response_lengths_N: np.ndarray,
    columns: dict[str, np.ndarray],
    numbers: dict[str, np.ndarray],
) -> np.ndarray:
    """The loss masks that ``--rollout-data-postprocess-path`` leaves, bool [R].

    ``f(args, rollout_id, rollout_data)``: lists with one tensor a sample (``loss_masks``, and the ``columns``, [R]) and
    with one number a sample (``numbers``, [N]), of the whole batch. Raises UsageError when what is left in
    ``loss_masks`` fits no response or trains nothing, and when anything else was changed.
    """
    sizes = response_lengths_N.tolist()

    def data() -> dict[str, Any]:
        found: dict[str, Any] = {"loss_masks": list(torch.from_numpy(mask_R.astype(np.int64)).split(sizes))}
        found |= {name: list(torch.from_numpy(v.astype(np.float32)).split(sizes)) for name, v in columns.items()}
        return found | {name: values.tolist() for name, values in numbers.items()} | {"response_lengths": list(sizes)}

    given = data()
    function(args, rollout_id, given)
    for name, before in data().items():
        if name != "loss_masks" and not _same(given.get(name), before):
            raise UsageError(
                f"{POSTPROCESS} changed {name!r}", "it may change 'loss_masks'; nothing else is read again"
            )
    left = [torch.as_tensor(mask).reshape(-1) for mask in given.get("loss_masks") or ()]
    if [len(mask) for mask in left] != sizes:
        raise UsageError(f"{POSTPROCESS} left 'loss_masks' of other lengths", "give one number a response token")
    left_R = torch.cat(left).double().cpu().numpy()
    if not np.isin(left_R, (0.0, 1.0)).all() or not left_R.any():
        raise UsageError(f"{POSTPROCESS} left 'loss_masks' that are not 0 and 1, or train no token", "1 is trained")
    return left_R.astype(bool)


def _same(one: Any, other: Any) -> bool:
    if not isinstance(other[0] if other else None, torch.Tensor):
        return one == other
    return isinstance(one, list) and len(one) == len(other) and all(map(torch.equal, one, other))
