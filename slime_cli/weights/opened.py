"""Buffers of the trainer's that an engine has open: on a GPU, for a moment longer than it reads them.

A driver takes as long to open or to close a GPU's buffer as to copy hundreds of MB. So the next bucket finds it open,
and the engine answers before it is closed. The writer sees in its counts (:mod:`slime_cli.weights.progress`) that an
engine has some open, and gives their memory back when none has. Called by the loader, in the engine's process.
"""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from slime_cli.weights import progress

KEEP = 0.05
"""Seconds: longer than from one bucket to the next, shorter than it takes to prove a version."""
Opening = tuple[Callable[..., torch.Tensor], tuple[Any, ...]]
"""A function and its arguments, which give a buffer's bytes in the process that calls it: shape [bytes], uint8."""


@dataclasses.dataclass
class _Kept:
    buffer: torch.Tensor
    readers: int = 0
    until: float = 0.0
    """When it is closed, if it has no readers then."""


class Opened:
    """``keep``: seconds; ``kept``: which buffers are kept so."""

    def __init__(self, keep: float = KEEP, kept: Callable[[torch.Tensor], bool] = lambda buffer: buffer.is_cuda):
        self._keep = keep
        self._is_kept = kept
        self._lock = threading.Lock()
        self._kept: dict[tuple[Any, ...], _Kept] = {}
        """By the arguments that open them."""
        self._holders: set[tuple[str, int]] = set()
        """Counts, and which engine this is there, that say that buffers are open."""

    @contextlib.contextmanager
    def open(self, opening: Opening, path: str, engine: int) -> Iterator[torch.Tensor]:
        """``path``, ``engine``: the writer's counts and which engine this is. Raises NotWritten for one that cannot be
        opened: the writer has just ended."""
        with self._lock:
            known = self._kept.get(opening[1]) or self._opened(opening, (path, engine))
            known.readers += 1
        try:
            yield known.buffer
        finally:
            with self._lock:
                known.readers -= 1
                known.until = time.monotonic() + self._keep

    def _opened(self, opening: Opening, holder: tuple[str, int]) -> _Kept:
        function, arguments = opening
        try:
            made = _Kept(function(*arguments))
        except RuntimeError as error:
            raise progress.NotWritten(f"its buffer cannot be opened: {error}") from None
        if not self._is_kept(made.buffer):
            return made
        if holder not in self._holders:
            self._holders.add(holder)
            progress.hold(*holder, True)
        if not self._kept:
            threading.Thread(target=self._close, name="closing buffers", daemon=True).start()
        self._kept[arguments] = made
        return made

    def _close(self) -> None:
        """Until none is left."""
        while True:
            time.sleep(self._keep)
            with self._lock:
                now = time.monotonic()
                for arguments in [a for a, kept in self._kept.items() if not kept.readers and kept.until < now]:
                    del self._kept[arguments]
                if self._kept:
                    continue
                for holder in self._holders:
                    progress.hold(*holder, False)
                self._holders.clear()
                return
