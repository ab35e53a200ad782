"""The Data Buffer: deals prompts out as groups, keeps what became of every trajectory, and makes the batches.

One a phase, and the only one that writes a fate: the journal is its own. The collector and the supervised phase lease
groups from it and bring them back finished; finished groups wait here until a rollout takes them. Invariants: a fate is
in the journal before the method that decides it returns; a group is in exactly one place: in flight, waiting, or
returned (to be dealt again), the oldest first; with a bound on staleness every group that is under way still has a
rollout in time (:mod:`slime_cli.buffer.gate`). All methods are called in the event loop's thread, but for
:meth:`DataBuffer.make`, :meth:`DataBuffer.replay`, :meth:`DataBuffer.commit` and :meth:`DataBuffer.put_state`, which
touch only files and the journal.
"""

import collections
import dataclasses
import heapq
import pathlib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from slime_cli.buffer import batch as batches
from slime_cli.buffer.batch import Batch
from slime_cli.buffer.gate import Gate
from slime_cli.buffer.journal import Commit, Journal, Ledger
from slime_cli.buffer.making import Chosen, Maker, Shape, all_fit
from slime_cli.buffer.places import WHOLE, Place, Places, leased_at
from slime_cli.buffer.prompts import Prompts
from slime_cli.buffer.records import OpenGroup
from slime_cli.buffer.types import Group, PromptRow, Sample, trajectories
from slime_cli.buffer.values import unstorable


@dataclasses.dataclass(frozen=True)
class PhaseState:
    """State of a phase that its journal keeps besides fates."""

    seconds: float = 0.0
    """Its duration, up to its last commit."""
    finished: int | None = None
    """The number of rollouts that it was finished with; None while it is not."""
    stopped: int | None = None
    """The rollout in which it reached ``--stop-at-loss``."""
    saving: int | None = None
    """The last step that a checkpoint was begun of."""


Select = Callable[[list[Group], int], tuple[list[Group], list[Group]]]


