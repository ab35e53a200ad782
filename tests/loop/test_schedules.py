"""The schedules over verbs that only note when they are called.

1. synchronous: strictly one after the other; 2. one step off: the next rollout is begun before training, never more
than one ahead; 3. asynchronous: groups flow from the start; 4. all end where the phase says so.
"""

import asyncio

import pytest

from slime_cli.loop.schedules import SCHEDULES


class Notes:
    def __init__(self, total=3, stop_after=None):
        self.total = total
        self.stop_after = stop_after
        self.seen = []
        self.ahead = {}

    def remaining(self):
        for rollout_id in range(self.total):
            if self.stop_after is not None and rollout_id > self.stop_after:
                return
            yield rollout_id

    def flow(self):
        self.seen.append("flow")

    def begin(self, rollout_id):
        if rollout_id < self.total:
            self.ahead[rollout_id] = asyncio.create_task(self._generate(rollout_id))

    async def _generate(self, rollout_id):
        self.seen.append(f"generate {rollout_id}")
        await asyncio.sleep(0.01)
        self.seen.append(f"generated {rollout_id}")
        return rollout_id

    async def take(self, rollout_id):
        task = self.ahead.pop(rollout_id, None)
        return await (task or self._generate(rollout_id))

    async def train(self, batch):
        self.seen.append(f"train {batch}")
        await asyncio.sleep(0.02)
        self.seen.append(f"trained {batch}")

    async def publish(self, rollout_id):
        self.seen.append(f"publish {rollout_id}")


def run(name, **options):
    notes = Notes(**options)
    asyncio.run(SCHEDULES[name](notes))
    assert not notes.ahead
    return notes.seen


def one(i):
    return [f"generate {i}", f"generated {i}", f"train {i}", f"trained {i}", f"publish {i}"]


def test_the_synchronous_schedule_does_one_thing_after_the_other():
    assert run("sync") == one(0) + one(1) + one(2)


def test_one_step_off_generates_the_next_rollout_while_it_trains():
    seen = run("one-step-off")
    for i in range(2):
        began = seen.index(f"generate {i + 1}")
        assert seen.index(f"generated {i}") < began < seen.index(f"trained {i}")
        assert seen.index(f"generated {i + 1}") < seen.index(f"publish {i}"), "scripted generation is the quicker one"
    assert seen.count("publish 2") == 1 and "generate 3" not in seen


def test_the_asynchronous_schedule_lets_groups_flow_from_the_start():
    assert run("async")[0] == "flow" and run("async")[1:] == one(0) + one(1) + one(2)


@pytest.mark.parametrize("name", ["sync", "async"])
def test_a_phase_that_has_reached_its_aim_ends(name):
    assert run(name, stop_after=0)[-5:] == one(0)
