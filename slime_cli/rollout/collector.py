"""Keeps groups in flight from lease to the buffer, each on its own: one straggler stalls nobody.

One a phase; the schedules drive it, on the run's event loop. A group is leased when there is room for it, generated,
rewarded and filtered as it becomes ready, and then waits in the Data Buffer to be taken. Invariants: the buffer alone
writes fates; in-flight work is bounded by slots, and with ``--max-staleness`` by the buffer's gate; what a user's
function raised for a group, or an engine's death, ends the next :meth:`Collector.take`; nothing is in flight after
:meth:`Collector.stop`.
"""

import asyncio
import collections
import contextvars
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from slime_cli.buffer.types import Group, Sample, trajectories
from slime_cli.rollout.client import Hold, RouterClient
from slime_cli.rollout.concurrent import CANCEL_SECONDS
from slime_cli.rollout.generate import Generator


class Buffer[C, B](Protocol):
    """The part of :class:`slime_cli.buffer.buffer.DataBuffer` that the collector calls. C: chosen groups, B: a batch of
    them."""

    @property
    def waiting(self) -> int: ...
    def room(self, version: int) -> int: ...
    def owed(self, rollout_id: int) -> int: ...
    def lease(self, count: int, *, version: int) -> list[Group]: ...
    def generated(self, group: Group, samples: list[Sample]) -> None: ...
    def finish(self, group: Group, samples: list[Sample], failed: dict[int, str]) -> None: ...
    def accept(self, group: Group) -> None: ...
    def reject(self, group: Group, reason: str) -> None: ...
    def release(self, group: Group, *, keep: bool) -> None: ...
    def choose(self, rollout_id: int) -> C | None: ...
    def make(self, chosen: C) -> B: ...


