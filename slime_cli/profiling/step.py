"""Where the time of a rollout's step went, from the spans. Pure; used by ``slime profile step`` and ``slime trace``.

A ``step`` span is one turn of a schedule: wait for a batch, train, save, publish. Every moment of it belongs to exactly
one part: of the spans that were opened directly in it and run then, the one that started last, else ``unaccounted``. So
shares sum to 100 %. ``train`` is divided by what the trainer's rank 0 did directly in its own ``train`` span, with
``other`` as the remainder.

What runs beside the steps (generation of an asynchronous schedule, evaluation) has another parent and costs a step only
what the step waits for it. How well the two sides overlap is said by their idle times, both within the steps:

* the trainer is idle while a step waits for a batch (``wait_for_batch``);
* the rollout side is idle while it has nothing in flight (no ``generate`` and no ``reward`` is open), or while the
  engines get their weights (``sync`` and ``verify``), when whatever is in flight stands still.

Older runs have no ``wait_for_batch``: they generated in the step, and the trainer was idle meanwhile.
"""

import bisect
import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from slime_cli.tracing import names
from slime_cli.tracing.spans import TraceSpan

UNACCOUNTED = "unaccounted"
OTHER = "train: other"

Interval = tuple[float, float]
"""Start and end, in seconds."""


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """A row of the budget."""

    name: str
    """The name of a span, or ``train: NAME``."""
    seconds: float
    permille: int
    """Share of all steps' time, in tenths of a per cent; rounded so that a level sums exactly."""
    calls: int

    @property
    def share(self) -> float:
        """In per cent, with one decimal."""
        return self.permille / 10


@dataclasses.dataclass(frozen=True, slots=True)
class Budget:
    """Top-level ``parts`` sum to ``seconds`` and 100 %; ``train`` sums to the part of that name."""

    rollouts: int
    seconds: float
    trainer_idle: float
    """Seconds."""
    rollout_idle: float | None
    """Seconds, in those phases that generate; None where none does."""
    parts: tuple[Part, ...]
    train: tuple[Part, ...]
    """Empty when rank 0 has no spans in train."""

    @property
    def trainer_idle_share(self) -> float:
        """Share of the steps' time, 0 to 1."""
        return self.trainer_idle / self.seconds if self.seconds else 0.0

    @property
    def rollout_idle_share(self) -> float | None:
        """Share of the steps' time, 0 to 1."""
        return None if self.rollout_idle is None else self.rollout_idle / self.seconds


def step_budget(spans: Iterable[TraceSpan], phase: str | None = None, rollout_id: int | None = None) -> Budget:
    """Adds up the finished steps, of one phase or rollout if given. A step that was cut off has no span."""
    spans = list(spans)
    run = [span for span in spans if span.process == names.RUN]
    steps = [
        span
        for span in run
        if span.name == names.STEP and phase in (None, span.phase) and rollout_id in (None, span.rollout)
    ]
    children = _by_parent(run)
    ranks = _Rank0([span for span in spans if span.process == names.FIRST_RANK])
    account = _Account()
    of_train = _Account()
    trainer_idle = 0.0
    for step in steps:
        parts, waits = _parts(children[step.id], children)
        owned = account.add(parts, (step.ts, step.end))
        trainer_idle += owned.get(waits, 0.0)
        for train in (part for part in parts if part.name == names.TRAIN):
            of_train.add(ranks.inside((train.ts, train.end)), (train.ts, train.end))
    total = sum(step.dur for step in steps)
    account.seconds[UNACCOUNTED] = max(0.0, total - sum(account.seconds.values()))
    rows = _rows(account.seconds, account.calls, 1000 if total else 0)
    return Budget(len(steps), total, trainer_idle, _rollout_idle(steps, run), rows, _train_rows(rows, of_train))


class _Account:
    """Seconds and calls by name of a span."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.calls: collections.Counter[str] = collections.Counter()

    def add(self, spans: Sequence[TraceSpan], window: Interval) -> dict[str, float]:
        """Seconds of the window by name."""
        owned = attribute(spans, window)
        for name, value in owned.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + value
        self.calls.update(span.name for span in spans if span.ts >= window[0])
        return owned


class _Rank0:
    """Spans directly inside each ``train`` span of the trainer's rank 0; ``train`` spans follow one another."""

    def __init__(self, spans: Sequence[TraceSpan]) -> None:
        self.children = _by_parent(spans)
        self.trains = sorted((span for span in spans if span.name == names.TRAIN), key=lambda span: span.ts)
        self.starts = [span.ts for span in self.trains]
        self.ends = [span.end for span in self.trains]

    def inside(self, window: Interval) -> list[TraceSpan]:
        first = bisect.bisect_right(self.ends, window[0])
        last = bisect.bisect_left(self.starts, window[1])
        return [child for train in self.trains[first:last] for child in self.children[train.id]]


