"""Spans: what each process did and when, appended to one JSON-lines file a process under ``RUN/trace/``.

Written by the conductor and the trainer ranks; read by ``slime trace`` and ``slime profile``. A line is
``{"name", "ts", "dur", "process", "depth", "args"}`` with ``ts`` in wall-clock seconds and ``dur`` in seconds. A torn
last
line (the process was killed) is skipped by readers. Tracing never raises into the traced code once its file is open: on
a disk that
is full it says so and ends.
"""

import contextlib
import json
import os
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import Any

from slime_cli.manifests import layout


class Tracer:
    """Appends spans of this process; ``enabled=False`` makes every call free of I/O."""

    def __init__(self, run_dir: str | os.PathLike, process: str, enabled: bool = True):
        self.process = process
        self._depth = 0
        self._file = None
        if enabled:
            folder = pathlib.Path(run_dir) / layout.TRACE
            folder.mkdir(parents=True, exist_ok=True)
            self._file = open(folder / f"{process}.jsonl", "a", buffering=1, encoding="utf-8")

    @contextlib.contextmanager
    def span(self, name: str, **args: Any) -> Iterator[dict[str, Any]]:
        """Times the block; the yielded dict is the span's ``args`` and may be filled inside the block."""
        start = time.time()
        clock = time.perf_counter()
        self._depth += 1
        try:
            yield args
        except BaseException as error:
            args["error"] = type(error).__name__
            raise
        finally:
            self._depth -= 1
            self.record(name, start, time.perf_counter() - clock, depth=self._depth, **args)

    def record(self, name: str, ts: float, dur: float, depth: int = 0, **args: Any) -> None:
        """Adds a span that was timed elsewhere (for example a request's life in the engine)."""
        if self._file is not None:
            line = {"name": name, "ts": ts, "dur": dur, "process": self.process, "depth": depth, "args": args}
            try:
                self._file.write(json.dumps(line, default=str) + "\n")
            except OSError as error:
                print(f"warning: no more spans of {self.process}: {self._file.name}: {error.strerror}", file=sys.stderr)
                self.close()

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # what is left in its buffer does not fit either
                self._file.close()
            self._file = None


def read_spans(run_dir: str | os.PathLike) -> list[dict[str, Any]]:
    """All spans of a run, of every process and attempt, by start time."""
    spans = []
    for path in sorted((pathlib.Path(run_dir) / layout.TRACE).glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                spans.append(json.loads(line))
    return sorted(spans, key=lambda s: s["ts"])
