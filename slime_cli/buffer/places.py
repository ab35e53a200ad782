"""Where each open group of a phase is, and how old the groups of each place are.

:class:`slime_cli.buffer.buffer.DataBuffer` keeps it and moves the groups. Invariants: a group is in one place, and the
counts follow every move, so that a question about all groups costs as much as there are ages, however many groups are
open. A group counts with the age (``leased_at``) and the pending trajectories that it had when it was put there.
"""

import collections
import enum

from slime_cli.buffer.types import Group, Status

WHOLE = (Status.COMPLETED, Status.TRUNCATED)


class Place(enum.Enum):
    """The three places of a group that is open."""

    IN_FLIGHT = "in flight"
    WAITING = "waiting"
    """All of it is finished: a rollout can take it."""
    RETURNED = "returned"
    """To be dealt again, with what it has."""


class Places:
    """Every open group by its index."""

    def __init__(self) -> None:
        self.groups: dict[Place, dict[int, Group]] = {place: {} for place in Place}
        self._where: dict[int, tuple[Place, int | None, bool]] = {}
        self._ages: dict[tuple[Place, bool], collections.Counter[int]] = collections.defaultdict(collections.Counter)

    def put(self, group: Group, place: Place) -> None:
        """Moves the group there from wherever it is."""
        self.remove(group)
        where = place, group.leased_at, lacks_rewards_only(group)
        self._where[group.index] = where
        self.groups[place][group.index] = group
        if group.leased_at is not None:
            self._ages[place, where[2]][group.leased_at] += 1

    def remove(self, group: Group) -> None:
        """It is dropped, or in a batch."""
        if (where := self._where.pop(group.index, None)) is None:
            return
        place, leased_at, whole = where
        del self.groups[place][group.index]
        if leased_at is not None:
            ages = self._ages[place, whole]
            ages[leased_at] -= 1
            if not ages[leased_at]:
                del ages[leased_at]

    def ages(self, *places: Place) -> collections.Counter[int]:
        """``leased_at`` -> groups in these places. Those that have no age are left out."""
        found: collections.Counter[int] = collections.Counter()
        for (place, _), ages in self._ages.items():
            if place in places:
                found.update(ages)
        return found

    def no_older(self, version: int) -> int:
        """Returned groups that get no older when they go out at ``version``: as :func:`leased_at` says."""
        written = sum(n for age, n in self._ages[Place.RETURNED, False].items() if age <= version)
        return written + self._ages[Place.RETURNED, True].total()


def lacks_rewards_only(group: Group) -> bool:
    """No token is to be generated of it."""
    return all(sample.status in WHOLE for sample in group.pending)


def leased_at(group: Group, version: int) -> int:
    """The version that the group counts its age from when it goes out at ``version``. A kill may have lost the weights
    that wrote what it has: older ones that continue it make it older."""
    if group.leased_at is None:
        return version
    return group.leased_at if lacks_rewards_only(group) else min(group.leased_at, version)
