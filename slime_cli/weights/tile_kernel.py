# pyright: reportMissingParameterType=false
# Triton reads annotations of a kernel's parameters as its own.
""":class:`slime_cli.weights.sums.Tiles` up to its last step, as a Triton kernel: a tensor is read once, a tile by each
program."""

from typing import Any

import torch
import triton
import triton.language as tl

from slime_cli.weights import sums


@triton.jit
def _finalised(word, SHIFT: tl.constexpr, FACTOR: tl.constexpr, SHIFT2: tl.constexpr, FACTOR2: tl.constexpr):
    word = (word ^ (word >> SHIFT)) * FACTOR
    word = (word ^ (word >> SHIFT2)) * FACTOR2
    return word ^ (word >> 16)


@triton.jit
def _half(
    word, place, inside, size, SEED: tl.constexpr, FACTOR: tl.constexpr, ROTATION: tl.constexpr,
    S: tl.constexpr, F: tl.constexpr, S2: tl.constexpr, F2: tl.constexpr,
):  # fmt: skip
    turned = (place << ROTATION) | (place >> (32 - ROTATION))
    mixed = _finalised((place * FACTOR + SEED) ^ turned ^ word, S, F, S2, F2)
    added = tl.sum(tl.where(inside, mixed, 0).to(tl.int64), 0).to(tl.uint32)
    return _finalised(added ^ size, S, F, S2, F2).to(tl.int64)


@triton.jit
def _tiles(
    words, out, count, size, TILE: tl.constexpr,
    SEED: tl.constexpr, FACTOR: tl.constexpr, ROTATION: tl.constexpr,
    SEED2: tl.constexpr, FACTOR2: tl.constexpr, ROTATION2: tl.constexpr,
    S: tl.constexpr, F: tl.constexpr, S2: tl.constexpr, F2: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = place < count
    word = tl.load(words + place, mask=inside, other=0).to(tl.uint32, bitcast=True)
    short = place.to(tl.uint32)
    bytes_ = size.to(tl.uint32)
    high = _half(word, short, inside, bytes_, SEED, FACTOR, ROTATION, S, F, S2, F2)
    low = _half(word, short, inside, bytes_, SEED2, FACTOR2, ROTATION2, S, F, S2, F2)
    tl.atomic_add(out, (high << 32) | low)


def added(words: torch.Tensor, tile: int) -> torch.Tensor:
    """The sum over the tiles of ``words`` (int32 [n]), before it is mixed once more: int64 [], wrapped, where the words
    are. ``tile``: words of one."""
    out = torch.zeros((), dtype=torch.int64, device=words.device)
    mixes = [number for mix in sums.MIXES for number in mix]
    finalizer = [number for step in sums.FINALIZER for number in step]
    launch: Any = _tiles[(triton.cdiv(words.numel(), tile),)]
    launch(words, out, words.numel(), 4 * words.numel(), tile, *mixes, *finalizer)
    return out
