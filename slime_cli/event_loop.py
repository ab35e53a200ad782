"""The event loop of a run, and how it ends. Called by :mod:`slime_cli.run`.

An interruption cancels the main coroutine: its ``finally`` blocks run to their end, whatever is being done, and nothing
of it is left over. See :mod:`slime_cli.interrupts`.
"""

import asyncio
import concurrent.futures
import contextlib
import signal
import socket
import threading
import time
from collections.abc import Coroutine, Iterator
from typing import Any

from slime_cli import interrupts

THREAD = "loop's thread"
PATIENCE = 5.0
"""Seconds that tasks and threads may take to end: a user's function that never does is left alone then."""


def run[T](main: Coroutine[Any, Any, T]) -> T:
    """The result of ``main``. Raises KeyboardInterrupt once it has ended, where it was interrupted."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    loop.set_default_executor(_Threads())
    task = loop.create_task(_cancellable(main))
    try:
        with _woken_by_signals(loop):
            return loop.run_until_complete(task)
    except (Exception, asyncio.CancelledError) as error:
        if interrupts.any_heard():  # whatever was being done failed because of it
            raise KeyboardInterrupt from error
        raise
    finally:
        _close(loop, task)
        interrupts.ended()


@contextlib.contextmanager
def _woken_by_signals(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """A signal that comes just before the loop waits would be handled after that alone."""
    here, there = socket.socketpair()
    with here, there:
        here.setblocking(False)
        there.setblocking(False)
        loop.add_reader(here, here.recv, 4096)
        before = signal.set_wakeup_fd(there.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            loop.remove_reader(here)


def _close(loop: asyncio.AbstractEventLoop, main: asyncio.Task[Any]) -> None:
    """Ends every task; ``main``, whose ``finally`` blocks stop what was started, is waited for as long as it takes. (An
    asyncio.Runner would wait for the others as long.)"""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if not main.done():
        loop.run_until_complete(asyncio.wait([main]))
    loop.set_exception_handler(lambda loop, about: None)  # of tasks that are left, or failed because of the end
    left: set[asyncio.Task[Any]] = set()
    if others := tasks - {main}:
        _, left = loop.run_until_complete(asyncio.wait(others, timeout=PATIENCE))
    if left:
        interrupts.leave_behind(left)
    else:
        loop.run_until_complete(loop.shutdown_asyncgens())
    loop.run_until_complete(loop.shutdown_default_executor())
    asyncio.set_event_loop(None)
    loop.close()


async def _cancellable[T](main: Coroutine[Any, Any, T]) -> T:
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None

    def cancel() -> None:
        if interrupts.stop():
            task.cancel()

    interrupts.asking(lambda: loop.call_soon_threadsafe(cancel))
    return await main


class _Threads(concurrent.futures.ThreadPoolExecutor):
    """The loop's threads. Those that do not end are left, at once after an interruption: all that they could wait for
    has ended, but a user's function."""

    def __init__(self) -> None:
        super().__init__(thread_name_prefix=THREAD)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=True)
        until = time.monotonic() + (0 if interrupts.any_heard() else PATIENCE)
        for thread in threading.enumerate():
            if wait and thread.name.startswith(THREAD):
                thread.join(max(0.0, until - time.monotonic()))