def _by_parent(spans: Iterable[TraceSpan]) -> Mapping[int | None, list[TraceSpan]]:
    found: dict[int | None, list[TraceSpan]] = collections.defaultdict(list)
    for span in spans:
        found[span.parent].append(span)
    return found


def _parts(inside: Sequence[TraceSpan], children: Mapping[int | None, list[TraceSpan]]) -> tuple[list[TraceSpan], str]:
    """The parts of a step, and the name of the one in which the trainer waits. What a step merely started, and what
    goes its own way since, is not a part of it; an interruption of the engines has parts of its own, and is what is
    left between them."""
    parts = [
        part for child in inside for part in (child, *(children[child.id] if child.name == names.INTERRUPT else ()))
    ]
    if any(part.name == names.WAIT for part in parts):
        return [part for part in parts if part.name not in names.ROLLOUT_WORKS], names.WAIT
    return parts, names.GENERATE


def _rollout_idle(steps: Sequence[TraceSpan], run: Sequence[TraceSpan]) -> float | None:
    works = [span for span in run if span.name in names.ROLLOUT_WORKS]
    generating = {span.phase for span in works}
    windows = _union(step for step in steps if step.phase in generating)
    if not windows:
        return None
    busy = _common(windows, _union(works))
    standing = _common(busy, _union(span for span in run if span.name in names.STAND_STILL))
    return max(0.0, _length(windows) - _length(busy) + _length(standing))


def _union(spans: Iterable[TraceSpan]) -> list[Interval]:
    """The time that any of them covers, as intervals that are apart and in order."""
    merged: list[Interval] = []
    for start, end in sorted((span.ts, span.end) for span in spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _common(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """The time that both cover; each apart and in order, as :func:`_union` makes them."""
    found: list[Interval] = []
    i = j = 0
    while i < len(one) and j < len(other):
        start = max(one[i][0], other[j][0])
        end = min(one[i][1], other[j][1])
        if start < end:
            found.append((start, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def attribute(spans: Sequence[TraceSpan], window: Interval) -> dict[str, float]:
    """Seconds of ``window`` by name of the span that owns them: of those that run, the one that started last."""
    clipped = [(max(window[0], s.ts), min(window[1], s.end), s.ts, s.name) for s in spans]
    clipped = [span for span in clipped if span[1] > span[0]]
    edges = sorted({edge for start, end, *_ in clipped for edge in (start, end)})
    owned: dict[str, float] = {}
    for left, right in zip(edges, edges[1:], strict=False):
        running = [span for span in clipped if span[0] <= left and span[1] >= right]
        if running:
            name = max(running, key=lambda span: (span[2], -span[1]))[3]
            owned[name] = owned.get(name, 0.0) + right - left
    return owned


def exact_shares(seconds: Sequence[float], whole: int) -> list[int]:
    """``whole`` units divided in proportion, summing exactly to it (largest remainders); zeros for no time at all."""
    total = sum(seconds)
    if total <= 0:
        return [0] * len(seconds)
    exact = [whole * value / total for value in seconds]
    shares = [int(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: shares[i] - exact[i])
    for i in by_remainder[: whole - sum(shares)]:
        shares[i] += 1
    return shares


def _train_rows(parts: Sequence[Part], of_train: _Account) -> tuple[Part, ...]:
    train = next((part for part in parts if part.name == names.TRAIN), None)
    if train is None or not of_train.seconds:
        return ()
    # Where train overlaps a later part it owns less than its spans' length: its own parts shrink in proportion.
    scale = min(1.0, train.seconds / sum(of_train.seconds.values()))
    named = {f"train: {name}": value * scale for name, value in of_train.seconds.items()}
    named[OTHER] = max(0.0, train.seconds - sum(named.values())) + named.get(OTHER, 0.0)
    return _rows(named, {f"train: {name}": n for name, n in of_train.calls.items()}, train.permille)


def _rows(seconds: Mapping[str, float], calls: Mapping[str, int], whole: int) -> tuple[Part, ...]:
    """Longest first, the remainder last."""
    order = sorted(seconds, key=lambda name: (name in (UNACCOUNTED, OTHER), -seconds[name]))
    shares = exact_shares([seconds[name] for name in order], whole)
    return tuple(Part(n, seconds[n], share, calls.get(n, 0)) for n, share in zip(order, shares, strict=True))
