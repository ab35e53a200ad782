"""Spans as a Chrome trace-event file, which ui.perfetto.dev and chrome://tracing load.

Each process of the run is a process there, and its tracks are threads. A viewer draws what overlaps on a track as
nested, so a track holds only what is nested: a span lies in its parent where nothing else of the parent's runs on that
track, else on a track that is free at the time. Spans that merely run at the same time (requests in flight) therefore
have tracks of their own, and none is drawn inside a span that it has nothing to do with. Times are whole microseconds
since the run's first span.
"""

import json
import os
import re
from collections.abc import Sequence
from typing import Any

from slime_cli.errors import DataError
from slime_cli.manifests import write_bytes
from slime_cli.tracing import names
from slime_cli.tracing.reading import spans_of
from slime_cli.tracing.spans import TraceSpan

CLOCK_SLACK_US = 1000
"""A child's end may pass its parent's by this much and is cut: older runs took starts and durations by two clocks."""

_OPEN = tuple[int, int]
"""End and id of a span that is open on a track."""


class _Tracks:
    """Those of one process. Spans come by start, parents before their children."""

    def __init__(self) -> None:
        self.open: list[list[_OPEN]] = []
        """By track: the spans that are open at the time, outermost first."""
        self.where: dict[int, int] = {}
        """Span -> its track."""
        self.of_group: dict[tuple[str | None, int], int] = {}
        """Phase and group -> the track that it was on last."""

    def place(self, span: TraceSpan, start: int, end: int) -> tuple[int, int]:
        """(track, end) that the span gets."""
        for stack in self.open:
            while stack and stack[-1][0] <= start:
                stack.pop()
        first = 1 if span.name in names.ROLLOUT_WORKS else 0  # the first is the loop's: its steps stay there
        track = self._in_parent(span.parent, end)
        if track is None or track < first:
            track = self._free(first, span)
        stack = self.open[track]
        if stack:
            end = min(end, stack[-1][0])
        stack.append((end, span.id))
        self.where[span.id] = track
        if span.group is not None:
            self.of_group[span.phase, span.group] = track
        return track, end

    def _in_parent(self, parent: int | None, end: int) -> int | None:
        track = None if parent is None else self.where.get(parent)
        if track is None or not self.open[track]:
            return None
        last, innermost = self.open[track][-1]
        return track if innermost == parent and end <= last + CLOCK_SLACK_US else None

    def _free(self, first: int, span: TraceSpan) -> int:
        """Where the group was before, if that is free: its reward follows its generation."""
        while len(self.open) <= first:
            self.open.append([])
        before = None if span.group is None else self.of_group.get((span.phase, span.group))
        for track in (*(() if before is None else (before,)), *range(first, len(self.open))):
            if track >= first and not self.open[track]:
                return track
        self.open.append([])
        return len(self.open) - 1


def _natural(name: str) -> list[Any]:
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name) if part]


def events(spans: Sequence[TraceSpan]) -> list[dict[str, Any]]:
    """Metadata events, then complete events by start. A process has the same pid in every export of the same names."""
    processes = sorted({span.process for span in spans}, key=lambda name: (name != names.RUN, _natural(name)))
    pids = {name: pid for pid, name in enumerate(processes, 1)}
    origin = min((span.ts for span in spans), default=0.0)
    tracks = {name: _Tracks() for name in processes}
    complete = []
    for span in sorted(spans, key=lambda s: (s.ts, s.id)):
        start = round((span.ts - origin) * 1e6)
        track, end = tracks[span.process].place(span, start, max(start, round((span.end - origin) * 1e6)))
        complete.append(
            {
                "name": span.name,
                "cat": span.process,
                "ph": "X",
                "ts": start,
                "dur": end - start,
                "pid": pids[span.process],
                "tid": track + 1,
                "args": span.args | _ids(span),
            }
        )
    metadata = [_meta("process_name", pid, 0, name=name) for name, pid in pids.items()]
    metadata += [_meta("process_sort_index", pid, 0, sort_index=pid) for pid in pids.values()]
    for name, pid in pids.items():
        metadata += [
            _meta("thread_name", pid, tid, name=name if tid == 1 else f"{name}, at the same time ({tid})")
            for tid in range(1, len(tracks[name].open) + 1)
        ]
    return metadata + complete


def _ids(span: TraceSpan) -> dict[str, Any]:
    """The sample, group or rollout of the span, where it is known."""
    fields = ("phase", "rollout", "group", "sample", "id", "parent")
    return {name: value for name in fields if (value := getattr(span, name)) is not None}


def _meta(kind: str, pid: int, tid: int, /, **args: Any) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "ts": 0, "args": args}


def export(run_dir: str | os.PathLike[str], out: str | os.PathLike[str]) -> int:
    """Writes the run's trace to ``out``; returns the number of spans. DataError when the run has none."""
    spans = spans_of(run_dir)
    if not spans:
        raise DataError(f"{run_dir}: no spans under trace/", "tracing is off in this run, or it has done nothing yet")
    document = {"traceEvents": events(spans), "displayTimeUnit": "ms", "otherData": {"run": str(run_dir)}}
    write_bytes(out, json.dumps(document, separators=(",", ":"), default=str).encode())
    return len(spans)
