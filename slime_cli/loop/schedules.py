"""The loops of a policy's phase: when to collect, train and publish. Each is a coroutine over the same four verbs.

    prompt rows --lease--> Collector: generate -> reward -> filter --accept--> DataBuffer (finished groups wait)
                             ^   |                                                 |
              version -------+   | pause, abort                                    | take(rollout_id)
                             |   v                                                 v
    engines <--send, verify-- Publisher <--write-- Learner: optimizer steps <--- Batch (on disk, BATCHED)
                                                     |
                                                     +--> checkpoint --commit--> journal: TRAINED, step, version

    part         waits for                                          woken by
    Collector    room: a slot, and with a bound the buffer's gate   a group that ends, a batch that is taken, a version
    take         as many finished groups as a rollout has           a group that is accepted
    train        a batch                                            take
    publish      what is in flight, by --in-flight                  the end of train
    evaluate     the engines' version; holds up the next publish    the end of publish

Where a trajectory is at each moment: in ``Collector`` while it is LEASED or GENERATED, in ``DataBuffer`` while it is
PENDING (given back) or REWARDED, in ``Batch`` while it is BATCHED, and with the commit it is TRAINED. Everything that
blocks (the learner, the engines' weights) runs in a thread; the event loop never stands still.

A rollout's *staleness* is the number of rollouts that were trained between the weights that wrote a token and the step
that trains it. It is 0 where the synchronous schedule publishes after every rollout, 1 one step off, and at most
``--max-staleness`` in the asynchronous one, by construction: see :mod:`slime_cli.buffer.gate`.
"""

from collections.abc import Awaitable, Callable, Iterator
from typing import Protocol

from slime_cli.buffer.batch import Batch


class Verbs(Protocol):
    """What a schedule is made of (:class:`slime_cli.loop.phase.Phase`)."""

    def remaining(self) -> Iterator[int]:
        """Ids of the rollouts that are still to be trained. Ends early when the phase has reached its aim."""
        ...

    def begin(self, rollout_id: int) -> None:
        """Begins to collect the rollout's batch, if there is such a rollout."""
        ...

    async def take(self, rollout_id: int) -> Batch:
        """The rollout's batch: an earlier attempt's from its file, else as soon as enough groups are finished."""
        ...

    async def train(self, batch: Batch) -> None:
        """Every optimizer step of the batch; then its metrics, and a checkpoint and commit where one is due."""
        ...

    async def publish(self, rollout_id: int) -> None:
        """The trainer's weights into the engines, where that is due after this rollout; then the evaluation."""
        ...

    def flow(self) -> None:
        """Groups are leased whenever there is room, not only for a rollout that waits."""
        ...


async def synchronous(phase: Verbs) -> None:
    """Generate, train, publish, one after the other."""
    for rollout_id in phase.remaining():
        batch = await phase.take(rollout_id)
        await phase.train(batch)
        await phase.publish(rollout_id)


async def one_step_off(phase: Verbs) -> None:
    """The next rollout is generated, with the weights of now, while this one is trained."""
    for rollout_id in phase.remaining():
        batch = await phase.take(rollout_id)
        phase.begin(rollout_id + 1)
        await phase.train(batch)
        await phase.publish(rollout_id)


async def asynchronous(phase: Verbs) -> None:
    """Groups flow all the time; a rollout is trained as soon as the buffer has one."""
    phase.flow()
    for rollout_id in phase.remaining():
        batch = await phase.take(rollout_id)
        await phase.train(batch)
        await phase.publish(rollout_id)


SCHEDULES: dict[str, Callable[[Verbs], Awaitable[None]]] = {
    "sync": synchronous,
    "one-step-off": one_step_off,
    "async": asynchronous,
}
