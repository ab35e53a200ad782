"""Work in threads that what undoes it must not overtake."""

import asyncio
import threading

import pytest

from slime_cli.rollout.concurrent import to_its_end


async def test_what_is_cancelled_ends_first_and_then_says_so():
    """As engines that are to stand still while the run is interrupted: they are let on after that, not before."""
    begun, go, order = threading.Event(), threading.Event(), []

    def pause():
        begun.set()
        assert go.wait(10)
        order.append("paused")

    async def run():
        try:
            await to_its_end(pause)
        finally:
            order.append("resumed")

    task = asyncio.create_task(run())
    await asyncio.to_thread(begun.wait, 10)
    task.cancel()
    await asyncio.sleep(0.01)
    assert order == []
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert order == ["paused", "resumed"]


async def test_it_gives_the_result_and_raises_what_the_function_raised():
    assert await to_its_end(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        await to_its_end(lambda: 1 / 0)
