"""From samples to micro-batches: split into steps, pack, then hand out.

Invariants, each tested: every sample of a step is in exactly one micro-batch or is counted as dropped; every data-parallel
rank gets the same number of micro-batches; a micro-batch holds at most ``max_tokens`` tokens unless it is one oversize
sample that the policy isolates. The schedule depends on the lengths alone, so every rank computes the same one by itself.
Torch-free.
"""

import dataclasses
from collections.abc import Sequence

from slime_cli.errors import DataError


@dataclasses.dataclass(frozen=True)
class Schedule:
    """One optimizer step's micro-batches."""

    per_rank: list[list[list[int]]]
    """``per_rank[dp_rank][micro_batch]`` lists positions of samples in the batch. An empty list is a micro-batch that
    only keeps collectives in step; the trainer fills it with one masked token."""
    dropped: list[int]
    """Positions that the oversize policy left out."""


def split_steps(executions: Sequence[int], steps: int) -> list[list[int]]:
    """Positions of each optimizer step's samples, whose executions are given: executions in order, as even as they can be.

    The trainer's steps and the conductor's account of what each trained are both made here.
    """
    members: dict[int, list[int]] = {}
    for position, execution in enumerate(executions):
        members.setdefault(execution, []).append(position)
    whole = list(members.values())
    edges = [len(whole) * i // steps for i in range(steps + 1)]
    return [[position for siblings in whole[a:b] for position in siblings] for a, b in zip(edges, edges[1:])]


def first_fit(positions: list[int], lengths: list[int], max_tokens: int, oversize: str) -> tuple[list[list[int]], list[int]]:
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


def schedule(
    positions: list[int], lengths: list[int], dp: int, *, max_tokens: int | None, micro_batch_size: int,
    oversize: str = "isolate", multiple: int = 1,
) -> Schedule:  # fmt: skip
    """Micro-batches of one step for ``dp`` ranks. ``multiple``: each rank's count is a multiple of it (interleaved PP).

    ``max_tokens=None`` means static batching: ``micro_batch_size`` samples a micro-batch.
    """
    if max_tokens is None:
        bins = [list(positions[i : i + micro_batch_size]) for i in range(0, len(positions), micro_batch_size)]
        dropped: list[int] = []
    else:
        bins, dropped = first_fit(list(positions), lengths, max_tokens, oversize)
    while len(bins) % (dp * multiple):
        widest = max(bins, key=lambda b: (len(b), sum(lengths[i] for i in b)), default=[])
        if len(widest) < 2:
            bins.append([])
            continue
        bins.remove(widest)
        half = len(widest) // 2
        bins += [widest[:half], widest[half:]]
    bins.sort(key=lambda b: -sum(lengths[i] for i in b))
    per_rank: list[list[list[int]]] = [[] for _ in range(dp)]
    for n, b in enumerate(bins):
        turn, place = divmod(n, dp)
        per_rank[place if turn % 2 == 0 else dp - 1 - place].append(sorted(b))  # back and forth evens out the load
    return Schedule(per_rank, sorted(dropped))
