"""Where a run keeps what it tells about itself. Read-only; works on live, unfinished and dead runs, and on older ones.

A run of one phase keeps everything in RUN; a run of several also in RUN/PHASE. Nothing here looks deeper than that.
Spans are all in RUN/trace.
"""

import itertools
import json
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from slime_cli.errors import DataError
from slime_cli.manifests import layout
from slime_cli.tracing.spans import TraceSpan

_KNOWN = (layout.RUN, layout.METRICS, layout.TRACE, layout.JOURNAL)


def phase_folders(run_dir: str | os.PathLike[str]) -> dict[str, pathlib.Path]:
    """Phase -> folder, RUN itself as ``""``. Raises DataError when RUN is no run directory."""
    run = pathlib.Path(run_dir)
    if not run.is_dir():
        raise DataError(f"{run}: no such directory", "give the folder that `slime train` writes to")
    folders = {"": run, **{path.name: path for path in sorted(run.iterdir()) if path.is_dir()}}
    found = {name: path for name, path in folders.items() if any((path / known).exists() for known in _KNOWN)}
    if not found:
        raise DataError(
            f"{run}: not a run directory, it has none of {', '.join(_KNOWN)}",
            "give the folder that `slime train` writes to (the one with run.json)",
        )
    return found


def journals(run_dir: str | os.PathLike[str]) -> dict[str, pathlib.Path]:
    """Phase -> its journal; at least one, or DataError."""
    paths = {name: path / layout.JOURNAL for name, path in phase_folders(run_dir).items()}
    found = {name: path for name, path in paths.items() if path.exists()}
    if not found:
        raise DataError(f"{run_dir}: no {layout.JOURNAL}", "it was stopped before its first rollout, or never trained")
    return found


def metrics_of(run_dir: str | os.PathLike[str]) -> dict[str, list[dict[str, Any]]]:
    """Phase -> its metrics, one a rollout. A rollout that a resume repeated counts once, as it went last."""
    latest: dict[str, dict[Any, dict[str, Any]]] = {}
    for folder_name, folder in phase_folders(run_dir).items():
        for number, line in enumerate(lines_of(folder / layout.METRICS)):
            phase = str(line.get("phase") or line.get("stage") or folder_name)  # "stage": older runs
            latest.setdefault(phase, {})[line.get("rollout_id", f"line {number}")] = line
    return {phase: list(lines.values()) for phase, lines in latest.items()}


def lines_of(path: pathlib.Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file, [] without one. Half a line that a killed writer left is passed over."""
    if not path.exists():
        return []
    texts = path.read_text(encoding="utf-8", errors="replace").splitlines()
    lines = []
    for number, text in enumerate(texts, 1):
        line = _object(text)
        if line is not None:
            lines.append(line)
        elif number < len(texts) and text.strip():
            raise DataError(f"{path}:{number}: not a JSON object: {text[:60]}", "remove that line")
    return lines


def _object(text: str) -> dict[str, Any] | None:
    """The last whole object of a line: the next attempt appends its first line to the half one of a killed attempt."""
    start = 0
    while start >= 0:
        try:
            value = json.loads(text[start:])
            return value if isinstance(value, dict) else None
        except json.JSONDecodeError:
            start = text.find('{"', start + 1)
    return None


# -- spans -------------------------------------------------------------------------------------------------------------


class _Line(TraceSpan, frozen=True, kw_only=True):
    """A span that any slime wrote: the older ones wrote how deep a span was nested, and no ids."""

    id: int = 0
    depth: int = 0


def spans_of(run_dir: str | os.PathLike[str]) -> list[TraceSpan]:
    """All spans of a run, of every process and attempt, by start. Raises DataError when RUN is no run directory."""
    phase_folders(run_dir)
    return read_spans(run_dir)


def read_spans(folder: str | os.PathLike[str]) -> list[TraceSpan]:
    """Those under ``folder/trace``, parents before their children; [] without any. Half a line that a killed process
    left is passed over."""
    spans: list[TraceSpan] = []
    for path in sorted((pathlib.Path(folder) / layout.TRACE).glob("*.jsonl")):
        lines = list(_lines(path))
        spans += (line for line in lines if line.id)
        spans += _with_parents([line for line in lines if not line.id])
    return sorted(spans, key=lambda span: (span.ts, span.id))


def _lines(path: pathlib.Path) -> Iterator[_Line]:
    decoder = msgspec.json.Decoder(_Line)
    for number, text in enumerate(path.read_bytes().splitlines(), 1):
        try:
            yield decoder.decode(text)
        except msgspec.ValidationError as error:
            raise DataError(f"{path}:{number}: not a span: {error}", "remove that line") from None
        except msgspec.DecodeError:
            continue


def _with_parents(lines: Sequence[_Line]) -> Iterator[TraceSpan]:
    """An older slime's spans of a process. It did one thing at a time: what was open one level up is the parent."""
    latest: dict[int, TraceSpan] = {}
    ids = itertools.count(-len(lines))  # those of later attempts, by a newer slime, are positive
    for line in sorted(lines, key=lambda line: (line.ts, line.depth)):
        above = latest.get(line.depth - 1)
        parent = above if above is not None and line.ts <= above.end else None
        args = dict(line.args)
        latest[line.depth] = span = TraceSpan(
            name=line.name,
            ts=line.ts,
            dur=line.dur,
            process=line.process,
            id=next(ids),
            parent=None if parent is None else parent.id,
            phase=args.pop("stage", parent and parent.phase),
            rollout=args.pop("rollout_id", parent and parent.rollout),
            args=args,
        )
        yield span
