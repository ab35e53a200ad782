"""Groups in flight, with a scripted generator and a buffer in memory. Contracts:

1. a rollout has its batch as soon as enough groups are finished: a straggler holds up nobody but its own group;
2. what is begun beyond a batch is given back when the batch is there, with its tokens or without them;
3. where groups flow, room is filled at once and never beyond what the slots, the gate and the last rollout allow;
4. a failure ends the next take; whatever happens, nothing is left in flight or begun after stop;
5. a group that a rollout ended goes back to the buffer however late it listens, and one that was cancelled because the
   run ends keeps what the buffer knows of it;
6. a group is traced in the rollout that waits for it; where groups flow, in none, whatever made room for it.
"""

import asyncio
import contextvars
import types

import pytest

from slime_cli.buffer.buffer import DataBuffer
from slime_cli.buffer.gate import Gate
from slime_cli.buffer.journal import Journal
from slime_cli.buffer.types import Group, PromptRow, Sample, Status
from slime_cli.errors import DataError, UsageError
from slime_cli.rollout.client import Hold, RouterClient
from slime_cli.rollout.collector import Collector
from slime_cli.rollout.failures import Failures
from slime_cli.rollout.generate import Answers


class Memory:
    """A buffer that keeps everything in lists."""

    def __init__(self, batch, room=1000):
        self.batch = batch
        self.dealt = 0
        self.most = room
        self.again = []
        self.accepted = []
        self.rejected = []
        self.released = []
        self.in_flight = 0
        self.peak = 0

    @property
    def waiting(self):
        return len(self.accepted)

    def room(self, version):
        return self.most - self.in_flight - self.waiting

    def owed(self, rollout_id):
        return 0

    def lease(self, count, *, version):
        out = self.again[:count]
        self.again = self.again[count:]
        for _ in range(count - len(out)):
            out.append(Group(self.dealt, None, None, [], [Sample(self.dealt, self.dealt)]))
            self.dealt += 1
        self.in_flight += len(out)
        self.peak = max(self.peak, self.in_flight)
        return out

    def generated(self, group, samples):
        pass

    def finish(self, group, samples, failed):
        group.finished = [*group.finished, *samples]
        done = {*failed, *(sample.index for sample in samples)}
        group.pending = [sample for sample in group.pending if sample.index not in done]
        if not group.finished and not samples and failed:
            self.in_flight -= 1
            self.rejected.append((group.index, *set(failed.values())))

    def accept(self, group):
        self.in_flight -= 1
        self.accepted.append(group)

    def reject(self, group, reason):
        self.in_flight -= 1
        group.finished = []
        self.rejected.append((group.index, reason))

    def release(self, group, *, keep):
        self.in_flight -= 1
        self.released.append((group.index, keep, [len(s.tokens) for s in group.pending]))
        self.again.append(group)

    def choose(self, rollout_id):
        if len(self.accepted) < self.batch:
            return None
        self.accepted.sort(key=lambda group: group.index)
        taken, self.accepted = self.accepted[: self.batch], self.accepted[self.batch :]
        return taken

    def make(self, chosen):
        return [group.index for group in chosen]


