"""Tensors side by side in buffers that are used again: what goes to an engine at a time.

SGLang (0.5.16, load format ``flattened_bucket``) takes many tensors as one of bytes, with the name, dtype, shape and
place of each. :func:`packed` fills one buffer while the caller may still have the one before with the engines, so two
of them bound the memory, whatever the model's size. Called by the rank that sends.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import torch

ALIGNED = 16
"""A tensor begins at a multiple of these bytes where dtypes are mixed: a view of it in its dtype needs that."""


@dataclasses.dataclass(frozen=True)
class Place:
    """A tensor in a bucket: the bytes from ``begin`` up to ``end``."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class Memory(Protocol):
    """A buffer, however others reach it."""

    @property
    def flat(self) -> torch.Tensor:
        """All of its bytes, shape [size], uint8."""
        ...


@dataclasses.dataclass(frozen=True)
class Bucket[M: Memory]:
    """Tensors in the first ``size`` bytes of ``memory``."""

    memory: M
    places: list[Place]
    size: int


class Buffers[M: Memory]:
    """Two buffers that are kept from one sync to the next. ``make`` gives one of so many bytes."""

    def __init__(self, make: Callable[[int], M]) -> None:
        self.make = make
        self._kept: list[M | None] = [None, None]

    def get(self, which: int, size: int) -> M:
        kept = self._kept[which]
        if kept is None or kept.flat.numel() < size:
            self._kept[which] = None  # before another one is made: both need not fit
            self._kept[which] = kept = self.make(size)
        return kept


def packed[M: Memory](
    named: Iterable[tuple[str, torch.Tensor]], buffers: Buffers[M], *, limit: int, most: int, mixed: bool
) -> Iterator[Bucket[M]]:
    """The tensors in their order, in buckets of ``limit`` bytes at most; a tensor that is larger is a bucket of its
    own.

    ``most``: bytes of all tensors together at most, so that a small model takes no large buffer. ``mixed``: a bucket
    may have several dtypes, with gaps between tensors; without, one dtype and no gap. A bucket's buffer is filled again
    when the one behind the next is asked for.
    """
    which = 0
    places: list[Place] = []
    memory: M | None = None
    at = 0
    for name, tensor in named:
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        begin = at + -at % ALIGNED if mixed else at
        other = bool(places) and not mixed and tensor.dtype != places[0].dtype
        if places and memory is not None and (other or begin + data.numel() > limit):
            yield Bucket(memory, places, at)
            which = 1 - which
            places, begin = [], 0
        if not places:
            memory = buffers.get(which, max(min(limit, most), data.numel()))
        assert memory is not None
        at = begin + data.numel()
        memory.flat[begin:at].copy_(data, non_blocking=True)
        places.append(Place(name, tensor.dtype, tuple(tensor.shape), begin, at))
    if places and memory is not None:
        yield Bucket(memory, places, at)
