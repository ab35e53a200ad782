"""Nothing that never ends is waited for without a word, and without end.

1. What is waited for comes through; what it raises, too. 2. A run in which something ends now and then is left alone.
3. Where nothing ends, the run ends, with what is under way, by its place; what was waited for is cancelled. 4. Before
   that it is said, each time after twice as long.
"""

import asyncio

import pytest

from slime_cli.errors import EngineError, UsageError
from slime_cli.rollout import watch as watches
from slime_cli.rollout.watch import Watch


async def never():
    await asyncio.Event().wait()


async def fails():
    raise KeyError("x")


async def over(watch, waiting, limit=0.05, say=print):
    return await watch.over(waiting, "rollout 3", limit=limit, say=say)


async def test_what_is_waited_for_comes_through():
    assert await over(Watch(), asyncio.sleep(0, "made")) == "made"
    with pytest.raises(KeyError):
        await over(Watch(), fails())


async def test_a_run_that_moves_is_left_alone():
    now = 0.0
    watch = Watch(lambda: now)

    async def slow():
        nonlocal now
        with watch.at("calls of f"):
            for _ in range(5):
                with watch.at("requests"):
                    now += 30
                    await asyncio.sleep(0.01)
        return "made"

    assert await over(watch, slow(), limit=31) == "made"


async def test_where_nothing_ends_the_run_ends_and_names_what_is_under_way():
    watch = Watch()
    cancelled = []

    async def hangs(what, by_user):
        with watch.at(what, by_user=by_user):
            try:
                await never()
            except asyncio.CancelledError:
                cancelled.append(what)
                raise

    with pytest.raises(EngineError) as caught:
        await over(watch, hangs("requests to the engines", False))
    assert "rollout 3: nothing has ended for 0 s (--max-seconds-without-progress 0.05)" in caught.value.message
    assert "requests to the engines: 1, the longest for 0 s" in caught.value.message
    calls = asyncio.gather(hangs("calls of generate (my.py:3)", True), hangs("calls of generate (my.py:3)", True))
    with pytest.raises(UsageError) as caught:
        await over(watch, calls)
    assert "calls of generate (my.py:3): 2, the longest" in caught.value.message and "give up" in caught.value.fix
    assert len(cancelled) == 3 and watch.told() == "nothing that slime has begun"


async def test_who_cancels_the_waiting_cancels_what_is_waited_for():
    watch = Watch()
    inner = asyncio.ensure_future(never())
    outer = asyncio.ensure_future(over(watch, inner, limit=60))
    await asyncio.sleep(0.01)
    outer.cancel()
    await asyncio.wait([outer])
    assert outer.cancelled() and inner.cancelled()


async def test_it_is_said_each_time_after_twice_as_long(monkeypatch):
    monkeypatch.setattr(watches, "FIRST_WARNING", 0.01)
    watch = Watch()
    for _ in range(2):  # a standstill after another begins with the first warning again
        said = []
        with watch.at("calls of f"), pytest.raises(EngineError):
            await over(watch, never(), limit=0.1, say=said.append)
        assert 1 <= len(said) <= 4  # after 0.01, 0.02, 0.04 and 0.08 s, once each
        assert said[0].startswith("warning: rollout 3: nothing has ended for 0 s. Under way: calls of f: 1")
