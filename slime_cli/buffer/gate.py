"""The staleness gate: when groups may be dealt, and which finished ones a rollout takes. Pure; no I/O, no state.

Called by :class:`slime_cli.buffer.buffer.DataBuffer`, for every schedule. Everything is counted in rollouts:
``version`` is how many rollouts the engines' weights have been trained on, and a group that was dealt at version i may
be trained in rollout i + ``max_staleness`` at the latest: that is its deadline. A group is outstanding from when it is
dealt until a rollout takes it or it is dropped; one that was released with tokens, or came back after a kill, is
outstanding too. When such a one goes out again to weights older than its own (a kill has lost the newer ones), that is
dealing: it counts from the older ones.

Invariant, Hall's condition: for every rollout j from the next one on, at most ``(j - next_rollout + 1) * batch``
outstanding groups have a deadline of j or earlier. While it holds, there is a place in time for every outstanding
group, so no group is ever too old to be trained, and none has to be dropped for its age. :meth:`Gate.may_deal` keeps it
by dealing no more than fits, :meth:`Gate.choose` by taking the earliest deadlines first, and by waiting when a group
that is still being generated would otherwise miss its last place. ``tests/buffer/test_gate.py`` proves all of that over
small states.
"""

import collections
import dataclasses
import heapq
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

Deadline = int | None
"""The last rollout that may train a group; None where there is no bound."""
Counts = Mapping[int, int]
"""Deadline -> groups that have it. Groups without one are left out."""
NONE: Counts = {}


@dataclasses.dataclass(frozen=True)
class Gate:
    """``batch`` groups a rollout; a group is trained at most ``max_staleness`` rollouts after its weights."""

    batch: int
    """Groups a rollout."""
    max_staleness: int | None
    """In rollouts; None: no bound."""

    def deadline(self, version: int) -> Deadline:
        """The last rollout in which a group that was dealt at ``version`` may be trained."""
        return None if self.max_staleness is None else version + self.max_staleness

    def may_deal(self, version: int, next_rollout: int, outstanding: Counts) -> int:
        """How many more groups may be dealt at ``version``: each of ``outstanding`` and of these meets its deadline.

        ``sys.maxsize`` without a bound; 0 when the weights are too old for the next rollout already.
        """
        new = self.deadline(version)
        if new is None:
            return sys.maxsize
        return max(0, min(room for j, room in self._rooms(next_rollout, outstanding, [new]) if j >= new))

    def late(self, finished: Counts, others: Counts, next_rollout: int) -> Deadline:
        """The last deadline that some group would miss if ``next_rollout`` took the earliest of ``finished`` now, with
        ``others`` to come; None when each can be met."""
        left = collections.Counter(others)
        taken = self.batch
        for j in sorted(finished):
            left[j] += max(0, finished[j] - taken)
            taken = max(0, taken - finished[j])
        return max((j for j, room in self._rooms(next_rollout + 1, left) if room < 0), default=None)

    def choose(self, finished: Iterable[tuple[Deadline, int]], others: Counts, next_rollout: int) -> list[int] | None:
        """Indices of the ``finished`` (deadline, index) groups that ``next_rollout`` trains: earliest deadline first,
        then by index. None: wait, because too few are finished, or because one of ``others``, which are to come, would
        miss its deadline if these were taken without it."""
        finished = list(finished)
        if len(finished) < self.batch or self.late(counted(finished), others, next_rollout) is not None:
            return None
        order = heapq.nsmallest(self.batch, ((sys.maxsize if j is None else j, index) for j, index in finished))
        return [index for _, index in order]

    def holds(self, outstanding: Counts, next_rollout: int) -> bool:
        """Every outstanding group can still meet its deadline."""
        return all(room >= 0 for _, room in self._rooms(next_rollout, outstanding))

    def too_late(
        self, outstanding: Iterable[tuple[Deadline, int]], next_rollout: int, fixed: Counts = NONE
    ) -> list[int]:
        """Indices of those of ``outstanding`` (deadline, index) that must go so that the others meet their deadlines,
        beside ``fixed`` ones. Empty unless a resume has lowered ``max_staleness`` or ``batch``. As few as can be, the
        oldest of them."""
        kept: list[tuple[int, int]] = []
        counts = collections.Counter(fixed)
        gone: list[int] = []
        for deadline, index in sorted((j, index) for j, index in outstanding if j is not None):
            kept.append((deadline, index))
            counts[deadline] += 1
            if not self.holds(counts, next_rollout):
                oldest, index = kept.pop(0)
                counts[oldest] -= 1
                gone.append(index)
        return gone

    def _rooms(self, next_rollout: int, outstanding: Counts, also: Sequence[int] = ()) -> Iterator[tuple[int, int]]:
        """Each deadline of ``outstanding`` and ``also``, ascending, and the places up to that rollout which no
        outstanding group needs; negative where there are too few."""
        needed = 0
        for j in sorted({*outstanding, *also}):
            needed += outstanding.get(j, 0)
            yield j, max(0, j - next_rollout + 1) * self.batch - needed


def counted(groups: Iterable[tuple[Deadline, int]]) -> collections.Counter[int]:
    """How many of the (deadline, index) groups have each deadline."""
    return collections.Counter(deadline for deadline, _ in groups if deadline is not None)
