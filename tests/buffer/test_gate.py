"""The staleness gate, proven over every small state: a model checker walks all interleavings of what can happen to
groups.

The model knows nothing of deadlines: a group is the rollout-count of the weights it was dealt at, and whether it is
still in flight. Everything is relative to the next rollout, so that the states are finite: an ``age`` is next rollout -
version. What it checks in each state, with feasibility found by trying places instead of by the gate's formula:

1. no rollout takes a group older than ``max_staleness``;
2. a rollout takes ``batch`` groups, and the oldest of the finished ones, the first dealt among equals;
3. what is outstanding can always be placed (checked after each action, a kill included);
4. no deadlock: when everything in flight is finished, a rollout or a deal is possible, or newer weights are to come;
5. not needlessly strict: the gate waits only where every choice would leave a group without a place, and deals as many
   as can be placed; one straggler delays nobody before its own last rollout; an age of ``max_staleness`` is reached.

Broken gates, and broken uses of it, are each caught by one of these.
"""

import itertools
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest

from slime_cli.buffer.gate import Gate

NEXT = 10
"""What the next rollout is called when the gate is asked."""


class State(NamedTuple):
    lag: int
    """next rollout - rollouts that the engines' weights have been trained on."""
    finished: tuple[int, ...]
    """Ages, ascending."""
    in_flight: tuple[int, ...]
    released: tuple[int, ...]
    """With tokens, waiting to be dealt again. To the gate they are as groups in flight."""
    replays: tuple[int, ...]
    """Rollouts from the next one on that are on disk already, so that they take nothing."""


def places(ages: Sequence[int], staleness: int, batch: int, replays: Sequence[int], first: int) -> bool:
    """Whether each group finds a rollout from ``first`` on, within its age: by trying, oldest first into the first one
    that has room."""
    room: dict[int, int] = {}
    for age in sorted(ages, reverse=True):
        last = staleness - age
        free = [j for j in range(first, last + 1) if j not in replays and room.get(j, 0) < batch]
        if not free:
            return False
        room[free[0]] = room.get(free[0], 0) + 1
    return True


