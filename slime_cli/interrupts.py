"""Ctrl-C, a batch system's SIGTERM and a closed terminal's SIGHUP: what was begun is taken away in order.

:func:`listen` is called once, by the command line. From then on such a signal raises KeyboardInterrupt where the main
thread is, as Ctrl-C does anywhere in Python; in two places it does not:

* In an event loop (:mod:`slime_cli.event_loop`) the first signal cancels the main coroutine, whose ``finally`` blocks
  stop what was started. Raised anywhere, it could cut off a task's bookkeeping. Where something blocks the loop, a
  user's ``time.sleep`` for one, a second signal is raised there.
* While something is being stopped already, signals are counted and nothing more: a child that is half stopped is one
  that is left behind.

Who insists is heard: after :data:`ENOUGH` signals the next one ends the process, whatever is running. Children end with
it, and a run resumes from that as from ``kill -9``.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator

from slime_cli.errors import Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ENOUGH = 3
"""Interruptions that are left to whatever is running; the next one ends the process."""
_STOPPING = b"interrupted: stopping what was started\n"
_INSISTED = b"error: interrupted, and what was running did not end by itself\n"


class _Heard:
    """The signals that a process has heard, and its answer to the next one."""

    def __init__(self) -> None:
        self.count = 0
        self.stopping = False
        self.left: list[object] = []
        """Tasks and threads that did not end."""
        self.ask: Callable[[], object] | None = None
        """Asks an event loop to stop; None where there is none."""


_heard = _Heard()


def listen() -> None:
    """Signals that the caller has this process ignore (``nohup``) stay ignored."""
    for number in SIGNALS:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _interrupt)


def _interrupt(number: int, frame: object) -> None:
    _heard.count += 1
    if _heard.count > ENOUGH:
        os.write(2, _INSISTED)
        os._exit(Interrupted.exit_code)
    if _heard.stopping:
        return
    if _heard.count == 1 and _heard.ask is not None:
        os.write(2, _STOPPING)
        _heard.ask()
        return
    _heard.stopping = _heard.ask is not None  # the exception ends the loop, which stops what was started
    raise KeyboardInterrupt


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """The block stops what was started, and is not interrupted."""
    before = _heard.stopping
    _heard.stopping = True
    try:
        yield
    finally:
        _heard.stopping = before


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """The block may set handlers of its own, as libraries do; afterwards the signals are ours again."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)


def asking(ask: Callable[[], object]) -> None:
    """From now on the first signal calls ``ask``, in place of an exception. What it asks calls :func:`stop` first."""
    _heard.ask = ask


def stop() -> bool:
    """Stopping begins; False where an exception has begun it already. Until then a second signal raises one."""
    begun, _heard.stopping = _heard.stopping, True
    return not begun


def ended() -> None:
    """The work that :func:`asking` was called for has ended."""
    _heard.ask = None
    _heard.stopping = False


def any_heard() -> bool:
    return _heard.count > 0


def leave_behind(things: Iterable[object]) -> None:
    """They do not end. They are kept, so that nothing is done to them, until :func:`leave`."""
    _heard.left += things


def leave(code: int) -> None:
    """Ends the process. One that was interrupted, or in which something never ends, does not wait, and hears nothing
    more."""
    left = [t for t in threading.enumerate() if t is not threading.main_thread() and not t.daemon]
    if not (any_heard() or left or _heard.left):
        sys.exit(code)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
