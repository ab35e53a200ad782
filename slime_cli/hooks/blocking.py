"""Says where a user's function blocks the event loop: until it returns, no other answer is read and no group moves.

:class:`slime_cli.run.Run` watches its loop so, from a thread. slime's own code is never named: it does what blocks in
threads.
"""

import asyncio
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

from slime_cli.errors import UsageError
from slime_cli.hooks import raised

AFTER = 5.0
"""Seconds that are too long."""
FIX = "await asyncio.sleep(...) in place of time.sleep, asyncio.to_thread(f) for a call that takes long"


@contextlib.contextmanager
def named(say: Callable[[str], None], *, limit: float, after: float = AFTER) -> Iterator[None]:
    """Inside, the running loop's thread is watched. Each line of a user's that blocks it for ``after`` seconds is said
    once; one that does so for ``limit`` seconds ends the process with exit code 2."""
    watched = _Watched(asyncio.get_running_loop(), say, limit, after)
    threading.Thread(target=watched.run, name="blocking", daemon=True).start()
    try:
        yield
    finally:
        watched.over.set()


class _Watched:
    def __init__(self, loop: asyncio.AbstractEventLoop, say: Callable[[str], None], limit: float, after: float) -> None:
        self.loop = loop
        self.thread = threading.get_ident()
        self.say = say
        self.limit = limit
        self.after = after
        self.over = threading.Event()
        self._said: set[str] = set()

    def run(self) -> None:
        while not self.over.wait(self.after / 5):
            answered = threading.Event()
            try:
                self.loop.call_soon_threadsafe(answered.set)
            except RuntimeError:  # closed
                return
            since = time.monotonic()
            while not (answered.wait(self.after) or self.over.is_set()):
                self._blocked(time.monotonic() - since)

    def _blocked(self, seconds: float) -> None:
        line = self._line()
        if line and line not in self._said:
            self._said.add(line)
            self.say(f"warning: {line} blocks the run: everything waits for it, for {seconds:.0f} s so far ({FIX})")
        if line and seconds >= self.limit:
            problem = f"{line} blocks the run for {seconds:.0f} s (--max-seconds-without-progress {self.limit:g})"
            print(f"error: {problem}\nfix: {FIX}; the same command resumes", file=sys.stderr, flush=True)
            os._exit(UsageError.exit_code)  # children end with this process

    def _line(self) -> str:
        """FILE:LINE (function) of the innermost line of a user's that the loop's thread is in."""
        frame = sys._current_frames().get(self.thread)
        while frame is not None:
            code = frame.f_code
            if os.path.isabs(code.co_filename) and not raised.installed(code.co_filename):
                return f"{code.co_filename}:{frame.f_lineno} ({code.co_name})"
            frame = frame.f_back
        return ""
