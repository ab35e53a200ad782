"""Coroutines side by side, none of which outlives the others' failure."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

CANCEL_SECONDS = 5.0
"""A user's function may not listen; it is not waited for longer."""


async def side_by_side(coroutines: Iterable[Coroutine]) -> list[Any]:
    """The results, in order. The first that raises ends the others."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=CANCEL_SECONDS)
        raise


async def to_its_end[T](function: Callable[[], T]) -> T:
    """The result of ``function``, called in a thread. Cancelled, it is waited for, so that nothing that undoes it can
    come before it."""
    task = asyncio.ensure_future(asyncio.to_thread(function))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
