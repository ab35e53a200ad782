"""The loops of a policy's phase: when to collect, train and publish. Each is a coroutine over the same verbs.

    prompt rows --lease--> Collector: generate -> reward -> filter --accept--> DataBuffer (finished groups wait)
                             ^   |                                                 |
              version -------+   | pause, abort                                    | take(rollout_id)
                             |   v                                                 v
    engines <--send, verify-- Publisher <--write-- Learner: optimizer steps <--- Batch (on disk, BATCHED)
                                                     |
                                                     +--> checkpoint --commit--> journal: TRAINED, step, version

    part         waits for                                          woken by
    Collector    room: a slot, and with a bound the buffer's gate   a group that ends, a batch that is taken, a version
    take         as many finished groups as a rollout has, and      a group that is accepted
                 those whose last rollout this is
    train        a batch                                            take
    publish      requests in flight, as --in-flight says, and the   the end of train
                 evaluation of the version before
    evaluate     the engines' new version                           the end of publish

Where a trajectory is, by its fate in the journal:

    LEASED       its group is in flight in the Collector, and tokens are generated
    GENERATED    its group is in flight in the Collector, and its reward is computed
    REWARDED     its group is filtered in the Collector, or waits in the DataBuffer to be taken or to be dealt again
    PENDING      its group was given back, or left by a kill: it waits in the DataBuffer to be dealt again
    BATCHED      in a Batch on disk, which is trained now, or after a kill
    TRAINED      in a checkpoint that is durable
    DROPPED      nowhere; the journal keeps the reason

A new trajectory begins as LEASED. The DataBuffer writes every fate, in the journal first. What blocks for long (the
learner, the engines' weights, a batch's file) runs in a thread; only the journal's small writes are made on the loop.

A rollout's *staleness* is the number of rollouts that were trained between the weights that wrote a token and the step
that trains it. In the synchronous schedule it is 0, but for what ``--partial-rollout``, over-sampling or
``--update-weights-interval`` keep; one step off it is 1; in the asynchronous one at most ``--max-staleness``, by
construction: see :mod:`slime_cli.buffer.gate`.
"""

from collections.abc import Awaitable, Callable, Iterator
from typing import Protocol

from slime_cli.buffer.batch import Batch


class Verbs(Protocol):
    """The verbs that a schedule calls (:class:`slime_cli.loop.phase.Phase`)."""

    def remaining(self) -> Iterator[int]:
        """Ids of the rollouts that are still to be trained. Ends early where ``--stop-at-loss`` is reached."""
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
        """Brings the trainer's weights into the engines, where that is due after this rollout; then begins the
        evaluation, where one is due. The synchronous schedule waits for it."""
        ...

    def flow(self) -> None:
        """From now on groups are leased whenever there is room, not only for a rollout that waits."""
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
