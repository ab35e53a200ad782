"""Spans: what each process did and when, appended to one JSON-lines file a process under ``RUN/trace/``.

Written by the run and by its trainer ranks, one :class:`Tracer` a process; read by :mod:`slime_cli.tracing.reading`.

* A span knows the span that it was opened in (its parent), and which phase, rollout, group and sample it is about. Both
  are kept in a context variable: coroutines and threads of ``asyncio.to_thread`` nest in what started them, whatever
  else runs at that time. (``run_in_executor`` and an executor's ``submit`` do not hand it on.)
* A line is written when its span ends, so a parent's comes after its children's, and a span that a kill cuts off has
  none. A task that was started in a span may outlive it.
* Starts are by a monotonic clock that was set by the wall clock when the tracer was opened: a correction of the wall
  clock moves no child out of its parent.
* Tracing never raises into the traced code once its file is open: on a disk that is full it says so and ends.
"""

import contextlib
import contextvars
import errno
import itertools
import os
import pathlib
import sys
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, NamedTuple

import msgspec

from slime_cli.manifests import layout
from slime_cli.tracing.names import SpanName


class TraceSpan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of a trace."""

    name: str
    ts: float
    """Its start, in Unix seconds."""
    dur: float
    """Seconds."""
    process: str
    id: int
    """Unique in its process's file, over all attempts."""
    parent: int | None = None
    """The id of the span of the same process that it was opened in."""
    phase: str | None = None
    rollout: int | None = None
    """Ids of rollouts, groups and samples count from 0 in each phase."""
    group: int | None = None
    sample: int | None = None
    args: dict[str, Any] = {}

    @property
    def end(self) -> float:
        return self.ts + self.dur


class _Within(NamedTuple):
    """The phase, rollout and samples that the running code belongs to."""

    span: int | None = None
    phase: str | None = None
    rollout: int | None = None
    group: int | None = None
    sample: int | None = None


_NOTHING = _Within()
_WITHIN = contextvars.ContextVar("what the running code is part of", default=_NOTHING)
_ENCODER = msgspec.json.Encoder(enc_hook=str)


class Tracer:
    """Appends spans of this process; ``enabled=False`` makes every call free of I/O."""

    def __init__(self, run_dir: str | os.PathLike[str], process: str, enabled: bool = True) -> None:
        self.process = process
        self._file = _appending(pathlib.Path(run_dir) / layout.TRACE / f"{process}.jsonl") if enabled else None
        self._offset = time.time() - time.perf_counter()
        # An attempt begins at the microsecond of its start, and no attempt records a million spans a second.
        self._ids = itertools.count(time.time_ns() // 1000)

    def span(
        self,
        name: SpanName,
        *,
        phase: str | None = None,
        rollout: int | None = None,
        group: int | None = None,
        sample: int | None = None,
        **args: Any,
    ) -> contextlib.AbstractContextManager[dict[str, Any]]:
        """Times the block. The dict that it gives is the span's ``args`` and may be filled inside the block."""
        if self._file is None:
            return contextlib.nullcontext(args)
        return _Open(self, name, args, phase, rollout, group, sample)

    @contextlib.contextmanager
    def about(
        self,
        *,
        phase: str | None = None,
        rollout: int | None = None,
        group: int | None = None,
        sample: int | None = None,
    ) -> Iterator[None]:
        """All spans of the block, and of tasks and threads that it starts, are about these; inner ones may say more."""
        token = _WITHIN.set(_inside(_WITHIN.get(), None, phase, rollout, group, sample))
        try:
            yield
        finally:
            _leave(token)

    def record(self, name: SpanName, ts: float, dur: float, **args: Any) -> None:
        """Adds a span that was timed elsewhere (for example a request's life in the engine), inside the present one."""
        if self._file is not None:
            self._write(name, next(self._ids), _WITHIN.get(), _WITHIN.get().span, ts, dur, args)

    def close(self) -> None:
        file = self._file
        self._file = None
        if file is not None:
            file.close()

    def _write(
        self, name: str, id: int, within: _Within, parent: int | None, ts: float, dur: float, args: dict[str, Any]
    ) -> None:
        file = self._file
        if file is None:
            return
        line = TraceSpan(
            name=name,
            ts=ts,
            dur=dur,
            process=self.process,
            id=id,
            parent=parent,
            phase=within.phase,
            rollout=within.rollout,
            group=within.group,
            sample=within.sample,
            args=args,
        )
        data = _ENCODER.encode(line) + b"\n"
        try:
            if file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            print(f"warning: no more spans of {self.process}: {file.name}: {error.strerror}", file=sys.stderr)
            self.close()
        except ValueError:  # another thread has closed it meanwhile
            return


class _Open:
    """A span that has begun. Written by hand, for a generator would double what a span costs."""

    __slots__ = ("args", "id", "name", "parent", "start", "token", "tracer", "within")

    def __init__(self, tracer: Tracer, name: str, args: dict[str, Any], *about: Any) -> None:
        self.tracer = tracer
        self.name = name
        self.args = args
        self.id = next(tracer._ids)
        outer = _WITHIN.get()
        self.parent = outer.span
        self.within = _inside(outer, self.id, *about)
        self.token: contextvars.Token[_Within] | None = None
        self.start = 0.0

    def __enter__(self) -> dict[str, Any]:
        self.token = _WITHIN.set(self.within)
        self.start = time.perf_counter()
        return self.args

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        dur = time.perf_counter() - self.start
        if self.token is not None:
            _leave(self.token)
        if kind is not None:
            self.args["error"] = kind.__name__
        tracer = self.tracer
        tracer._write(self.name, self.id, self.within, self.parent, tracer._offset + self.start, dur, self.args)


def _inside(
    outer: _Within,
    span: int | None,
    phase: str | None,
    rollout: int | None,
    group: int | None,
    sample: int | None,
) -> _Within:
    """Values that are not given are those of the block around."""
    return _Within(
        outer.span if span is None else span,
        outer.phase if phase is None else phase,
        outer.rollout if rollout is None else rollout,
        outer.group if group is None else group,
        outer.sample if sample is None else sample,
    )


def _leave(token: contextvars.Token[_Within]) -> None:
    with contextlib.suppress(ValueError):  # a generator that another task closes: that task's context never had it
        _WITHIN.reset(token)


def _appending(path: pathlib.Path) -> Any:
    """Unbuffered: a line is one write, which threads do not mix and a kill does not lose."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = open(path, "ab+", buffering=0)
    if size := file.seek(0, os.SEEK_END):
        file.seek(size - 1)
        if file.read(1) != b"\n":  # the attempt before was killed in its last line
            with contextlib.suppress(OSError):  # a full disk: the first span says so
                file.write(b"\n")
    return file