class DataBuffer:
    """``render``, ``on_bad_row`` and ``say``: see :class:`slime_cli.buffer.prompts.Prompts`."""

    def __init__(
        self,
        journal: Journal,
        source: Any,
        *,
        folder: pathlib.Path,
        samples_per_prompt: int,
        shuffle: bool,
        seed: int,
        render: Callable[[PromptRow], Any],
        on_bad_row: str = "fail",
        say: Callable[[str], None] = print,
        gate: Gate,
        steps_per_rollout: int = 1,
        reward_key: str | None = None,
        rows: int | None = None,
        unfit: Callable[[list[Sample]], dict[str, list[int]]] = all_fit,
        shape: Shape | None = None,
        select: Select | None = None,
    ) -> None:
        """``folder``: the phase's. ``rows``: of the model's embedding. ``unfit``: trajectories that a batch must not
        have, by reason. ``shape``: users' functions make a batch's samples of its groups', and see those of rejected
        ones. ``select``: which returned groups are dealt now, so many at most, and which are dropped."""
        self._journal = journal
        self.folder = folder
        self.samples_per_prompt = samples_per_prompt
        self.gate = gate
        self.steps_per_rollout = steps_per_rollout
        self._rows = rows
        self.maker = Maker(journal, folder, reward_key, unfit, shape)
        self._select = select
        self._rejected: list[list[Sample]] = []
        self.recovery = recovery = journal.recover()
        self.prompts = Prompts(
            source, recovery.cursor, shuffle=shuffle, seed=seed, render=render, on_bad_row=on_bad_row, say=say
        )
        self._cursor_before = self.prompts.cursor
        self._next_group = recovery.next_group_index
        self._next_sample = recovery.next_sample_index
        self._places = Places()
        self._dropped: collections.Counter[str] = collections.Counter()
        """Trajectories that were dropped since the last batch, by reason."""
        self._next_rollout = recovery.committed.rollout_id + 1 if recovery.committed else 0
        for group in recovery.groups:
            self._places.put(self._reopened(group), Place.RETURNED)

    def close(self) -> None:
        self._journal.close()

    # -- what it holds -------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Groups that are finished and can be taken."""
        return len(self._places.groups[Place.WAITING])

    @property
    def skipped(self) -> int:
        return self.prompts.skipped

    @property
    def skipped_by_kind(self) -> collections.Counter[str]:
        return self.prompts.skipped_by_kind

    def rollouts_of(self, step: int) -> int:
        """How many rollouts the weights of an optimizer step were trained on."""
        return step // self.steps_per_rollout

    def room(self, version: int) -> int:
        """How many groups may be leased now, for engines whose weights were trained on ``version`` rollouts: returned
        ones that it makes no older, and others as far as every group can still be trained in time."""
        may = self.gate.may_deal(version, self._next_rollout, self._deadlines(*Place) + self._on_disk())
        return min(self._places.no_older(version) + may, sys.maxsize)

    def owed(self, rollout_id: int) -> int:
        """Returned groups without which this rollout cannot be taken, though enough others are finished: they, or
        groups that they would push out of their places, have no later one."""
        if self.waiting < self.gate.batch or (late := self._late(rollout_id)) is None:
            return 0
        return sum(count for deadline, count in self._deadlines(Place.RETURNED).items() if deadline <= late)

    def _late(self, rollout_id: int) -> int | None:
        """The last deadline that would be missed if the rollout took finished groups now."""
        others = self._deadlines(Place.IN_FLIGHT, Place.RETURNED) + self._on_disk()
        return self.gate.late(self._deadlines(Place.WAITING), others, rollout_id)

    def _deadlines(self, *places: Place) -> collections.Counter[int]:
        """How many groups of these places have each deadline; nothing without a bound."""
        ages = self._places.ages(*places)
        found = ((self.gate.deadline(age), count) for age, count in ages.items())
        return collections.Counter({deadline: count for deadline, count in found if deadline is not None})

    def _on_disk(self) -> collections.Counter[int]:
        """Deadlines of the groups of batches that an earlier attempt made: their rollouts have no place for others."""
        return collections.Counter({j: self.gate.batch for j in self.recovery.replay if j >= self._next_rollout})

    def _deadline(self, group: Group) -> int | None:
        return None if group.leased_at is None else self.gate.deadline(group.leased_at)

    # -- groups go out -------------------------------------------------------------------------------------------------

    def lease(self, count: int, *, version: int) -> list[Group]:
        """``count`` groups to work on, in the journal before they are returned. Returned ones come first, by deadline:
        those that it makes no older before the others, as :meth:`room` counts them. ``version``: rollouts that the
        engines' weights were trained on."""

        again = self._again(count, version)
        self._resume([s.index for g in again for s in g.pending if s.status in WHOLE], None)
        self._resume([s.index for g in again for s in g.pending if s.status not in WHOLE], version)
        fresh = [self._deal() for _ in range(count - len(again))]
        if fresh:
            rows = [(g.index, g.row, self.prompts.epoch, [s.index for s in g.pending]) for g in fresh]
            self._journal.lease(rows, self.prompts.cursor, self._next_rollout, version)
        for group in (*again, *fresh):
            group.leased_at = leased_at(group, version)
            self._places.put(group, Place.IN_FLIGHT)
            for sample in group.pending:
                sample.rollout_id = self._next_rollout
        return again + fresh

    def _again(self, count: int, version: int) -> list[Group]:
        """Returned groups that go out now."""

        def urgency(group: Group) -> tuple[bool, int, int]:
            return group.leased_at != leased_at(group, version), _last_if_none(self._deadline(group)), group.index

        returned = self._places.groups[Place.RETURNED].values()
        if self._select is None or not returned:
            return heapq.nsmallest(count, returned, key=urgency)
        order, dropped = self._select(sorted(returned, key=urgency), count)
        for group in dropped:
            self.reject(group, "buffer_filter")
        return order[:count]

    def adopt(self, groups: Sequence[Sequence[Sample]], source: str) -> list[Group]:
        """Groups that another run finished, as groups of this one, with indices of its own. ``source``: where they were
        read. What an attempt that was killed had adopted and not batched is dropped."""
        for group in list(self._places.groups[Place.RETURNED].values()):
            self.reject(group, "adopted_again")
        return [self._adopted(samples, source, row) for row, samples in enumerate(groups, 1)]

    def _adopted(self, samples: Sequence[Sample], source: str, number: int) -> Group:
        row = PromptRow(samples[0].prompt, samples[0].label, samples[0].metadata, source, number)
        index, self._next_group = self._next_group, self._next_group + 1
        own = {theirs: self._next_sample + i for i, theirs in enumerate(trajectories(samples))}
        self._next_sample += len(own)
        group = Group(index, row, None, [], [Sample(i, index) for i in own.values()])
        leased = [(index, row, self.prompts.epoch, [*own.values()])]
        self._journal.lease(leased, self.prompts.cursor, self._next_rollout)
        group.leased_at = 0
        self._places.put(group, Place.IN_FLIGHT)
        named = [dataclasses.replace(s, index=own[s.index], group_index=index) for s in samples]
        self.finish(group, named, {})
        self.accept(group)
        return group

    def _resume(self, indices: list[int], version: int | None) -> None:
        """``version``: of the weights that continue them; None where only their rewards are to come."""
        if indices:
            self._journal.resume(indices, self._next_rollout, version)

    def _deal(self) -> Group:
        row, rendered = self.prompts.next()
        group = self._next_group
        self._next_group += 1
        first = self._next_sample
        self._next_sample += self.samples_per_prompt
        pending = [_sample(i, group, row, rendered) for i in range(first, self._next_sample)]
        return Group(group, row, rendered, [], pending)

    def _reopened(self, found: OpenGroup) -> Group:
        """A group that an earlier attempt left open, with all that it had."""
        rendered = self.prompts.render(found.row)
        kept = found.partial
        group = Group(
            found.group_index,
            found.row,
            rendered,
            list(found.finished),
            [kept[i][0] if i in kept else _sample(i, found.group_index, found.row, rendered) for i in found.pending],
            {i: siblings for i, siblings in kept.items() if len(siblings) > 1},
        )
        group.leased_at = found.leased_at
        return group

    # -- groups come back ----------------------------------------------------------------------------------------------

    def generated(self, group: Group, samples: list[Sample]) -> None:
        """Generation of these ended, their rewards are to come: a kill does not lose them."""
        made = {i: siblings for i, siblings in trajectories(samples).items() if all(map(_storable, siblings))}
        if not made:
            return
        self._journal.generated([sample for siblings in made.values() for sample in siblings])
        group.pending = [made[s.index][0] if s.index in made else s for s in group.pending]
        group.partial |= {index: siblings for index, siblings in made.items() if len(siblings) > 1}

    def finish(self, group: Group, samples: list[Sample], failed: dict[int, str]) -> None:
        """Rewarded samples of the group, all siblings of a trajectory at once, and why others are dropped."""
        self._journal.finish(samples, failed)
        self._dropped.update(failed.values())
        kept = [sample for sample in (*group.finished, *samples) if sample.index not in failed]
        group.finished = sorted(kept, key=lambda s: (s.index, s.part))
        done = {*failed, *(sample.index for sample in samples)}
        group.pending = [sample for sample in group.pending if sample.index not in done]
        group.partial = {i: siblings for i, siblings in group.partial.items() if i not in done}
        if not group.finished and not group.pending:
            self._places.remove(group)

    def accept(self, group: Group) -> None:
        """All of the group is finished and to be trained: it waits here for a rollout."""
        self._places.put(group, Place.WAITING)

    def reject(self, group: Group, reason: str) -> None:
        """Nothing of the group is to be trained."""
        indices = list(trajectories(group.samples))
        self._journal.drop(indices, reason)
        self._dropped[reason] += len(indices)
        if self.maker.shape is not None and group.finished:
            self._rejected.append(group.finished)
        group.finished = []
        self._places.remove(group)

    def release(self, group: Group, *, keep: bool) -> None:
        """An unfinished group is to be dealt again. ``keep``: with what was generated of it; otherwise its unfinished
        trajectories begin anew."""
        kept = [s for s in group.pending if keep and s.response_length]
        if kept:
            self._journal.release([x for s in kept for x in group.partial.get(s.index, [s])])
        gone = {s.index for s in group.pending} - {s.index for s in kept}
        if gone:
            self._journal.restart(gone)
        group.partial = {i: siblings for i, siblings in group.partial.items() if i not in gone}
        group.pending = [
            _sample(s.index, group.index, group.row, group.rendered) if s.index in gone else s for s in group.pending
        ]
        if not any(sample.response_length for sample in group.samples):
            group.leased_at = None  # it has nothing, and so no age
        self._places.put(group, Place.RETURNED)

    # -- batches -------------------------------------------------------------------------------------------------------

    def choose(self, rollout_id: int) -> Chosen | None:
        """The groups of a rollout; None when too few are finished, or when one in flight must be among them."""
        self._next_rollout = rollout_id
        self._leave_out_what_is_too_late()
        waiting = self._places.groups[Place.WAITING]
        if len(waiting) < self.gate.batch or self._late(rollout_id) is not None:
            return None
        others = self._deadlines(Place.IN_FLIGHT, Place.RETURNED) + self._on_disk()
        pairs = ((self._deadline(group), index) for index, group in waiting.items())
        indices = self.gate.choose(pairs, others, rollout_id)
        assert indices is not None, "it was asked just now"
        groups = [waiting[index] for index in sorted(indices)]
        for group in groups:
            self._places.remove(group)
        self._next_rollout = rollout_id + 1
        return self._chosen(rollout_id, groups)

    def supervised(self, rollout_id: int, groups: list[Group]) -> Chosen:
        """Groups that were leased and finished for this rollout."""
        for group in groups:
            self._places.remove(group)
        self._next_rollout = rollout_id + 1
        return self._chosen(rollout_id, groups)

    def _chosen(self, rollout_id: int, groups: list[Group]) -> Chosen:
        cursors = batches.Cursors(self._cursor_before, self.prompts.cursor)
        self._cursor_before = cursors.after
        dropped, self._dropped = self._dropped, collections.Counter()
        rejected, self._rejected = self._rejected, []
        return Chosen(rollout_id, groups, dropped, cursors, rejected)

    def _leave_out_what_is_too_late(self) -> None:
        """Nothing, unless a resume has lowered the bound or a batch was dropped."""
        places = Place.WAITING, Place.RETURNED
        if self.gate.holds(self._deadlines(*places) + self._on_disk(), self._next_rollout):
            return
        idle = {index: group for place in places for index, group in self._places.groups[place].items()}
        aged = [(self._deadline(group), index) for index, group in idle.items()]
        for index in self.gate.too_late(aged, self._next_rollout, self._on_disk()):
            self.reject(idle[index], "stale")

    def make(self, chosen: Chosen) -> Batch:
        """The batch, durable and BATCHED. Blocks for as long as the disk takes. DataError when nothing is left to
        train."""
        return self.maker.make(chosen)

    def made_before(self, rollout_id: int) -> Sequence[int] | None:
        """The trajectories of the batch that an earlier attempt made of this rollout and did not commit; None when
        there is none. Groups that are dealt from now on are for later rollouts."""
        indices = self.recovery.replay.get(rollout_id)
        if indices:
            self._next_rollout = rollout_id + 1
        return indices or None

    def replay(self, rollout_id: int, indices: Sequence[int]) -> Batch:
        """That batch. Blocks for as long as the disk takes."""
        ages = self._journal.ages(indices)
        return batches.again(self.folder, rollout_id, ages, rows=self._rows, reward_key=self.maker.reward_key)

    def drop_batch(self, rollout_id: int) -> int:
        """Drops what an earlier attempt batched and never committed; how many trajectories. The rollout is made
        anew."""
        indices = self.recovery.replay.pop(rollout_id, ())
        self._journal.drop(indices, "drop_rollouts")
        return len(indices)

    # -- commits, and what a phase keeps -------------------------------------------------------------------------------

    def commit(self, steps: Iterable[Any], checkpoint: str) -> None:
        """The trajectories of ``steps`` (:class:`slime_cli.loop.saving.Step`) are TRAINED: the checkpoint is
        durable."""
        self._journal.commit(steps=[dataclasses.astuple(step) for step in steps], checkpoint=checkpoint)

    def commits(self) -> Sequence[Commit]:
        return self._journal.commits()

    def ledger(self) -> Ledger:
        return self._journal.ledger()

    def line(self, rollout_id: int, values: dict[str, Any]) -> None:
        """The metrics of a rollout, over what they were before."""
        self._journal.line(rollout_id, values)

    @property
    def state(self) -> PhaseState:
        get = self._journal.get
        finished = get("finished")
        if finished is True:  # as journals of an older slime say it
            commits = self.commits()
            finished = commits[-1].rollout_id + 1 if commits else 0
        return PhaseState(get("seconds", 0.0), finished or None, get("stopped"), get("saving"))

    def put_state(self, **values: float | int) -> None:
        """Fields of :class:`PhaseState`."""
        for name, value in values.items():
            self._journal.put(name, value)


def _sample(index: int, group: int, row: PromptRow, rendered: Any) -> Sample:
    return Sample(index=index, group_index=group, prompt=rendered.text, label=row.label, metadata=dict(row.metadata))


def _storable(sample: Sample) -> bool:
    """A reward that the generate function gave is judged only later."""
    return sample.reward is None or (isinstance(sample.reward, int | float | dict) and not unstorable(sample.reward))


def _last_if_none(deadline: int | None) -> int:
    return sys.maxsize if deadline is None else deadline