class Collector[C, B]:
    """``slots``: groups that may be in flight at most."""

    def __init__(
        self,
        generator: Generator,
        buffer: Buffer[C, B],
        client: RouterClient,
        *,
        batch: int,
        burst: int,
        slots: int,
        keep_partial: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``batch``: groups a rollout. ``burst``: how many are in flight where more than that are begun and the rest is
        given back (``--over-sampling-batch-size``). ``keep_partial``: what is given back keeps its tokens."""
        self.generator = generator
        self.buffer = buffer
        self.client = client
        self.batch = batch
        self.burst = max(burst, batch)
        self.slots = slots
        self.keep_partial = keep_partial
        self._clock = clock
        self.version = 0
        """Rollouts that the engines' weights are trained on; :meth:`published` moves it."""
        self.streak = generator.failures.streak("groups")
        self._flows = False
        self._to_come: set[int] = set()
        """Rollouts that are still to be collected, where groups flow."""
        self._wanted: int | None = None
        self._ending = False
        self._stopped = False
        self._tasks: dict[asyncio.Task[None], Group] = {}
        self._context = contextvars.copy_context()
        """What groups are traced in: the rollout that waits for them, or the phase where groups flow; never what made
        room for them."""
        self._surplus: set[asyncio.Task[None]] = set()
        """Those of them that a rollout ended, for it had enough."""
        self._restarted: set[int] = set()
        """Groups that were given back without their tokens."""
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()
        self._idle_since: float | None = clock()
        self._idle = 0.0

    # -- what the schedules call ---------------------------------------------------------------------------------------

    def flow(self, rollouts: Sequence[int]) -> None:
        """From now on groups are leased whenever there is room, whether a rollout waits for them or not; no more than
        ``rollouts``, which have no batch yet, can train."""
        self._flows = True
        self._context = contextvars.copy_context()
        self._to_come = set(rollouts)
        self._fill()

    async def take(self, rollout_id: int) -> B:
        """The batch of a rollout, as soon as the buffer has one. What is in flight beyond it is given back, unless
        groups flow."""
        self._wanted = rollout_id
        if not self._flows:
            self._context = contextvars.copy_context()
        try:
            while True:
                self._raise()
                if not self._owes_a_start() and (chosen := self.buffer.choose(rollout_id)) is not None:
                    break
                self._fill()
                self._raise()
                self._changed.clear()
                await self._changed.wait()
        finally:
            self._wanted = None
        self._to_come.discard(rollout_id)
        if not self._flows:
            await self.give_back()
        self._fill()
        return await asyncio.to_thread(self.buffer.make, chosen)

    def published(self, version: int) -> None:
        """The engines have weights that were trained on ``version`` rollouts."""
        self.version = version
        self._fill()

    async def give_back(self) -> None:
        """Aborts what is in flight; unfinished groups go back to the buffer."""
        if not self._tasks:
            return
        async with self.client.held(Hold.REQUESTS):
            self._ending = True
            try:
                await self.client.abort()
                await self._wait_or_cancel()
            finally:
                self._ending = False
        self._raise()

    async def stop(self) -> None:
        """Ends all work, whatever state it is in. What the buffer has not been told is lost: the run ends."""
        self._stopped = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CANCEL_SECONDS)

    def idle_seconds(self) -> float:
        """How long nothing was in flight, so far."""
        return self._idle + (self._clock() - self._idle_since if self._idle_since is not None else 0.0)

    # -- groups in flight ----------------------------------------------------------------------------------------------

    def _owes_a_start(self) -> bool:
        """A group that was begun for an earlier rollout, and lost its tokens, is waited for: else slow prompts would
        begin again and again, and never be trained."""
        return any(group.index in self._restarted for group in self._tasks.values())

    def _give_back(self, group: Group, *, surplus: bool) -> None:
        """``surplus``: the rollout had all that it needed. Only then may tokens be lost: while weights change, none
        is."""
        keep = self.keep_partial or not surplus
        if not keep:
            self._restarted.add(group.index)
        self.buffer.release(group, keep=keep)

    def _room(self) -> int:
        """How many more groups are leased now."""
        in_flight = len(self._tasks)
        if self._flows:
            left = len(self._to_come) * self.batch - in_flight - self.buffer.waiting
            if self.buffer.waiting >= self.batch:
                left = self._owed()  # the trainer has its next batch: others would only be older when they are trained
            wanted = min(self.slots - in_flight, left)
        elif self._wanted is not None:
            have = in_flight + self.buffer.waiting
            wanted = self.burst - have if have < self.batch else self._owed()
        else:
            return 0
        return min(wanted, self.buffer.room(self.version)) if wanted > 0 else 0

    def _owed(self) -> int:
        """Groups that were given back, and without which the rollout that waits cannot be taken."""
        return self.buffer.owed(self._wanted) if self._wanted is not None else 0

    def _fill(self) -> None:
        if self._ending or self._stopped or self._failure is not None:
            return
        count = self._room()
        if count <= 0:
            return
        try:
            groups = self.buffer.lease(count, version=self.version)
        except Exception as error:
            self._fail(error)
            return
        for group in groups:
            name = f"group {group.index}"
            task = asyncio.create_task(self._run(group), name=name, context=self._context.copy())
            self._tasks[task] = group
        self._note_idle()

    async def _run(self, group: Group) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            await self._one(group)
        except asyncio.CancelledError:
            if task in self._surplus:  # however late it listens
                self._give_back(group, surplus=True)
            elif task.cancelling():
                self._stopped = True  # all tasks are cancelled at once: the run ends
            else:
                self._fail(RuntimeError(f"group {group.index} waited for something that was cancelled"))
            raise
        except Exception as error:
            self._fail(error)
        finally:
            self._tasks.pop(task, None)
            self._surplus.discard(task)
            self._note_idle()
            self._changed.set()
            self._fill()

    async def _one(self, group: Group) -> None:
        """A group from lease to the buffer: accepted, dropped, or given back."""
        found = await self.generator.answered(
            group, ends=lambda: self._ending, generated=lambda samples: self.buffer.generated(group, samples)
        )
        self.buffer.finish(group, found.whole, found.failed)
        if found.unfinished:
            so_far = {sample.index: sample for sample in found.unfinished}
            group.pending = [so_far.get(sample.index, sample) for sample in group.pending]
            self._give_back(group, surplus=self._ending)
            return
        self._restarted.discard(group.index)
        lost = collections.Counter(found.failed.values())
        if group.finished and (reason := await self.generator.refusal(group.finished)):
            lost[reason] += len(trajectories(group.finished))
            self.buffer.reject(group, reason)
        elif group.finished:
            self.buffer.accept(group)
        self.streak.settle(bool(group.finished), lost)

    async def _wait_or_cancel(self) -> None:
        """Waits for what answers the abort; then ends what does not listen (a reward, a user's own tool)."""
        for end in (False, True):
            if end:
                self._surplus.update(self._tasks)
                for task in self._tasks:
                    task.cancel()
            if self._tasks:
                await asyncio.wait(list(self._tasks), timeout=CANCEL_SECONDS)

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._changed.set()

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _note_idle(self) -> None:
        now = self._clock()
        if self._tasks and self._idle_since is not None:
            self._idle += now - self._idle_since
            self._idle_since = None
        elif not self._tasks and self._idle_since is None:
            self._idle_since = now
