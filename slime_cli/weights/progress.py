"""How far a bucket is written that engines were told of before it was: counts that both sides open. Torch-free.

The rank that writes counts parts (:class:`Written`); the loader in an engine waits for them (:class:`Waiting`) and
counts what it has loaded. The counts are in memory without a name (``memfd``), which processes of the same user open
through the writer's ``/proc/PID/fd``: the name leads nowhere once the writer is gone. Parts are numbered from 1 over
all syncs of a writer, so that a count never means another sync's part. Each count is written by one side, by one system
call.
"""

import contextlib
import os
import struct
import time
import weakref
from typing import Self

PATIENCE = 240.0
"""Seconds that a loader waits for a bucket in all. The sender waits for an engine's answer for longer
(``sending.LOAD_TIMEOUT``), so that it hears of this."""
_SHORT, _LONG = 5e-5, 1e-3
"""Seconds of a pause, within the first :data:`_SOON` and later."""
_SOON = 0.02
_LOOK = 0.1
"""Seconds between two looks at whether the writer is still there."""
_WRITTEN, _GIVEN_UP, _ENGINES = range(3)
"""Places of the counts: the last part that can be read; the last part of the bucket that was given up last; and from
there on three for each engine: whether it was here in this sync, the parts that it has loaded in it, and whether it
has buffers open."""
_HERE, _LOADED, _OPEN = range(3)
_NUMBER = struct.Struct("=q")
_CLOSED = 2.0
"""Seconds within which an engine that lives has closed its buffers."""


class NotWritten(Exception):
    """What was announced will not come. It says why."""


class Written:
    """The writer's side."""

    def __init__(self) -> None:
        self._file = os.memfd_create("slime-progress")
        weakref.finalize(self, os.close, self._file)
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        self._written = 0
        self._end = 0
        """The last part that was announced."""
        self._engines = 0
        """Engines that have counts here, at most."""
        _put(self._file, _WRITTEN, 0)
        _put(self._file, _GIVEN_UP, 0)

    def begin(self, engines: int) -> None:
        """A sync into so many engines."""
        for engine in range(engines):
            _put(self._file, _place(engine, _HERE), 0)
            _put(self._file, _place(engine, _LOADED), 0)
        for engine in range(self._engines, engines):
            _put(self._file, _place(engine, _OPEN), 0)
        self._engines = max(self._engines, engines)

    def announce(self, parts: int) -> int:
        """A bucket of so many parts is going to be written; how many parts there were before."""
        before, self._end = self._end, self._end + parts
        return before

    def count(self) -> None:
        """One more part can be read."""
        self._written += 1
        _put(self._file, _WRITTEN, self._written)

    def give_up(self) -> None:
        """No more parts of the bucket that was announced last."""
        _put(self._file, _GIVEN_UP, self._end)
        self._written = self._end

    def was_here(self, engine: int) -> bool:
        """Whether the engine can open these counts, as :func:`come` has shown in this sync."""
        return _read(self._file, _place(engine, _HERE)) == (1,)

    def loaded(self, engine: int) -> int:
        """Parts of whole buckets that the engine has loaded in this sync."""
        return _read(self._file, _place(engine, _LOADED))[0]

    def wait_closed(self) -> None:
        """Returns when no engine has a buffer open, or has not said so for longer than one that lives takes."""
        deadline = time.monotonic() + _CLOSED
        for engine in range(self._engines):
            while _read(self._file, _place(engine, _OPEN)) == (1,) and time.monotonic() < deadline:
                time.sleep(_LONG)
            _put(self._file, _place(engine, _OPEN), 0)


def come(path: str, engine: int) -> None:
    """An engine shows the writer that it can open the counts, if it can: another user's process cannot, nor one that
    sees other processes (a container)."""
    _say(path, _place(engine, _HERE), 1)


def hold(path: str, engine: int, holds: bool) -> None:
    """An engine says whether it has buffers open. A writer that is gone need not know."""
    _say(path, _place(engine, _OPEN), int(holds))


def _say(path: str, which: int, number: int) -> None:
    with contextlib.suppress(OSError):
        file = os.open(path, os.O_RDWR)
        _put(file, which, number)
        os.close(file)


def _place(engine: int, which: int) -> int:
    return _ENGINES + 3 * engine + which


class Waiting:
    """A loader's side, for one bucket. ``path``: of the writer's counts; ``engine``: which one this is; ``before``,
    ``parts``: how many parts there were before this bucket, and how many it has. Raises NotWritten."""

    def __init__(self, path: str, engine: int, before: int, parts: int) -> None:
        self.path = path
        self._loaded = _place(engine, _LOADED)
        self._before = before
        self._parts = parts
        self._looked = time.monotonic()
        self._deadline = self._looked + PATIENCE
        try:
            self._file = os.open(path, os.O_RDWR)
        except OSError as error:
            raise NotWritten(f"{path} of the trainer's process cannot be opened: {error.strerror}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._file)

    def part(self, number: int) -> None:
        """Returns when part ``number`` of the bucket, from 1, can be read. Raises NotWritten."""
        begun = time.monotonic()
        while True:
            written, given_up = _read(self._file, _WRITTEN, 2)
            if given_up == self._before + self._parts:
                raise NotWritten("the trainer's process gave it up, and says why")
            if written >= self._before + number:
                return
            now = time.monotonic()
            if now > self._deadline:
                raise NotWritten(f"part {number} of {self._parts} did not come within {PATIENCE:.0f} s")
            if now > self._looked + _LOOK:
                self._looked = now
                self._look()
            time.sleep(_SHORT if now < begun + _SOON else _LONG)

    def loaded(self) -> None:
        """All parts were read."""
        (before,) = _read(self._file, self._loaded)
        _put(self._file, self._loaded, before + self._parts)

    def _look(self) -> None:
        """Raises NotWritten when the writer is gone. Its number may be another process's by then."""
        mine = os.fstat(self._file)
        try:
            there = os.stat(self.path)
        except OSError:
            there = None
        if there is None or (there.st_dev, there.st_ino) != (mine.st_dev, mine.st_ino):
            raise NotWritten("the trainer's process that wrote it has ended")


def _read(file: int, which: int, count: int = 1) -> tuple[int, ...]:
    data = os.pread(file, count * _NUMBER.size, which * _NUMBER.size)
    return struct.unpack(f"={count}q", data)


def _put(file: int, which: int, number: int) -> None:
    os.pwrite(file, _NUMBER.pack(number), which * _NUMBER.size)
