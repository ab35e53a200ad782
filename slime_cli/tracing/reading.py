"""Where a run keeps what it tells about itself. Read-only; works on live, unfinished and dead runs.

A run of one stage keeps everything in RUN; a run of several also in RUN/STAGE. Nothing here looks deeper than that.
"""

import json
import os
import pathlib
from typing import Any

from slime_cli.errors import DataError
from slime_cli.manifests import layout
from slime_cli.tracing.spans import read_spans

_KNOWN = (layout.RUN, layout.METRICS, layout.TRACE, layout.JOURNAL)


def stage_folders(run_dir: str | os.PathLike) -> dict[str, pathlib.Path]:
    """Stage name -> folder, RUN itself as ``""``. Raises DataError when RUN is no run directory."""
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


def journals(run_dir: str | os.PathLike) -> dict[str, pathlib.Path]:
    """Stage name -> its journal; at least one, or DataError."""
    paths = {name: path / layout.JOURNAL for name, path in stage_folders(run_dir).items()}
    found = {name: path for name, path in paths.items() if path.exists()}
    if not found:
        raise DataError(f"{run_dir}: no {layout.JOURNAL}", "it was stopped before its first rollout, or never trained")
    return found


def spans_of(run_dir: str | os.PathLike) -> list[dict[str, Any]]:
    """Spans of all stages by start time; those of RUN/STAGE get that stage into their args."""
    spans = []
    for stage, folder in stage_folders(run_dir).items():
        for span in read_spans(folder):
            if stage:
                span["args"] = {"stage": stage, **span.get("args", {})}
            spans.append(span)
    return sorted(spans, key=lambda span: span["ts"])


def metrics_of(run_dir: str | os.PathLike) -> dict[str, list[dict[str, Any]]]:
    """Stage -> its metrics, one a rollout. A rollout that a resume repeated counts once, as it went last."""
    latest: dict[str, dict[Any, dict[str, Any]]] = {}
    for folder_stage, folder in stage_folders(run_dir).items():
        for number, line in enumerate(lines_of(folder / layout.METRICS)):
            stage = str(line.get("stage") or folder_stage)
            latest.setdefault(stage, {})[line.get("rollout_id", f"line {number}")] = line
    return {stage: list(lines.values()) for stage, lines in latest.items()}


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