class Model:
    """The world around a gate. Subclasses use it wrongly."""

    gate_class = Gate

    def __init__(self, batch: int, staleness: int, groups: int, *, releases: bool = False):
        """At most ``groups`` are outstanding at once. With ``releases`` they are also given back, and wait to be dealt
        again."""
        self.gate = self.gate_class(batch, staleness)
        self.groups = groups
        self.releases = releases
        self.batch = batch
        self.staleness = staleness
        self.reached = 0

    # -- how the gate is asked: as DataBuffer does -----------------------------------------------------------------

    def outstanding(self, state: State) -> list[int]:
        return [self.gate.deadline(NEXT - age) for age in (*state.finished, *state.in_flight, *state.released)]

    def replayed(self, state: State) -> list[int]:
        """A rollout on disk has its groups already: as if that many were outstanding and due in it."""
        return [NEXT + j for j in state.replays for _ in range(self.batch)]

    def may_deal(self, state: State) -> int:
        return self.gate.may_deal(NEXT - state.lag, NEXT, Counter([*self.outstanding(state), *self.replayed(state)]))

    def choose(self, state: State) -> list[int] | None:
        finished = [(self.gate.deadline(NEXT - age), i) for i, age in enumerate(state.finished)]
        waiting = [self.gate.deadline(NEXT - age) for age in (*state.in_flight, *state.released)]
        return self.gate.choose(finished, Counter([*waiting, *self.replayed(state)]), NEXT)

    def may_continue(self, age: int, state: State) -> bool:
        """Weights that are older than its own, as a kill leaves them, make a group older: it needs a place anew."""
        return age >= state.lag or self.may_deal(state) > 0

    # -- what can happen -------------------------------------------------------------------------------------------

    def actions(self, state: State) -> Iterator[State]:
        count = len(state.finished) + len(state.in_flight) + len(state.released)
        if count < self.groups and self.may_deal(state) > 0:
            yield state._replace(in_flight=ordered(*state.in_flight, state.lag))
        for age in {*state.in_flight}:
            rest = without(state.in_flight, age)
            yield state._replace(in_flight=rest, finished=ordered(*state.finished, age))
            yield state._replace(in_flight=rest)  # dropped: it failed
            if self.releases:
                yield state._replace(in_flight=rest, released=ordered(*state.released, age))
        for age in {*state.finished}:
            yield state._replace(finished=without(state.finished, age))  # dropped by a filter
        for age in {*state.released}:
            if self.may_continue(age, state):
                out = ordered(*state.in_flight, max(age, state.lag))
                yield state._replace(released=without(state.released, age), in_flight=out)
        for lag in range(state.lag):
            yield state._replace(lag=lag)  # newer weights, of any rollout up to the last one
        if 0 in state.replays:
            yield self.advanced(state)
        elif (chosen := self.choose(state)) is not None:
            yield self.advanced(self.taken(state, chosen))
        yield from self.kills(state)

    def kills(self, state: State) -> Iterator[State]:
        """The attempt ends, and the next one starts behind up to two rollouts that are on disk (or before one of them,
        which was dropped). The engines get the weights of the last commit, or older ones. Groups in flight that lose
        their tokens are gone before it, one by one; the others wait to be dealt again."""
        if state.replays or min((*state.finished, *state.in_flight, *state.released), default=0) < 0:
            return  # one kill is caught up with before the next
        for back, dropped in ((0, 0), (1, 0), (2, 0), (1, 1), (2, 1)):
            finished, in_flight, released = [tuple(age - back for age in ages) for ages in state[1:4]]
            for lag in range(max(0, state.lag - back), self.staleness + 1):
                yield State(lag, finished, (), ordered(*in_flight, *released), tuple(range(dropped, back)))

    def taken(self, state: State, chosen: list[int]) -> State:
        ages = [state.finished[i] for i in chosen]
        assert max(ages) <= self.staleness, f"trained {max(ages)} rollouts after its weights"
        assert len(chosen) == len({*chosen}) == self.batch, f"took {len(chosen)}"
        assert chosen == sorted(range(len(state.finished)), key=lambda i: (-state.finished[i], i))[: self.batch], (
            "not the oldest"
        )
        self.reached = max(self.reached, *ages)
        return state._replace(finished=tuple(age for i, age in enumerate(state.finished) if i not in chosen))

    def advanced(self, state: State) -> State:
        """The next rollout has its batch, so that the one after it is the next."""
        older = [tuple(age + 1 for age in ages) for ages in (state.finished, state.in_flight, state.released)]
        return State(state.lag + 1, *older, tuple(j - 1 for j in state.replays if j))

    # -- what must hold --------------------------------------------------------------------------------------------

    def fits(self, ages: Sequence[int], state: State, first: int = 0) -> bool:
        return places(ages, self.staleness, self.batch, state.replays, first)

    def check(self, state: State) -> None:
        everything = (*state.finished, *state.in_flight, *state.released)
        assert self.fits(everything, state), "a group has no place any more"
        self.check_strictness(state, everything)
        if state.lag > self.staleness:
            return  # nothing can be dealt, but newer weights are to come: all before the next rollout was trained
        at_rest = state._replace(finished=ordered(*state.finished, *state.in_flight), in_flight=())
        continued = any(self.may_continue(age, at_rest) for age in state.released)
        taken = 0 in state.replays or self.choose(at_rest) is not None
        # Weights that a group has seen before a kill come again, as the rollouts before them have been trained again.
        known_to_come = any(0 <= age < state.lag for age in everything)
        assert taken or continued or known_to_come or self.may_deal(at_rest) > 0, "deadlock"

    def check_strictness(self, state: State, everything: Sequence[int]) -> None:
        allowed = self.may_deal(state)
        assert self.fits([*everything, *[state.lag] * allowed], state), "dealt more than can be placed"
        assert not self.fits([*everything, *[state.lag] * (allowed + 1)], state), "dealt fewer than can be placed"
        if 0 in state.replays:
            return
        waiting = (*state.in_flight, *state.released)
        if self.choose(state) is None and len(state.finished) >= self.batch:
            for chosen in itertools.combinations(range(len(state.finished)), self.batch):
                rest = [age for i, age in enumerate(state.finished) if i not in chosen]
                assert not self.fits([*rest, *waiting], state, first=1), "waits without need"
            lone = len(waiting) == 1 and not state.replays
            assert not lone or waiting[0] == self.staleness, "a straggler delays others too early"


