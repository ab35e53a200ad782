"""Where the time of a training step went, from the spans. Pure; used by ``slime profile step`` and ``slime trace``.

Every moment of a ``step`` span belongs to exactly one phase: of the conductor's spans one level below that run then,
the one that started last, else ``unaccounted``. So phases that overlap are never counted twice, shares sum to 100 %,
and generation in the background costs a step only what the step waits for it. ``train`` is divided by what the
trainer's rank 0 did (its outermost spans), with ``other`` as the remainder.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

UNACCOUNTED = "unaccounted"
OTHER = "train: other"
_WRAPPERS = ("step", "train")
"""Trainer spans that only wrap the others."""

Interval = tuple[float, float]


@dataclasses.dataclass(frozen=True, slots=True)
class Phase:
    """A row of the budget."""

    name: str
    """A top-level phase, or ``train: NAME``."""
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
    """Top-level ``phases`` sum to ``seconds`` and 100 %; ``train`` sums to the phase of that name."""

    steps: int
    seconds: float
    phases: tuple[Phase, ...]
    train: tuple[Phase, ...]
    """Empty when no rank 0 spans fall into train."""


def step_budget(spans: Iterable[dict[str, Any]], stage: str | None = None, rollout_id: int | None = None) -> Budget:
    """Adds up the finished steps, of one stage or rollout if given. A step that was cut off has no span."""
    spans = list(spans)
    conductor = [span for span in spans if _is(span, "conductor")]
    steps = [span for span in conductor if span["name"] == "step" and _wanted(span, stage, rollout_id)]
    rank0 = [span for span in spans if _is(span, "trainer-0") and span["name"] not in _WRAPPERS]
    seconds: dict[str, float] = {}
    calls: dict[str, int] = {}
    train_seconds: dict[str, float] = {}
    train_calls: dict[str, int] = {}
    for step in steps:
        window = _interval(step)
        children = [s for s in conductor if s.get("depth", 0) == step.get("depth", 0) + 1 and _overlaps(s, window)]
        _add(seconds, attribute(children, window))
        _count(calls, (child for child in children if child["ts"] >= window[0]))
        for window in (_interval(child) for child in children if child["name"] == "train"):
            inside = [span for span in rank0 if _overlaps(span, window)]
            _add(train_seconds, attribute(inside, window, owner="first"))
            _count(train_calls, inside)
    total = sum(step["dur"] for step in steps)
    seconds[UNACCOUNTED] = max(0.0, total - sum(seconds.values()))
    phases = _rows(seconds, calls, 1000 if total else 0)
    return Budget(len(steps), total, phases, _train_rows(phases, train_seconds, train_calls))


def attribute(spans: Sequence[dict[str, Any]], window: Interval, owner: str = "last") -> dict[str, float]:
    """Seconds of ``window`` by name of the span that owns them: the running one that started first or last."""
    clipped = [(max(window[0], s["ts"]), min(window[1], s["ts"] + s["dur"]), s["ts"], s["name"]) for s in spans]
    clipped = [span for span in clipped if span[1] > span[0]]
    edges = sorted({edge for start, end, *_ in clipped for edge in (start, end)})
    pick = max if owner == "last" else min
    owned: dict[str, float] = {}
    for left, right in zip(edges, edges[1:], strict=False):
        running = [span for span in clipped if span[0] <= left and span[1] >= right]
        if running:
            name = pick(running, key=lambda span: (span[2], -span[1]))[3]
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


def _train_rows(phases: tuple[Phase, ...], seconds: dict[str, float], calls: dict[str, int]) -> tuple[Phase, ...]:
    train = next((phase for phase in phases if phase.name == "train"), None)
    if train is None or not seconds:
        return ()
    # Where train overlaps an earlier phase it owns less than its spans' length: its parts shrink in proportion.
    scale = min(1.0, train.seconds / sum(seconds.values()))
    named = {f"train: {name}": value * scale for name, value in seconds.items()}
    named[OTHER] = max(0.0, train.seconds - sum(named.values())) + named.get(OTHER, 0.0)
    return _rows(named, {f"train: {name}": n for name, n in calls.items()}, train.permille)


def _rows(seconds: dict[str, float], calls: dict[str, int], whole: int) -> tuple[Phase, ...]:
    """Longest first, the remainder last."""
    names = sorted(seconds, key=lambda name: (name in (UNACCOUNTED, OTHER), -seconds[name]))
    shares = exact_shares([seconds[name] for name in names], whole)
    return tuple(Phase(n, seconds[n], share, calls.get(n, 0)) for n, share in zip(names, shares, strict=True))


def _is(span: dict[str, Any], process: str) -> bool:
    return span["process"] == process or span["process"].endswith(f"/{process}")


def _wanted(span: dict[str, Any], stage: str | None, rollout_id: int | None) -> bool:
    args = span.get("args", {})
    return stage in (None, args.get("stage")) and rollout_id in (None, args.get("rollout_id"))


def _interval(span: dict[str, Any]) -> Interval:
    return span["ts"], span["ts"] + span["dur"]


def _overlaps(span: dict[str, Any], window: Interval) -> bool:
    return span["ts"] < window[1] and span["ts"] + span["dur"] > window[0]


def _add(into: dict[str, float], values: dict[str, float]) -> None:
    for name, value in values.items():
        into[name] = into.get(name, 0.0) + value


def _count(into: dict[str, int], spans: Iterable[dict[str, Any]]) -> None:
    for span in spans:
        into[span["name"]] = into.get(span["name"], 0) + 1
