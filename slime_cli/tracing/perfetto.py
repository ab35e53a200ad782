"""Spans as a Chrome trace-event file, which ui.perfetto.dev and chrome://tracing load.

Each process of the run is a process there. Its spans nest by time, so those that merely overlap (requests in flight at
once) go to further threads, the lanes; within a lane every span lies inside the one below it or beside it. Times are
whole microseconds since the run's first span.
"""

import dataclasses
import json
import os
import re
from collections.abc import Iterable
from typing import Any

from slime_cli.errors import DataError
from slime_cli.manifests import write_bytes
from slime_cli.tracing.reading import spans_of

CLOCK_SLACK_US = 1000
"""A child's end may pass its parent's by this much and is cut: starts are wall-clock, durations monotonic."""


@dataclasses.dataclass(slots=True)
class _Lane:
    """One thread of the trace: the spans open at the current time, outermost first, as (end, depth)."""

    open: list[tuple[int, int]] = dataclasses.field(default_factory=list)

    def place(self, start: int, end: int, depth: int) -> int | None:
        """The end that the span gets here, or None when it would overlap without nesting."""
        while self.open and self.open[-1][0] <= start:
            self.open.pop()
        if self.open:
            last, below = self.open[-1]
            if end > last and not (depth > below and end - last <= CLOCK_SLACK_US):
                return None
            end = min(end, last)
        self.open.append((end, depth))
        return end


def _natural(name: str) -> list[Any]:
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name) if part]


def events(spans: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metadata events, then complete events by start. A process has the same pid in every export of the same names."""
    spans = list(spans)
    names = sorted({span["process"] for span in spans}, key=lambda name: (name != "conductor", _natural(name)))
    pids = {name: pid for pid, name in enumerate(names, 1)}
    origin = min((span["ts"] for span in spans), default=0.0)
    lanes: dict[str, list[_Lane]] = {name: [] for name in names}
    complete = []
    for span in sorted(spans, key=lambda s: (s["ts"], s.get("depth", 0), -s["dur"])):
        start = round((span["ts"] - origin) * 1e6)
        end = max(start, round((span["ts"] - origin + span["dur"]) * 1e6))
        tid, end = _into_a_lane(lanes[span["process"]], start, end, span.get("depth", 0))
        complete.append(
            {
                "name": span["name"],
                "cat": span["process"],
                "ph": "X",
                "ts": start,
                "dur": end - start,
                "pid": pids[span["process"]],
                "tid": tid,
                "args": span.get("args", {}),
            }
        )
    metadata = [_meta("process_name", pid, 0, name=name) for name, pid in pids.items()]
    metadata += [_meta("process_sort_index", pid, 0, sort_index=pid) for pid in pids.values()]
    for name, pid in pids.items():
        metadata += [
            _meta("thread_name", pid, tid, name=name if tid == 1 else f"{name}, at the same time ({tid})")
            for tid in range(1, len(lanes[name]) + 1)
        ]
    return metadata + complete


def _into_a_lane(lanes: list[_Lane], start: int, end: int, depth: int) -> tuple[int, int]:
    for tid, lane in enumerate(lanes, 1):
        placed = lane.place(start, end, depth)
        if placed is not None:
            return tid, placed
    lanes.append(_Lane([(end, depth)]))
    return len(lanes), end


def _meta(kind: str, pid: int, tid: int, /, **args: Any) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "ts": 0, "args": args}


def export(run_dir: str | os.PathLike, out: str | os.PathLike) -> int:
    """Writes the run's trace to ``out``; returns the number of spans. DataError when the run has none."""
    spans = spans_of(run_dir)
    if not spans:
        raise DataError(f"{run_dir}: no spans under trace/", "tracing is off in this run, or it has done nothing yet")
    document = {"traceEvents": events(spans), "displayTimeUnit": "ms", "otherData": {"run": str(run_dir)}}
    write_bytes(out, json.dumps(document, separators=(",", ":"), default=str).encode())
    return len(spans)