class Scripted:
    """Group i is ready when ``ready[i]`` is set, or at once; ``acts`` say what becomes of it."""

    def __init__(self, slow=(), acts=None):
        self.ready = {i: asyncio.Event() for i in slow}
        self.acts = acts or {}
        self.failures = Failures(4, lambda text: None)
        self.aborted = asyncio.Event()
        self.begun = []

    async def answered(self, group, params=None, *, ends, generated):
        self.begun.append(group.index)
        sample = group.pending[0]
        act = self.acts.get(group.index)
        if group.index in self.ready:
            waits = [asyncio.ensure_future(e.wait()) for e in (self.ready[group.index], self.aborted)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in waits:
                    task.cancel()
            if act == "deaf":
                await asyncio.Event().wait()
            if not self.ready[group.index].is_set() and ends():
                sample.tokens = [1, 2]
                sample.status = Status.ABORTED
                return Answers([], {}, [sample])
        else:
            await asyncio.sleep(0)
        if isinstance(act, Exception):
            raise act
        if act == "lost":
            return Answers([], {sample.index: "generation_error"}, [])
        sample.response_length = 1
        return Answers([sample], {}, [])

    async def refusal(self, samples):
        return "filter_rejected" if self.acts.get(samples[0].index) == "refused" else None


def made(generator, *, batch=2, burst=0, slots=100, keep=False, room=1000):
    buffer = Memory(batch, room)
    loop = asyncio.get_running_loop()

    def abort():
        loop.call_soon_threadsafe(generator.aborted.set)

    client = RouterClient("http://127.0.0.1:9", 8, abort=abort)
    options = dict(batch=batch, burst=burst, slots=slots, keep_partial=keep)
    return Collector(generator, buffer, client, **options), buffer, client


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_rollout_is_ready_when_enough_groups_are_and_no_more_are_begun_than_it_needs():
    collector, buffer, client = made(Scripted())
    assert await collector.take(0) == [0, 1] and await collector.take(1) == [2, 3]
    assert buffer.dealt == 4 and not client.aborts, "nothing was in flight, so nothing was aborted"


async def test_dropped_groups_are_replaced_one_by_one_without_waiting_for_a_straggler():
    generator = Scripted(slow=[0], acts={1: "refused", 2: "lost", 3: "refused"})
    collector, buffer, _ = made(generator, batch=2)
    task = asyncio.create_task(collector.take(0))
    await settle()
    assert generator.begun == [0, 1, 2, 3, 4] and not task.done(), "the straggler is one of the two"
    generator.ready[0].set()
    assert await task == [0, 4]
    assert buffer.rejected == [(1, "filter_rejected"), (2, "generation_error"), (3, "filter_rejected")]


@pytest.mark.parametrize("keep", [True, False])
async def test_what_is_begun_beyond_a_batch_is_given_back_and_comes_first_next_time(keep):
    generator = Scripted(slow=[0, 3])
    collector, buffer, client = made(generator, batch=2, burst=4, keep=keep)
    assert await collector.take(0) == [1, 2]
    assert sorted(buffer.released) == [(0, keep, [2]), (3, keep, [2])] and client.aborts == 1
    assert not collector._tasks
    generator.aborted.clear()
    task = asyncio.create_task(collector.take(1))
    for _ in range(20):
        await asyncio.sleep(0.01)  # a batch is made in a thread
    assert sorted(generator.begun[4:6]) == [0, 3] and buffer.dealt == 6, "two more were begun, as many as a burst"
    assert task.done() == keep, "what must begin anew is waited for, or slow prompts would never be trained"
    for event in generator.ready.values():
        event.set()
    assert await task == ([4, 5] if keep else [0, 3])


async def test_a_user_s_function_that_does_not_hear_the_abort_is_ended(monkeypatch):
    monkeypatch.setattr("slime_cli.rollout.collector.CANCEL_SECONDS", 0.05)
    generator = Scripted(slow=[0], acts={0: "deaf"})
    collector, buffer, _ = made(generator, batch=1, burst=2)
    assert await collector.take(0) == [1]
    assert [index for index, *_ in buffer.released] == [0] and not collector._tasks


async def test_groups_flow_into_every_room_and_stop_where_the_last_rollout_has_enough():
    generator = Scripted(slow=range(100))
    collector, buffer, _ = made(generator, batch=2, slots=3)
    collector.flow(range(4))
    await settle()
    assert generator.begun == [0, 1, 2] and buffer.peak == 3
    for event in generator.ready.values():
        event.set()
    got = [await collector.take(rollout_id) for rollout_id in range(4)]
    await settle()
    assert sorted(sum(got, [])) == list(range(8)) == sorted(generator.begun) and buffer.peak == 3


async def test_the_gate_bounds_what_flows():
    generator = Scripted()
    collector, buffer, _ = made(generator, batch=2, room=4)
    collector.flow(range(100))
    await settle()
    assert buffer.dealt == 4
    await collector.take(0)
    await settle()
    assert buffer.dealt == 4, "a batch waits: more would only get older"
    await collector.take(1)
    await settle()
    assert buffer.dealt == 8, "batches that are taken make room"


@pytest.mark.parametrize("error", [UsageError("the filter raised"), RuntimeError("a defect")])
async def test_a_failure_ends_the_take_and_the_ones_after_it(error):
    collector, _, _ = made(Scripted(slow=[0], acts={1: error}))
    for rollout_id in range(2):
        with pytest.raises(type(error), match=str(error)):
            await collector.take(rollout_id)
    await collector.stop()
    assert len(asyncio.all_tasks()) == 1


async def test_a_loop_that_gets_nowhere_ends_with_the_reasons():
    collector, buffer, _ = made(Scripted(acts=dict.fromkeys(range(100), "lost")), batch=2)
    with pytest.raises(DataError, match="not one of 4 groups in a row was of use; lost by reason: generation_error 4"):
        await collector.take(0)
    assert buffer.dealt <= 8


async def test_an_error_of_the_prompt_source_ends_the_take():
    collector, buffer, _ = made(Scripted())
    buffer.lease = lambda count, *, version: (_ for _ in ()).throw(DataError("row 3 is no prompt"))
    with pytest.raises(DataError, match="row 3 is no prompt"):
        await collector.take(0)


async def test_idle_time_is_when_nothing_is_in_flight():
    now = types.SimpleNamespace(time=0.0)
    generator = Scripted(slow=[0])
    collector, _, _ = made(generator, batch=1)
    collector._clock = lambda: now.time
    collector._idle_since = 0.0
    now.time = 5.0
    task = asyncio.create_task(collector.take(0))
    await settle()
    now.time = 25.0
    assert collector.idle_seconds() == 5.0
    generator.ready[0].set()
    await task
    now.time = 28.0
    assert collector.idle_seconds() == 8.0


async def test_nothing_is_aborted_while_others_hold_the_engines_back_and_nothing_is_lost():
    """The weights change while a rollout beside it has enough (one step off, with over-sampling)."""
    generator = Scripted(slow=[0, 3])
    collector, buffer, client = made(generator, batch=2, burst=4)
    async with client.held(Hold.CALLS):
        task = asyncio.create_task(collector.take(0))
        await settle()
        assert not task.done() and not client.aborts and not buffer.released
        generator.ready[0].set()  # ends meanwhile: it is kept
        await settle()
    assert await asyncio.wait_for(task, 5) == [1, 2]
    assert [index for index, *_ in buffer.released] == [3] and client.aborts == 1 and buffer.waiting == 1


async def test_nothing_is_begun_while_everything_ends():
    generator = Scripted(slow=range(100))
    collector, buffer, _ = made(generator, batch=2)
    task = asyncio.create_task(collector.take(0))  # as one step off: a take waits while the trainer fails
    await settle()
    await collector.stop()
    await settle()
    assert generator.begun == [0, 1] and not collector._tasks and not buffer.released
    task.cancel()


async def test_when_the_loop_cancels_everything_groups_are_neither_begun_nor_robbed_of_their_tokens():
    """As asyncio does after Ctrl-C."""
    generator = Scripted(slow=range(100))
    collector, buffer, _ = made(generator, batch=2)
    task = asyncio.create_task(collector.take(0))
    await settle()
    for other in asyncio.all_tasks() - {asyncio.current_task()}:
        other.cancel()
    await settle()
    assert task.cancelled() and generator.begun == [0, 1] and not collector._tasks and not buffer.released


async def test_a_group_that_listens_late_goes_back_when_it_does(monkeypatch):
    class Late(Scripted):
        async def answered(self, group, params=None, *, ends, generated):
            try:
                return await super().answered(group, params, ends=ends, generated=generated)
            except asyncio.CancelledError:
                await listens.wait()
                raise

    listens = asyncio.Event()
    monkeypatch.setattr("slime_cli.rollout.collector.CANCEL_SECONDS", 0.02)
    generator = Late(slow=[0], acts={0: "deaf"})
    collector, buffer, _ = made(generator, batch=1, burst=2)
    assert await collector.take(0) == [1] and not buffer.released
    listens.set()
    await settle()
    assert [index for index, *_ in buffer.released] == [0] and not collector._tasks


async def test_what_was_cancelled_by_nobody_s_order_ends_the_take():
    class Cancelling(Scripted):
        async def answered(self, group, params=None, *, ends, generated):
            raise asyncio.CancelledError

    collector, _, _ = made(Cancelling())
    with pytest.raises(RuntimeError, match="group 0 waited for something that was cancelled"):
        await asyncio.wait_for(collector.take(0), 5)


async def test_a_group_that_was_given_back_is_begun_in_its_last_rollout_though_enough_others_are_finished(tmp_path):
    """Partial rollouts with a bound of 2, over the genuine buffer: group 0 is given back by two rollouts, whose younger
    groups are finished meanwhile."""
    journal = Journal(tmp_path / "journal.sqlite")
    row = PromptRow("?", None, {}, "rows.jsonl", 1)
    rows = type("Rows", (list,), {"name": "rows"})([row] * 50)
    dealing = dict(samples_per_prompt=1, shuffle=False, seed=0, folder=tmp_path)
    rendered = types.SimpleNamespace(text="?", tokens=[1])
    buffer = DataBuffer(journal, rows, gate=Gate(2, 2), render=lambda row: rendered, **dealing)
    buffer.make = lambda chosen: [group.index for group in chosen.groups]
    generator = Partial(slow=[0, 1, 2, 3])
    loop = asyncio.get_running_loop()
    client = RouterClient("http://127.0.0.1:9", 8, abort=lambda: loop.call_soon_threadsafe(generator.aborted.set))
    collector = Collector(generator, buffer, client, batch=2, burst=6, slots=100, keep_partial=True)
    got = []
    for rollout_id in range(3):
        generator.aborted.clear()
        task = asyncio.create_task(collector.take(rollout_id))
        await settle()
        if rollout_id == 1:
            generator.ready[2].set()
            generator.ready[3].set()  # by its bound, this rollout waits for two of the four
        if rollout_id == 2:
            assert not task.done() and buffer.waiting == 2, "enough are finished, and two more must be among them"
            generator.ready[0].set()
            generator.ready[1].set()
        got.append(await asyncio.wait_for(task, 5))
        collector.published(rollout_id + 1)
    await collector.stop()
    buffer.close()
    assert got == [[4, 5], [2, 3], [0, 1]]


class Partial(Scripted):
    """What is cut off has a token, and continues."""

    async def answered(self, group, params=None, *, ends, generated):
        found = await super().answered(group, params, ends=ends, generated=generated)
        for sample in (*found.whole, *found.unfinished):
            sample.tokens, sample.response_length, sample.rollout_log_probs = [1, 2], 1, [-1.0]
            sample.reward = 1.0
        return found


ROLLOUT = contextvars.ContextVar("rollout", default=None)


class Traced(Scripted):
    """Knows in which rollout each group was begun."""

    def __init__(self):
        super().__init__()
        self.traced = {}

    async def answered(self, group, params=None, **given):
        self.traced[group.index] = ROLLOUT.get()
        return await super().answered(group, params, **given)


async def test_groups_are_traced_in_the_rollout_that_waits_for_them():
    generator = Traced()
    collector, _, _ = made(generator)
    for rollout_id in range(2):
        ROLLOUT.set(rollout_id)
        await collector.take(rollout_id)
    assert generator.traced == {0: 0, 1: 0, 2: 1, 3: 1}
    flowing = Traced()
    ROLLOUT.set(None)
    collector, _, _ = made(flowing)
    collector.flow(range(3))
    for rollout_id in range(3):
        ROLLOUT.set(rollout_id)
        await collector.take(rollout_id)
        collector.published(rollout_id + 1)
    assert set(flowing.traced.values()) == {None} and len(flowing.traced) == 6
    await collector.stop()
