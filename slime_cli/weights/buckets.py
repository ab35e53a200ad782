"""Tensors side by side in buffers that are used again: what goes to an engine at a time.

SGLang (0.5.16, load format ``flattened_bucket``) takes many tensors as one of bytes, with the name, dtype, shape and
place of each. :func:`packed` fills one buffer while the caller may still have the one before with the engines, so two
of them bound the memory, whatever the model's size. Called by the rank that sends.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch

ALIGNED = 16
"""A tensor begins at a multiple of these bytes where dtypes are mixed: a view of it in its dtype needs that."""
_AT_ONCE = 128 << 20
"""Bytes of tensors that wait to be copied with others: one copy of many small ones is faster."""
Pieces = tuple[str, Sequence[torch.Tensor]]
"""A tensor's name, and what lies one under the other in it."""


@dataclasses.dataclass(frozen=True)
class Place:
    """A tensor in a bucket: the bytes from ``begin`` up to ``end``."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int
    rows: tuple[int, ...] = ()
    """How many each of its pieces has, where there are several."""


Expected = Sequence[tuple[Place, Sequence[torch.Tensor]]]
"""Tensors in their order, each with the places of its pieces in a buffer, in their dtype and shape."""


class Memory(Protocol):
    """A buffer, however others reach it."""

    @property
    def flat(self) -> torch.Tensor:
        """All of its bytes, shape [size], uint8."""
        ...

    def written(self) -> None:
        """Returns when the bytes are there for others."""
        ...


@dataclasses.dataclass(frozen=True)
class Bucket[M: Memory]:
    """Tensors in the first ``size`` bytes of ``memory``."""

    memory: M
    places: list[Place]
    size: int


class Follower(Protocol):
    """Is told of each bucket while it is written."""

    def begin(self, memory: Any) -> Expected:
        """The next bucket comes into ``memory``, of which nothing is needed any more. What it may have: tensors that
        are so take less time."""
        ...

    def added(self, place: Place) -> bool:
        """A tensor was added. True: everything up to its end is to be written now, and :meth:`count` is to be called
        once it is there for others."""
        ...

    def count(self) -> None: ...


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

    def free(self) -> None:
        """Nothing is kept any more."""
        self._kept = [None, None]


class _Filling[M: Memory]:
    """A bucket in the making."""

    def __init__(self, memory: M, follower: Follower | None) -> None:
        self.memory = memory
        self.follower = follower
        self.places: list[Place] = []
        self.at = 0
        self._waiting: list[torch.Tensor] = []
        """Bytes of tensors, to be copied; they lie side by side up to ``at``."""
        self._from = 0
        """Where the first of those begins."""
        self._copies: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        """What is to be copied besides: to where, and from where."""
        self._copied = 0
        """Up to there nothing waits."""
        self._expected = () if follower is None else follower.begin(memory)

    def add_expected(self, name: str, pieces: Sequence[torch.Tensor]) -> bool:
        """Adds the tensor if it is the one that is expected; whether it is."""
        number = len(self.places)
        if number >= len(self._expected):
            return False
        place, views = self._expected[number]
        if place.name != name or len(views) != len(pieces):
            return False
        for piece, view in zip(pieces, views, strict=True):
            if piece.shape != view.shape or piece.dtype != view.dtype:
                return False
        to, of = self._copies.setdefault(place.dtype, ([], []))
        to += views
        of += pieces
        self._from = self.at = place.end
        self._added(place)
        return True

    def add(self, name: str, pieces: Sequence[torch.Tensor], begin: int) -> None:
        self._expected = ()
        if begin != self.at:
            self._copy(begin)
        first = pieces[0]
        rows = tuple([piece.shape[0] for piece in pieces]) if len(pieces) > 1 else ()
        shape = (sum(rows), *first.shape[1:]) if rows else tuple(first.shape)
        self._waiting += [piece.detach().reshape(-1).view(torch.uint8) for piece in pieces]
        self.at = begin + sum([piece.nbytes for piece in pieces])
        self._added(Place(name, first.dtype, shape, begin, self.at, rows))

    def done(self) -> Bucket[M]:
        self._copy(self.at)
        return Bucket(self.memory, self.places, self.at)

    def _added(self, place: Place) -> None:
        self.places.append(place)
        if self.follower is not None and self.follower.added(place):
            self._copy(self.at)
            self.memory.written()
            self.follower.count()
        elif self.at - self._copied >= _AT_ONCE:
            self._copy(self.at)

    def _copy(self, begin: int) -> None:
        """What waits; what comes next begins at ``begin``."""
        if self._waiting:
            torch.cat(self._waiting, out=self.memory.flat[self._from : self.at])
        with torch.no_grad():
            for to, of in self._copies.values():
                torch._foreach_copy_(to, of)  # pyright: ignore[reportPrivateImportUsage]
        self._waiting, self._copies = [], {}
        self._from = self.at = self._copied = begin


def packed[M: Memory](
    named: Iterable[Pieces],
    buffers: Buffers[M],
    *,
    limit: int,
    most: int,
    mixed: bool,
    follower: Follower | None = None,
) -> Iterator[Bucket[M]]:
    """The tensors in their order, in buckets of ``limit`` bytes at most; a tensor that is larger is a bucket of its
    own.

    ``most``: bytes of all tensors together at most, so that a small model takes no large buffer. ``mixed``: a bucket
    may have several dtypes, with gaps between tensors; without, one dtype and no gap. A bucket's buffer is filled again
    when the one behind the next is asked for.
    """
    which = 0
    filling: _Filling[M] | None = None
    for name, pieces in named:
        if filling is not None and filling.add_expected(name, pieces):
            continue
        size = sum(piece.nbytes for piece in pieces)
        begin = 0
        if filling is not None:
            begin = filling.at + -filling.at % ALIGNED if mixed else filling.at
            other = not mixed and pieces[0].dtype != filling.places[0].dtype
            if other or begin + size > limit:
                yield filling.done()
                which = 1 - which
                filling, begin = None, 0
        if filling is None:
            room = max(min(limit, most), size)
            filling = _Filling(buffers.get(which, room + -room % ALIGNED), follower)
            if filling.add_expected(name, pieces):
                continue
        filling.add(name, pieces, begin)
    if filling is not None:
        yield filling.done()