def ordered(*ages: int) -> tuple[int, ...]:
    return tuple(sorted(ages))


def without(ages: tuple[int, ...], age: int) -> tuple[int, ...]:
    at = ages.index(age)
    return ages[:at] + ages[at + 1 :]


def walk(model: Model) -> int:
    """Visits and checks every state that can be reached; how many there are."""
    seen = {State(0, (), (), (), ())}
    todo = [*seen]
    while todo:
        state = todo.pop()
        model.check(state)
        for after in model.actions(state):
            if after not in seen:
                seen.add(after)
                todo.append(after)
    return len(seen)


@pytest.mark.parametrize(
    ("batch", "staleness", "groups"),
    [
        *[(batch, staleness, 6) for batch in (1, 2, 3) for staleness in (0, 1, 2)],
        *[(batch, 3, 5) for batch in (1, 2, 3)],
        *[pytest.param(batch, 3, 6, marks=pytest.mark.slow) for batch in (1, 2, 3)],
    ],
)
def test_every_state_keeps_the_bound_and_makes_progress(batch, staleness, groups):
    model = Model(batch, staleness, groups)
    assert walk(model) > 30
    assert model.reached == staleness


@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("batch", [1, 2])
def test_groups_that_were_given_back_count_too(batch, staleness):
    model = Model(batch, staleness, 4, releases=True)
    assert walk(model) > 30
    assert model.reached == staleness


# -- broken gates, and gates asked wrongly -------------------------------------------------------------------------


class OneTooMany(Gate):
    """Deals one group more than there are places."""

    def may_deal(self, version, next_rollout, outstanding):
        return super().may_deal(version, next_rollout, outstanding) + 1


class OneTooFew(Gate):
    """Counts the places before the next rollout, without its own."""

    def may_deal(self, version, next_rollout, outstanding):
        return super().may_deal(version, next_rollout + 1, outstanding)


class LooksAtItsOwnDeadlineOnly(Gate):
    """Deals without regard to groups with later deadlines: those of before a kill, when weights were newer."""

    def may_deal(self, version, next_rollout, outstanding):
        new = self.deadline(version)
        return super().may_deal(
            version, next_rollout, {deadline: n for deadline, n in outstanding.items() if deadline <= new}
        )


class OneRolloutTooOld(Gate):
    """Takes a group for younger than it is."""

    def deadline(self, version):
        return super().deadline(version) + 1


class WaitsForNobody(Gate):
    """Forgets in ``choose`` what is still in flight."""

    def choose(self, finished, in_flight, next_rollout):
        return super().choose(finished, {}, next_rollout)


class ABarrier(Gate):
    """Waits for everything in flight, as a rollout of its own did."""

    def choose(self, finished, in_flight, next_rollout):
        return None if in_flight else super().choose(finished, in_flight, next_rollout)


class WaitsForTheOldest(Gate):
    """Deals in order: takes no group while an older one is in flight."""

    def choose(self, finished, in_flight, next_rollout):
        chosen = super().choose(finished, in_flight, next_rollout)
        ages = {index: deadline for deadline, index in finished}
        return None if chosen and any(d < ages[chosen[0]] for d in in_flight) else chosen


class NewestFirst(Gate):
    """Takes the freshest groups, as a stack would."""

    def choose(self, finished, in_flight, next_rollout):
        order = sorted(finished, reverse=True)
        return [index for _, index in order[: self.batch]] if len(order) >= self.batch else None


class InOrderOfFinishing(Gate):
    """A queue: takes what was finished first, whatever its deadline. (The model lists the oldest first, so turn it.)"""

    def choose(self, finished, in_flight, next_rollout):
        chosen = super().choose(finished, in_flight, next_rollout)
        return chosen and [index for _, index in finished[-self.batch :]]


