"""Requests in flight while weights change: a client that sends nothing, and engines that note their orders."""

import asyncio
import threading

import pytest

from slime_cli.loop.in_flight import interrupted
from slime_cli.rollout.client import Hold, RouterClient
from slime_cli.serving import control


class Engines:
    """Stand still when they are let."""

    def __init__(self, monkeypatch):
        self.told = []
        self.lets = threading.Event()
        self.lets.set()
        self.asked = threading.Event()
        monkeypatch.setattr(control, "pause", self.pause)
        monkeypatch.setattr(control, "resume", lambda urls: self.told.append(("resume", urls)))
        self.client = RouterClient("http://127.0.0.1:9", 8, abort=lambda: self.told.append("abort"))

    def pause(self, urls, mode):
        self.asked.set()
        assert self.lets.wait(10)
        self.told.append((mode, urls))

    def interrupted(self, policy):
        return interrupted(self.client, policy, lambda: ["u"])


@pytest.mark.parametrize(
    ("policy", "held", "told"),
    [
        ("drain", Hold.CALLS, []),
        ("pause", Hold.REQUESTS, [("retract", ["u"]), ("resume", ["u"])]),
        ("abort", Hold.REQUESTS, ["abort"]),
    ],
)
@pytest.mark.parametrize("fails", [False, True])
async def test_requests_wait_and_engines_continue_whatever_the_publish_ended_in(monkeypatch, policy, held, told, fails):
    engines = Engines(monkeypatch)
    try:
        async with engines.interrupted(policy):
            assert engines.client._hold is held
            assert engines.told == [one for one in told if one != ("resume", ["u"])]
            if fails:
                raise RuntimeError("the publish failed")
    except RuntimeError:
        assert fails
    assert engines.client._hold is Hold.NOTHING and engines.told == told


async def test_an_interruption_while_engines_are_told_to_stand_still_lets_them_continue_after_that(monkeypatch):
    engines = Engines(monkeypatch)
    engines.lets.clear()

    async def publish():
        async with engines.interrupted("pause"):
            raise AssertionError("the weights do not change any more")

    task = asyncio.create_task(publish())
    await asyncio.to_thread(engines.asked.wait, 10)
    task.cancel()
    await asyncio.sleep(0.01)
    engines.lets.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engines.told == [("retract", ["u"]), ("resume", ["u"])] and engines.client._hold is Hold.NOTHING
