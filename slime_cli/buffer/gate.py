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

import dataclasses
import sys
from collections.abc import Iterable, Sequence

Deadline = int | None
"""The last rollout that may train a group; None where there is no bound."""


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

    def may_deal(self, version: int, next_rollout: int, outstanding: Sequence[Deadline]) -> int:
        """How many more groups may be dealt at ``version``: each of ``outstanding`` and of these meets its deadline.

        ``sys.maxsize`` without a bound; 0 when the weights are too old for the next rollout already.
        """
        new = self.deadline(version)
        if new is None:
            return sys.maxsize
        later = {j for j in _bounded(outstanding) if j > new}
        return max(0, min(self._room(j, next_rollout, outstanding) for j in {new, *later}))

    def choose(
        self, finished: Sequence[tuple[Deadline, int]], in_flight: Sequence[Deadline], next_rollout: int
    ) -> list[int] | None:
        """Indices of the ``finished`` (deadline, index) groups that ``next_rollout`` trains: earliest deadline first,
        then by index. None: wait, because too few are finished, or because a group of ``in_flight`` would miss its
        deadline if these were taken without it."""
        if len(finished) < self.batch:
            return None
        order = sorted(finished, key=lambda group: (sys.maxsize if group[0] is None else group[0], group[1]))
        rest = [*in_flight, *(deadline for deadline, _ in order[self.batch :])]
        if not self.holds(rest, next_rollout + 1):
            return None
        return [index for _, index in order[: self.batch]]

    def holds(self, outstanding: Sequence[Deadline], next_rollout: int) -> bool:
        """Whether every outstanding group can still meet its deadline."""
        return all(self._room(j, next_rollout, outstanding) >= 0 for j in set(_bounded(outstanding)))

    def too_late(
        self, outstanding: Sequence[tuple[Deadline, int]], next_rollout: int, fixed: Sequence[Deadline] = ()
    ) -> list[int]:
        """Indices of those of ``outstanding`` (deadline, index) that must go so that the others meet their deadlines,
        beside ``fixed`` ones. Empty unless a resume has lowered ``max_staleness`` or ``batch``. As few as can be, the
        oldest of them."""
        if self.holds([*fixed, *(deadline for deadline, _ in outstanding)], next_rollout):
            return []
        kept: list[tuple[Deadline, int]] = []
        gone: list[int] = []
        for deadline, index in sorted(_with_bound(outstanding)):
            kept.append((deadline, index))
            if not self.holds([*fixed, *(d for d, _ in kept)], next_rollout):
                gone.append(kept.pop(0)[1])
        return gone

    def _room(self, j: int, next_rollout: int, outstanding: Sequence[Deadline]) -> int:
        """Places up to rollout ``j`` that no outstanding group needs; negative where there are too few."""
        places = max(0, j - next_rollout + 1) * self.batch
        return places - sum(deadline <= j for deadline in _bounded(outstanding))


def _bounded(deadlines: Iterable[Deadline]) -> list[int]:
    return [deadline for deadline in deadlines if deadline is not None]


def _with_bound(groups: Iterable[tuple[Deadline, int]]) -> list[tuple[int, int]]:
    return [(deadline, index) for deadline, index in groups if deadline is not None]