class TakesWhatIsThere(Gate):
    """Does not wait until a batch is full."""

    def choose(self, finished, in_flight, next_rollout):
        return super().choose(finished, in_flight, next_rollout) or [index for _, index in finished] or None


class IgnoresTheNextRollout(Gate):
    """Waits only for groups that are due now, not for more of them than later rollouts have places."""

    def choose(self, finished, in_flight, next_rollout):
        return super().choose(finished, {d: n for d, n in in_flight.items() if d <= next_rollout}, next_rollout)


class CountsFromTheFinish(Model):
    """A group's age begins when it is finished, not when its first token is written."""

    def choose(self, state: State) -> list[int] | None:
        finished = [(self.gate.deadline(NEXT - state.lag), i) for i in range(len(state.finished))]
        waiting = [self.gate.deadline(NEXT - state.lag) for _ in (*state.in_flight, *state.released)]
        return self.gate.choose(finished, Counter(waiting), NEXT)


class ForgetsWhatIsFinished(Model):
    """Deals against what is in flight only: finished groups pile up."""

    def outstanding(self, state: State) -> list[int]:
        return [self.gate.deadline(NEXT - age) for age in state.in_flight]


class ForgetsWhatWasReleased(Model):
    """Groups that were given back, and wait to be dealt again, count for nothing."""

    def outstanding(self, state: State) -> list[int]:
        return [self.gate.deadline(NEXT - age) for age in (*state.finished, *state.in_flight)]


class ContinuesAsItWas(Model):
    """A group that was given back goes out again whatever the weights are that it is continued with."""

    def may_continue(self, age: int, state: State) -> bool:
        return True


class ForgetsWhatIsOnDisk(Model):
    """Deals into rollouts that a kill left on disk."""

    def replayed(self, state: State) -> list[int]:
        return []


GATES = [
    OneTooMany,
    OneTooFew,
    LooksAtItsOwnDeadlineOnly,
    OneRolloutTooOld,
    WaitsForNobody,
    ABarrier,
    WaitsForTheOldest,
    NewestFirst,
    InOrderOfFinishing,
    TakesWhatIsThere,
    IgnoresTheNextRollout,
]
USES = [CountsFromTheFinish, ForgetsWhatIsFinished, ForgetsWhatWasReleased, ContinuesAsItWas, ForgetsWhatIsOnDisk]


@pytest.mark.parametrize("broken", [*GATES, *USES], ids=lambda broken: broken.__name__)
def test_the_checker_catches(broken):
    model = broken if issubclass(broken, Model) else type("Broken", (Model,), {"gate_class": broken})
    with pytest.raises(AssertionError):
        walk(model(2, 2, 6, releases=broken is ForgetsWhatWasReleased))


# -- by hand -------------------------------------------------------------------------------------------------------


def test_without_a_bound_everything_may_be_dealt_and_a_rollout_takes_the_first_dealt():
    gate = Gate(2, None)
    assert gate.deadline(7) is None
    assert gate.may_deal(7, 900, {}) == sys.maxsize
    assert gate.choose([(None, 5), (None, 1), (None, 3)], {}, 900) == [1, 3]
    assert gate.choose([(None, 5)], {}, 900) is None
    assert gate.too_late([(None, 5), (None, 1)], 900) == []


def test_weights_that_are_too_old_for_the_next_rollout_deal_nothing():
    assert Gate(4, 1).may_deal(version=0, next_rollout=2, outstanding={}) == 0
    assert Gate(4, 1).may_deal(version=0, next_rollout=1, outstanding={}) == 4


def test_the_oldest_go_when_a_lowered_bound_leaves_too_few_places():
    gate = Gate(2, 1)
    assert gate.too_late([(4, 0), (5, 1), (5, 2), (5, 3), (6, 4), (6, 5)], next_rollout=5) == [0, 1]
    assert gate.too_late([(5, 1), (5, 2), (6, 4), (6, 5)], next_rollout=5) == []
    assert gate.too_late([(5, 1), (5, 2), (6, 4)], next_rollout=5, fixed={6: 2}) == [1]
