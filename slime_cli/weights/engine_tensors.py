"""An engine's own tensors, made of the trainer's as they come: fused, cut and padded as :mod:`slime_cli.weights.held`
says.

The parts of a tensor are kept until all have come, and they come close to each other. Called by the trainer's ranks.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from slime_cli.weights import held
from slime_cli.weights.held import Cut, Rank

Parts = dict[str, torch.Tensor]
"""By their HF names, in the order in which they lie one under the other."""


class Assembly:
    """The engine's tensors ``names``, from parts that come one by one."""

    def __init__(self, names: Sequence[str]) -> None:
        self._wanting = _wanting(tuple(names))
        self._come: dict[str, Parts] = {}

    def add(self, part: str, tensor: torch.Tensor) -> Iterator[tuple[str, Parts]]:
        """Those that have all their parts now, with these."""
        for name, wanted in self._wanting.get(part, ()):
            if len(wanted) == 1:
                yield name, {part: tensor}
                continue
            parts = self._come.setdefault(name, {})
            parts[part] = tensor
            if len(parts) == len(wanted):
                yield name, {each: parts[each] for each in wanted}
                del self._come[name]


@functools.lru_cache(maxsize=8)
def _wanting(names: tuple[str, ...]) -> Mapping[str, Sequence[tuple[str, tuple[str, ...]]]]:
    """By part, the tensors that need it, each with all of its parts."""
    found: dict[str, list[tuple[str, tuple[str, ...]]]] = {}
    for name in names:
        for part in held.parts_of(name):
            found.setdefault(part, []).append((name, held.parts_of(name)))
    return found


def assembled(named: Iterable[tuple[str, torch.Tensor]], names: Sequence[str]) -> Iterator[tuple[str, Parts]]:
    """Each of the engine's tensors ``names`` with its parts, as soon as all are there. All of ``named`` is gone
    through."""
    assembly = Assembly(names)
    for part, tensor in named:
        yield from assembly.add(part, tensor)


def pieces(parts: Mapping[str, torch.Tensor], rank: Rank) -> list[torch.Tensor] | None:
    """What ``rank`` keeps of the parts, one under the other; None where that is not known."""
    found: list[torch.Tensor] = []
    for part, tensor in parts.items():
        cut = held.cut(part, tensor.shape, rank)
        if cut is None:
            return None
        found.append(_piece(tensor, cut))
    return found


def _piece(tensor: torch.Tensor, cut: Cut) -> torch.Tensor:
    """That range of it, with rows of zeros behind its end."""
    if not tensor.dim():
        return tensor
    if (cut.begin, cut.end) == (0, tensor.shape[cut.axis]):
        return tensor
    begin, end = (min(place, tensor.shape[cut.axis]) for place in (cut.begin, cut.end))
    found = tensor.narrow(cut.axis, begin, end - begin)
    missing = cut.end - cut.begin - found.shape[cut.axis]
    if missing:
        found = torch.cat([found, found.new_zeros(missing, *tensor.shape[1:])])
    return found
