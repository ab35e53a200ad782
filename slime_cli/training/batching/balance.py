"""Even loads: what a sample costs, and how to share costs out. Deterministic, so every rank finds the same;
torch-free."""

import argparse
import dataclasses
import heapq
import operator
from collections.abc import Sequence

State = list[tuple[float, list[int]]]
"""Load and items of each part that has any, heaviest first."""
_LOAD = operator.itemgetter(0)


@dataclasses.dataclass(frozen=True)
class Flops:
    """FLOPs of a forward pass over a sample of n tokens of which r are answered: ``linear n + quadratic n^2 + answer
    r``.

    With hidden h, heads a of size d, key-value heads g, feed-forward f and L layers, two FLOPs to a multiplication and
    an addition:
      linear     2 L (2 h a d + 2 h g d + 3 h f)  projections and feed-forward; 2 h f without a gate. With experts f is
      that of
                 those a token visits, and h E is added for the router
      quadratic  2 L a d                          scores and values, each 2 n^2 a d, half of it masked
      answer     2 V h                            only tokens of the answer are projected onto the vocabulary V
    A backward pass costs twice that, which changes no ratio. An estimate: every layer counts as attention over all
    tokens, and with experts as sparse.
    """

    linear: float
    quadratic: float
    answer: float

    @classmethod
    def of(cls, args: argparse.Namespace) -> "Flops":
        """From Megatron's validated arguments."""
        h = args.hidden_size
        a = args.num_attention_heads
        d = args.kv_channels
        layers = args.num_layers
        g = args.num_query_groups if args.group_query_attention else a
        f = args.ffn_hidden_size
        router = 0
        if args.num_experts:
            f = (args.moe_ffn_hidden_size or f) * args.moe_router_topk + (args.moe_shared_expert_intermediate_size or 0)
            router = h * args.num_experts
        layer = 2 * h * a * d + 2 * h * g * d + (3 if args.swiglu else 2) * h * f + router
        return cls(linear=2 * layers * layer, quadratic=2 * layers * a * d, answer=2 * args.padded_vocab_size * h)

    def __call__(self, tokens: int, answered: int) -> float:
        return self.linear * tokens + self.quadratic * tokens**2 + self.answer * answered


def snake(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Items dealt to ``parts`` back and forth, heaviest first: counts differ by one at most."""
    out: list[list[int]] = [[] for _ in range(parts)]
    for n, item in enumerate(_heaviest_first(costs)):
        turn, place = divmod(n, parts)
        out[place if turn % 2 == 0 else parts - 1 - place].append(item)
    return out


def karmarkar_karp(costs: Sequence[float], parts: int, *, equal_counts: bool) -> list[list[int]]:
    """Items in ``parts`` of about the same load, by the largest differencing method.

    N. Karmarkar and R. Karp, "The differencing method of set partitioning", 1982, for k parts: the two partial
    solutions that are furthest from even are joined, the heaviest part of one with the lightest of the other, until one
    is left. It begins with one item each, or with ``equal_counts`` with as many items as parts (Michiels et al.,
    "Performance ratios for the differencing method", 2003); the number of items must then be a multiple of ``parts``.
    """
    order = _heaviest_first(costs)
    size = parts if equal_counts else 1
    if len(order) % size:
        raise ValueError(f"{len(order)} items cannot be shared out to {parts} parts of the same count")
    states = [[(costs[i], [i]) for i in order[at : at + size]] for at in range(0, len(order), size)]
    heap = [(_evenness(state, parts), turn, state) for turn, state in enumerate(states)]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, turn, one = heapq.heappop(heap)  # turns are unique, so states are never compared
        joined = _joined(one, heap[0][2], parts)
        heapq.heapreplace(heap, (_evenness(joined, parts), turn, joined))
    found = [sorted(items, key=lambda i: (-costs[i], i)) for _, items in heap[0][2]] if heap else []
    return found + [[] for _ in range(parts - len(found))]


def partition(costs: Sequence[float], parts: int) -> list[list[int]]:
    """``parts`` of the same count, each heaviest first: the better of :func:`karmarkar_karp` and :func:`snake`."""
    ways = (karmarkar_karp(costs, parts, equal_counts=True), snake(costs, parts))
    return min(ways, key=lambda way: max(sum(costs[i] for i in part) for part in way))


def _heaviest_first(costs: Sequence[float]) -> list[int]:
    return sorted(range(len(costs)), key=lambda i: (-costs[i], i))


def _evenness(state: State, parts: int) -> float:
    """Lightest less heaviest part: 0 is even, the lowest is the furthest from it."""
    return (state[-1][0] if len(state) == parts else 0.0) - state[0][0]


def _joined(one: State, other: State, parts: int) -> State:
    """The heaviest of one with the lightest of the other and so on; parts that a state does not list are empty."""
    met = max(len(one) + len(other) - parts, 0)
    alone = one[: len(one) - met] + other[: len(other) - met]
    pairs = zip(one[len(one) - met :], reversed(other[len(other) - met :]))
    return sorted(alone + [(x + y, p + q) for (x, p), (y, q) in pairs], key=_LOAD, reverse=True)
