# pyright: reportMissingParameterType=false, reportPossiblyUnboundVariable=false
# Triton reads annotations of a kernel's parameters as its own.
"""A softmax over the vocabulary in one reading of the logits, and its gradient in one more, as Triton kernels.

The mathematics is that of :mod:`slime_cli.training.network.logprobs`, which calls these on a GPU and has it in plain
torch as well. Logits stay in the type in which they were made; every sum is float32.
"""

from typing import Any

import torch
import triton
import triton.language as tl

LOWEST: tl.constexpr = tl.constexpr(-1e30)
"""A row's maximum begins here and not at -inf, so that a slice of nothing but -inf has differences that are numbers."""
FAR: tl.constexpr = tl.constexpr(-200.0)
"""``exp`` of it is 0 in float32: a logit of -inf adds 0 to the entropy, and not 0 * inf."""
WIDTH = 4096
"""Logits of a row that one program holds at a time."""


@triton.jit
def _statistics(
    logits, targets, out, vocabulary, rows, inverse_temperature, ENTROPY: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * vocabulary
    highest = tl.full((), LOWEST, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    weighted = tl.full((), 0.0, tl.float32)
    for first in range(0, vocabulary, WIDTH):
        at = first + tl.arange(0, WIDTH)
        x = tl.load(start + at, mask=at < vocabulary, other=-float("inf")).to(tl.float32) * inverse_temperature
        above = tl.maximum(highest, tl.max(x, 0))
        moved = highest - above
        exp = tl.exp(x - above)
        if ENTROPY:
            weighted = tl.exp(moved) * (weighted + moved * total) + tl.sum(exp * tl.maximum(x - above, FAR), 0)
        total = tl.exp(moved) * total + tl.sum(exp, 0)
        highest = above
    target = tl.load(targets + row)
    owned = (target >= 0) & (target < vocabulary)
    logit = tl.load(start + target, mask=owned, other=0.0).to(tl.float32) * inverse_temperature
    tl.store(out + row, highest)
    tl.store(out + rows + row, total)
    tl.store(out + 2 * rows + row, weighted)
    tl.store(out + 3 * rows + row, tl.where(owned, logit, 0.0))


@triton.jit
def _gradient(
    logits, targets, softmax, gradients, out, vocabulary, rows, inverse_temperature, ENTROPY: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = at < vocabulary
    of_log_prob = tl.load(gradients + row)
    idle = of_log_prob == 0.0
    if ENTROPY:
        of_entropy = tl.load(gradients + rows + row)
        idle = idle & (of_entropy == 0.0)
    place = row * vocabulary + at
    if idle:  # whatever the logits are, NaN included
        tl.store(out + place, tl.zeros((WIDTH,), out.dtype.element_ty), mask=inside)
    else:
        highest = tl.load(softmax + row)
        log_total = tl.load(softmax + rows + row)
        target = tl.load(targets + row)
        x = tl.load(logits + place, mask=inside, other=-float("inf")).to(tl.float32) * inverse_temperature
        log_p = (x - highest) - log_total
        p = tl.exp(log_p)
        found = tl.where(at == target, of_log_prob, 0.0) - of_log_prob * p
        if ENTROPY:
            entropy = tl.load(softmax + 2 * rows + row)
            found -= of_entropy * p * (tl.maximum(log_p, FAR) + entropy)
        tl.store(out + place, (found * inverse_temperature).to(out.dtype.element_ty), mask=inside)


def statistics(logits_TV: torch.Tensor, targets_T: torch.Tensor, temperature: float, *, entropy: bool) -> torch.Tensor:
    """As :func:`slime_cli.training.network.logprobs.statistics`, [4, T]."""
    rows, vocabulary = logits_TV.shape
    out_4T = torch.empty(4, rows, dtype=torch.float32, device=logits_TV.device)
    launch: Any = _statistics[(rows,)]
    launch(logits_TV, targets_T, out_4T, vocabulary, rows, 1.0 / temperature, ENTROPY=entropy, WIDTH=WIDTH, num_warps=8)
    return out_4T


def gradient(
    logits_TV: torch.Tensor,
    targets_T: torch.Tensor,
    softmax_3T: torch.Tensor,
    gradients_2T: torch.Tensor,
    temperature: float,
    out_TV: torch.Tensor,
    *,
    entropy: bool,
) -> None:
    """As :func:`slime_cli.training.network.logprobs.gradient`; ``out_TV`` may be the logits themselves."""
    rows, vocabulary = logits_TV.shape
    launch: Any = _gradient[(rows, triton.cdiv(vocabulary, WIDTH))]
    launch(
        logits_TV,
        targets_T,
        softmax_3T,
        gradients_2T,
        out_TV,
        vocabulary,
        rows,
        1.0 / temperature,
        ENTROPY=entropy,
        WIDTH=WIDTH,
        num_warps=8,
    )
