"""The event loop of a run, and how it ends. Called by :mod:`slime_cli.run`.

An interruption cancels the main coroutine: its ``finally`` blocks run to their end, whatever is being done, and nothing
of it is left over. See :mod:`slime_cli.interrupts`.
"""

import asyncio
import concurrent.futures
from collections.abc import Coroutine
from typing import Any

from slime_cli import interrupts


def run[T](main: Coroutine[Any, Any, T]) -> T:
    """The result of ``main``. Raises KeyboardInterrupt once it has ended, where it was interrupted."""
    try:
        with asyncio.Runner() as runner:
            runner.get_loop().set_default_executor(_Threads(thread_name_prefix="run"))
            return runner.run(_cancellable(main))
    except (Exception, asyncio.CancelledError) as error:
        if interrupts.any_heard():  # whatever was being done failed because of it
            raise KeyboardInterrupt from error
        raise
    finally:
        interrupts.ended()


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
    """After an interruption they are not waited for: all that they could wait for has ended, but a user's function."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        heard = interrupts.any_heard()
        super().shutdown(wait=wait and not heard, cancel_futures=cancel_futures or heard)
