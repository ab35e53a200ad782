"""From samples to micro-batches: split into steps, pack, then hand out.

Invariants, each tested: siblings of a trajectory are in one step; every sample of a step is in exactly one micro-batch
or is counted as dropped; every data-parallel rank gets the same number of micro-batches; a micro-batch holds at most
``max_tokens`` tokens unless it is one oversize sample that the policy isolates. The schedule depends on the lengths,
and the costs that follow from them, alone, so every rank computes the same one by itself. Torch-free.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from slime_cli.errors import DataError
from slime_cli.training.batching import balance

Length = TypeVar("Length", int, np.ndarray)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """One optimizer step's micro-batches."""

    per_rank: list[list[list[int]]]
    """``per_rank[dp_rank][micro_batch]`` lists positions of samples in the batch. An empty list is a micro-batch that
    only keeps collectives in step; the trainer fills it with masked tokens."""
    dropped: list[int]
    """Positions that the oversize policy left out."""


def padded(length: Length, ranks: int) -> Length:
    """Tokens that a sample of ``length`` (a number or an array) has over ``ranks`` context parallel ranks, two chunks
    on each."""
    return length if ranks == 1 else -(-length // (2 * ranks)) * 2 * ranks


def split_steps(trajectories: Sequence[int], steps: int) -> list[list[int]]:
    """Positions of each optimizer step's samples, whose trajectories are given: trajectories in order, as even as they
    can be.

    The trainer's steps and the conductor's account of what each trained are both made here.
    """
    members: dict[int, list[int]] = {}
    for position, trajectory in enumerate(trajectories):
        members.setdefault(trajectory, []).append(position)
    whole = list(members.values())
    edges = [len(whole) * i // steps for i in range(steps + 1)]
    return [[position for siblings in whole[a:b] for position in siblings] for a, b in zip(edges, edges[1:])]


def first_fit(
    positions: list[int], lengths: list[int], max_tokens: int, oversize: str
) -> tuple[list[list[int]], list[int]]:
    """Bins of at most ``max_tokens`` tokens, longest samples first; and the positions dropped for being over it."""
    bins: list[list[int]] = []
    room: list[int] = []
    dropped = []
    first_open = 0
    for i in sorted(positions, key=lambda i: (-lengths[i], i)):
        if lengths[i] > max_tokens:
            if oversize == "fail":
                raise DataError(
                    f"a sample of {lengths[i]} tokens does not fit --max-tokens-per-gpu {max_tokens}",
                    "raise --max-tokens-per-gpu, or choose --oversize isolate or drop",
                )
            if oversize == "drop":
                dropped.append(i)
            else:
                bins.append([i])
                room.append(0)
            continue
        for b in range(first_open, len(bins)):
            if room[b] >= lengths[i]:
                bins[b].append(i)
                room[b] -= lengths[i]
                break
        else:
            bins.append([i])
            room.append(max_tokens - lengths[i])
        while first_open < len(bins) and room[first_open] <= 0:
            first_open += 1  # full bins are skipped from then on: keeps many short samples linear
    return bins, dropped


def even_packs(
    bins: list[list[int]], lengths: list[int], costs: list[float], max_tokens: int, multiple: int
) -> list[list[int]]:
    """First-fit's ``bins`` formed anew for even costs by Karmarkar-Karp: a multiple of ``multiple`` of them, none above
    ``max_tokens`` but the oversize ones, which stay. More bins are taken, a sixteenth at a time, until the cap holds.
    """
    alone = [b for b in bins if sum(lengths[i] for i in b) > max_tokens]
    rest = sorted(i for b in bins for i in b if lengths[i] <= max_tokens)
    count = len(bins) - len(alone)
    while True:
        count += -(len(alone) + count) % multiple
        parts = balance.karmarkar_karp([costs[i] for i in rest], count, equal_counts=False) if count else []
        made = [[rest[j] for j in part] for part in parts]
        if all(sum(lengths[i] for i in b) <= max_tokens for b in made):
            return alone + made
        count += max(1, count // 16)


def halves(samples: list[int], lengths: list[int]) -> list[list[int]]:
    """Two parts of about as many tokens, in the batch's order: what samples of one group share stays together."""
    in_order = sorted(samples)
    so_far = list(itertools.accumulate(lengths[i] for i in in_order))
    half = min(range(1, len(in_order)), key=lambda n: abs(2 * so_far[n - 1] - so_far[-1]))
    return [in_order[:half], in_order[half:]]


def schedule(
    positions: list[int],
    lengths: list[int],
    dp: int,
    *,
    max_tokens: int | None,
    micro_batch_size: int,
    oversize: str = "isolate",
    multiple: int = 1,
    pack_by: list[float] | None = None,
    deal_by: list[float] | None = None,
) -> Schedule:
    """Micro-batches of one step for ``dp`` ranks. ``multiple``: each rank's count is a multiple of it (interleaved PP).

    ``max_tokens=None`` means static batching: ``micro_batch_size`` samples a micro-batch. ``pack_by`` and ``deal_by``
    are costs by position: packs are formed, or handed out to the ranks, for an even load of them. Without the one packs
    are as full as first-fit makes them, without the other they are dealt back and forth, by tokens or what they were
    formed by.
    """
    if max_tokens is None:
        bins = [list(positions[i : i + micro_batch_size]) for i in range(0, len(positions), micro_batch_size)]
        dropped: list[int] = []
    else:
        bins, dropped = first_fit(list(positions), lengths, max_tokens, oversize)
        if pack_by is not None:
            bins = even_packs(bins, lengths, pack_by, max_tokens, dp * multiple)
    while len(bins) % (dp * multiple):
        widest = max(bins, key=lambda b: (len(b), sum(lengths[i] for i in b)), default=[])
        if len(widest) < 2:
            bins.append([])
            continue
        bins.remove(widest)
        bins += halves(widest, lengths)
    costs = next(by for by in (deal_by, pack_by, lengths) if by is not None)
    share = balance.snake if deal_by is None else balance.partition
    shares = share([sum(costs[i] for i in b) for b in bins], dp)
    return Schedule([[sorted(bins[n]) for n in part] for part in shares], sorted(dropped))
