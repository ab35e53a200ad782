"""Sums of what each rank of an engine should hold, from tensors in memory: on a GPU summed up there.

Gives what :class:`slime_cli.weights.verification.Sums` gives for a version on a disk. Called by the trainer's ranks.
"""

import functools
import types
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from slime_cli.hardware import kernels
from slime_cli.weights import engine_tensors, sums
from slime_cli.weights.held import Rank
from slime_cli.weights.shards import content

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_TILE = 8192
_BLOCK = 512 * _TILE
"""Words that are mixed at a time: what is made of them is a few times as large."""


Named = Iterable[tuple[str, torch.Tensor]]
_Later = Callable[[], str]
"""A sum that is asked of a device; reading it waits for the device, so all are asked before."""


class Summing:
    """Sums of the engine's tensors ``names``, from the model's as they come. ``dtype``: what the engine computes in;
    "auto" for that of the tensors. ``ranks``: those that share the engine's model."""

    def __init__(self, names: Sequence[str], dtype: str, function: type[sums.Sum], ranks: Sequence[Rank]) -> None:
        self.dtype = dtype
        self.function = function
        self.ranks = ranks
        self._assembly = engine_tensors.Assembly(names)
        self._found: dict[str, list[list[_Later]]] = {name: [[]] * len(ranks) for name in names}

    def through(self, named: Named) -> Iterator[tuple[str, torch.Tensor]]:
        """``named`` as it is; each is summed up on its way."""
        for part, tensor in named:
            for name, parts in self._assembly.add(part, tensor):
                self._found[name] = _of_ranks(parts, self.dtype, self.function, self.ranks)
            yield part, tensor

    def all(self, named: Named) -> dict[str, list[frozenset[str]]]:
        """:meth:`result` of ``named``, which are all there are."""
        for _ in self.through(named):
            pass
        return self.result()

    def result(self) -> dict[str, list[frozenset[str]]]:
        """For each of ``names`` and each rank the sums that it may have; empty where no tensor that came is known to be
        it."""
        return {name: [frozenset(later() for later in rank) for rank in ranks] for name, ranks in self._found.items()}


def of(
    named: Named, names: Sequence[str], dtype: str, function: type[sums.Sum], ranks: Sequence[Rank]
) -> dict[str, list[frozenset[str]]]:
    """What a :class:`Summing` finds. All of ``named`` is gone through."""
    return Summing(names, dtype, function, ranks).all(named)


def _of_ranks(
    parts: dict[str, torch.Tensor], dtype: str, function: type[sums.Sum], ranks: Sequence[Rank]
) -> list[list[_Later]]:
    if any(tensor.dtype not in _FLOATS for tensor in parts.values()):
        return [[]] * len(ranks)
    published = {tensor.dtype for tensor in parts.values()}
    dtypes = published if dtype == "auto" else {getattr(torch, dtype), *published}
    out = []
    for rank in ranks:
        pieces = engine_tensors.pieces(parts, rank)
        out.append([_sum([piece.to(wanted) for piece in pieces], function) for wanted in dtypes] if pieces else [])
    return out


def _sum(pieces: Sequence[torch.Tensor], function: type[sums.Sum]) -> _Later:
    """The sum of the pieces, one under the other."""
    if function is sums.Tiles and pieces[0].is_cuda:
        return tiles(torch.cat([piece.reshape(-1) for piece in pieces]))
    out = function()
    for piece in pieces:
        out.update(content(piece).tobytes())
    return out.text


def tiles(tensor: torch.Tensor) -> _Later:
    """:class:`slime_cli.weights.sums.Tiles` of a tensor, computed where it is."""
    if not tensor.numel():
        return lambda: f"{0:016x}"
    data = tensor.contiguous().reshape(-1).view(torch.uint8)
    if data.numel() % 4:
        data = torch.cat([data, data.new_zeros(-data.numel() % 4)])
    words = data.view(torch.int32)
    kernel = _kernel(words.device)
    added = kernel.added(words, _TILE) if kernel else _added(words)
    return lambda: f"{sums.splitmix(int(added) & sums.ALL_64):016x}"


@functools.cache
def _kernel(device: torch.device) -> types.ModuleType | None:
    """:mod:`slime_cli.weights.tile_kernel` where it works."""
    if device.type != "cuda":
        return None
    return kernels.attempt("sums of weights", "a Triton kernel", "plain torch", functools.partial(tried, device))


def tried(device: torch.device) -> types.ModuleType:
    from slime_cli.weights import tile_kernel

    generator = kernels.generator(device)
    for count in (1, _TILE, 3 * _TILE + 77):
        words = torch.randint(-(1 << 31), 1 << 31, (count,), device=device, generator=generator).to(torch.int32)
        if not torch.equal(tile_kernel.added(words, _TILE), _added(words)):
            raise kernels.Wrong(f"the sum of {count} words is another one")
    return tile_kernel


def _added(words: torch.Tensor) -> torch.Tensor:
    """What :func:`slime_cli.weights.tile_kernel.added` gives, in plain torch. 32-bit words wrap around as they do
    there: torch's int32 has the same bits."""
    added = torch.zeros((), dtype=torch.int64, device=words.device)
    for begin in range(0, words.numel(), _BLOCK):
        added += _block(words[begin : begin + _BLOCK], begin, 4 * words.numel())
    return added


def _block(words: torch.Tensor, begin: int, size: int) -> torch.Tensor:
    """The 64-bit sum over its tiles; the last may be cut short."""
    places = torch.arange(begin, begin + words.numel(), dtype=torch.int64, device=words.device).to(torch.int32)
    halves = []
    for seed, factor, rotation in sums.MIXES:
        turned = (places << rotation) | _shifted(places, 32 - rotation)
        mixed = _finalised(places * _signed(factor) + _signed(seed) ^ turned ^ words)
        mixed = torch.nn.functional.pad(mixed, (0, -mixed.numel() % _TILE)).view(-1, _TILE)
        halves.append(_finalised(mixed.sum(1, dtype=torch.int64).to(torch.int32) ^ _signed(size)))
    high, low = (half.to(torch.int64) & 0xFFFFFFFF for half in halves)
    return ((high << 32) | low).sum()


def _finalised(words: torch.Tensor) -> torch.Tensor:
    """Murmur's 32-bit finalizer."""
    for shift, factor in sums.FINALIZER:
        words = (words ^ _shifted(words, shift)) * _signed(factor)
    return words ^ _shifted(words, 16)


def _shifted(words: torch.Tensor, by: int) -> torch.Tensor:
    """To the right, with zeros from the left."""
    return (words >> by) & ((1 << (32 - by)) - 1)


def _signed(word: int) -> int:
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >> 31 else word
