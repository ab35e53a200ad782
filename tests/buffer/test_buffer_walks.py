"""The Data Buffer through random histories with kills at every write, over the real journal and real batch files.

A walk plays the collector, the learner and the publisher in small: it leases what the buffer has room for, lets groups
generate, fail, be rejected or given back at random, takes and trains batches, commits now and then, and is killed
between any two writes of the journal; then everything but the run's folder is gone. Contracts:

1. no batch is trained above the bound on staleness, and nothing is dropped as ``stale`` while the bound stays;
2. tokens that the buffer was told of are there after a kill, as they were, unless their group was restarted;
3. the ledger balances at each moment, nothing is trained twice, and no row of the source is dealt twice in an epoch or
   passed over;
4. a group is in one place, and the journal agrees with it: in flight LEASED or GENERATED, else PENDING or REWARDED;
5. when everything in flight ends, the next rollout comes: the walk reaches its last rollout.
"""

import collections
import dataclasses
import pathlib
import random
import types
from collections.abc import Sequence

import pytest

from slime_cli.buffer.batch import Batch
from slime_cli.buffer.buffer import DataBuffer
from slime_cli.buffer.gate import Gate
from slime_cli.buffer.journal import Journal
from slime_cli.buffer.places import Place
from slime_cli.buffer.types import Fate, Group, PromptRow, Sample, Status, trajectories
from slime_cli.manifests.layout import version_name

ROWS = 7
STEPS = 2
"""Optimizer steps a rollout."""


class Killed(Exception):
    pass


class Mortal(Journal):
    """Dies before or after the write whose turn it is."""

    deaths: dict[int, str]
    writes = 0

    def _dying(self, method, *args, **kwargs):
        self.writes += 1
        when = self.deaths.get(self.writes)
        if when == "before":
            raise Killed
        found = method(*args, **kwargs)
        if when == "after":
            raise Killed
        return found


for _name in ("lease", "resume", "generated", "finish", "release", "restart", "drop", "batched", "commit"):

    def _mortal(self, *args, _name=_name, **kwargs):
        return self._dying(getattr(super(Mortal, self), _name), *args, **kwargs)

    setattr(Mortal, _name, _mortal)


class Rows(list):
    name = "rows.jsonl"


@dataclasses.dataclass
class Step:
    step: int
    rollout_id: int
    version: str
    samples: Sequence[int]


class Walk:
    """One run, over all its attempts."""

    def __init__(
        self, folder: pathlib.Path, seed: int, *, batch: int, size: int, staleness: int | None, buffer_class=DataBuffer
    ):
        self.buffer_class = buffer_class
        self.rng = random.Random(seed)
        self.folder = folder
        self.batch = batch
        self.size = size
        self.staleness = staleness
        self.told: dict[int, list[Sample]] = {}
        """Trajectory -> what the buffer was last told of it, and must not lose."""
        self.taken: collections.Counter[int] = collections.Counter()
        self.kills = 0
        self.lowered = False
        """The bound on staleness, by a resume."""
        self.ended = True
        self.committed = 0
        self.journal: Mortal | None = None

    def begin(self) -> None:
        """An attempt, that may have a rollout to drop."""
        self.start()
        self.ended = False
        self.journal.deaths = {self.rng.randint(1, 25): self.rng.choice(("before", "after"))}
        if self.buffer.recovery.replay and self.rng.random() < 0.3:
            self.buffer.drop_batch(self.rng.choice([*self.buffer.recovery.replay]))

    def start(self) -> None:
        """After whatever the last attempt came to."""
        if self.journal is not None:
            self.journal.close()
        self.journal = Mortal(self.folder / "journal.sqlite")
        self.journal.deaths = {}
        rows = Rows(PromptRow(f"p{i}", None, {}, "rows.jsonl", i + 1) for i in range(ROWS))
        self.buffer = self.buffer_class(
            self.journal,
            rows,
            folder=self.folder,
            samples_per_prompt=self.size,
            shuffle=True,
            seed=0,
            render=lambda row: types.SimpleNamespace(text=row.prompt, tokens=[1]),
            gate=Gate(self.batch, self.staleness),
            steps_per_rollout=STEPS,
        )
        found = self.buffer.recovery.committed
        self.trained = self.version = self.committed = found.rollout_id + 1 if found else 0
        self.next = self.trained
        self.ready: list[Batch] = []
        """Taken and not trained: at most one, as one step off has it."""
        self.done: list[Batch] = []
        """Trained and not committed."""
        self.flying: list[Group] = []
        self.check_nothing_lost()

    # -- what a collector does -----------------------------------------------------------------------------------------

    def lease(self) -> None:
        room = min(self.buffer.room(self.version), 3 - len(self.flying))
        if room > 0:
            self.flying += self.buffer.lease(self.rng.randint(1, room), version=self.version)

    def write(self, sample: Sample, *, end: bool) -> Sample:
        """More tokens of the version that the engines have now."""
        made = dataclasses.replace(sample, tokens=sample.tokens or [1])
        if made.status not in (Status.COMPLETED, Status.TRUNCATED):
            made.append([2], log_probs=[-0.5], version=version_name(self.version * STEPS), trained=True)
            made.status = Status.COMPLETED if end else Status.ABORTED
        return made

    def whole(self, group: Group) -> list[Sample]:
        """Every pending trajectory with its end; some fan out."""
        found = []
        for sample in group.pending:
            if sample.index in group.partial:
                found += group.partial[sample.index]
                continue
            made = self.write(sample, end=True)
            fans_out = sample.status is Status.PENDING and self.rng.random() < 0.3
            found += [dataclasses.replace(made, part=part) for part in range(2 if fans_out else 1)]
        return found

    def tell(self, samples: list[Sample]) -> None:
        self.told |= trajectories(samples)

    def generate(self, group: Group) -> None:
        if any(self.journal.record(s.index).fate is Fate.GENERATED for s in group.pending):
            return
        made = self.whole(group)
        self.buffer.generated(group, made)
        self.tell(made)

    def finish(self, group: Group) -> None:
        self.flying.remove(group)
        made = [dataclasses.replace(s, reward=1.0) for s in self.whole(group)]
        failed = {i: "failed" for i in trajectories(made) if self.rng.random() < 0.1}
        made = [s for s in made if s.index not in failed]
        self.buffer.finish(group, made, failed)
        self.tell(made)
        if group.finished and self.rng.random() < 0.15:
            self.buffer.reject(group, "filter")
        elif group.finished:
            self.buffer.accept(group)

    def give_back(self, group: Group) -> None:
        self.flying.remove(group)
        keep = self.rng.random() < 0.6
        if not keep:
            for sample in group.pending:
                self.told.pop(sample.index, None)
        started = [self.write(s, end=False) if self.rng.random() < 0.5 else s for s in group.pending]
        group.pending = started if not group.partial else group.pending
        kept = [x for s in group.pending if s.response_length for x in group.partial.get(s.index, [s])]
        self.buffer.release(group, keep=keep)
        if keep:
            self.tell(kept)

    # -- what the learner, the publisher and a commit do ---------------------------------------------------------------

    def take(self) -> None:
        if self.ready:
            return
        if (indices := self.buffer.made_before(self.next)) is not None:
            made = self.buffer.replay(self.next, indices)
        else:
            chosen = self.buffer.choose(self.next)
            if chosen is None:
                return
            assert len(chosen.groups) == self.batch
            made = self.buffer.make(chosen)
        self.next += 1
        self.ready = [made]

    def train(self) -> None:
        for batch in self.ready:
            ages = batch.staleness(self.trained * STEPS, STEPS)
            free = self.staleness is None or (self.lowered and batch.replayed)  # a batch on disk is as it is
            assert free or ages.max() <= self.staleness, f"trained {ages.max()} rollouts late"
            self.trained += 1
            self.done.append(batch)
        self.ready = []

    def publish(self) -> None:
        self.version = self.trained

    def commit(self) -> None:
        steps = []
        for batch in self.done:
            indices = [*trajectories(batch.samples)]
            for i in range(STEPS):
                name = version_name(batch.rollout_id * STEPS + i + 1)
                steps.append(Step(batch.rollout_id * STEPS + i + 1, batch.rollout_id, name, indices[i::STEPS]))
        if steps:
            self.buffer.commit(steps, f"c{self.done[-1].rollout_id}")
            self.committed = self.trained
        self.done = []

    # -- what must hold ------------------------------------------------------------------------------------------------

    def check(self) -> None:
        ledger = self.journal.ledger()
        assert ledger.balanced, ledger
        assert self.lowered or "stale" not in ledger.dropped
        flying = {s.index: g for g in self.flying for s in g.pending}
        for index in range(ledger.dispatched):
            record = self.journal.record(index)
            assert (record.fate in (Fate.LEASED, Fate.GENERATED)) == (index in flying), f"{index} is {record.fate}"

    def check_nothing_lost(self) -> None:
        """After a kill: what the journal said to the new attempt is what the last one told the buffer."""
        ledger = self.journal.ledger()
        assert ledger.balanced, ledger
        found = {g.group_index: g for g in self.buffer.recovery.groups}
        open_samples = trajectories(s for g in found.values() for s in g.finished)
        open_samples |= {i: siblings for g in found.values() for i, siblings in g.partial.items()}
        for index, told in self.told.items():
            record = self.journal.record(index)
            assert record is not None
            if record.fate in (Fate.PENDING, Fate.REWARDED):
                assert told_or_more(told, open_samples.get(index)), f"trajectory {index} lost tokens"

    def check_rows(self) -> None:
        """Row after row, in the order of each epoch."""
        dealt = [self.journal.record(i).prompt.row for i in range(0, self.journal.ledger().dispatched, self.size)]
        for first in range(0, len(dealt), ROWS):
            epoch = dealt[first : first + ROWS]
            assert len({*epoch}) == len(epoch), f"a row twice in an epoch: {epoch}"

    # -- the walk ------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        some = self.rng.choice(self.flying) if self.flying else None
        self.rng.choice(
            [
                self.lease,
                lambda: some and self.generate(some),
                lambda: some and self.finish(some),
                lambda: some and self.finish(some),
                lambda: some and self.rng.random() < 0.5 and self.give_back(some),
                self.take,
                self.train,
                self.publish,
                lambda: self.rng.random() < 0.3 and self.commit(),
            ]
        )()

    def to_the_end(self) -> None:
        """Everything that can happen happens once in each round, without kills: contract 5."""
        last = self.next + 4
        for _ in range(400):
            if self.next >= last:
                return
            for action in (self.take, self.train, self.publish, self.lease):
                action()
            for group in [*self.flying]:
                self.finish(group)
            self.check()
        raise AssertionError(f"no progress: rollout {self.next} of {last}")


def told_or_more(told: list[Sample], found: list[Sample] | None) -> bool:
    """A write that a kill followed at once may be there, though nobody was told."""
    if found is None or len(found) < len(told):
        return False
    return all(f.tokens[: len(t.tokens)] == t.tokens for t, f in zip(told, found, strict=False))


def history(folder: pathlib.Path, seed: int, **world) -> Walk:
    """A run with kills, and then to its end without."""
    walk = Walk(folder, seed, **world)
    some_attempts(walk)
    last_attempt(walk)
    return walk


def some_attempts(walk: Walk) -> None:
    for _ in range(150):
        try:
            walk.begin() if walk.ended else walk.step()
            walk.check()
        except Killed:
            walk.kills += 1
            walk.ended = True


def last_attempt(walk: Walk) -> None:
    walk.start()
    walk.to_the_end()
    walk.check_rows()
    walk.journal.close()


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("batch", "size", "staleness"), [(1, 2, 0), (2, 1, 1), (2, 2, 2), (1, 1, 3), (2, 2, None)])
def test_nothing_is_lost_late_or_twice(tmp_path, seed, batch, size, staleness):
    history(tmp_path, seed, batch=batch, size=size, staleness=staleness)


def test_the_walks_are_killed_and_get_somewhere(tmp_path):
    walks = [history(tmp_path / str(seed), seed, batch=2, size=2, staleness=1) for seed in range(4)]
    assert sum(walk.kills for walk in walks) >= 8
    assert max(walk.next for walk in walks) > 5


def test_a_resume_that_lowers_the_bound_drops_what_is_too_old_and_goes_on(tmp_path):
    stale = 0
    for seed in range(6):
        walk = Walk(tmp_path / str(seed), seed, batch=2, size=1, staleness=3)
        some_attempts(walk)
        walk.lowered = True
        walk.staleness = 0
        last_attempt(walk)
        with Journal(walk.folder / "journal.sqlite") as journal:
            stale += journal.ledger().dropped.get("stale", 0)
    assert stale, "nothing was too old: the test tested nothing"


# -- broken buffers ------------------------------------------------------------------------------------------------


class ForgetsWhatIsOnDisk(DataBuffer):
    """Deals into rollouts that have their batches."""

    def _on_disk(self):
        return collections.Counter()


class ForgetsToSay(DataBuffer):
    """Keeps what was generated in memory only."""

    def generated(self, group, samples):
        made = trajectories(samples)
        group.pending = [made[s.index][0] if s.index in made else s for s in group.pending]


class ReleasesFromScratch(DataBuffer):
    """A partial group begins anew, though it was to be kept."""

    def release(self, group, *, keep):
        super().release(group, keep=False)


class AlwaysHasRoom(DataBuffer):
    """Leases without asking the gate."""

    def room(self, version):
        return 3


class AsNew(DataBuffer):
    """Counts a group's age anew each time that it goes out."""

    def lease(self, count, *, version):
        for group in [*self._places.groups[Place.RETURNED].values()]:
            group.leased_at = None
            self._places.put(group, Place.RETURNED)
        return super().lease(count, version=version)


class TakesTwice(DataBuffer):
    """Leaves a group that was taken among those that wait."""

    def choose(self, rollout_id):
        chosen = super().choose(rollout_id)
        if chosen is not None:
            self._places.put(chosen.groups[0], Place.WAITING)
        return chosen


BROKEN = [ForgetsWhatIsOnDisk, ForgetsToSay, ReleasesFromScratch, AlwaysHasRoom, AsNew, TakesTwice]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_the_walks_catch(tmp_path, broken):
    caught = 0
    for seed in range(60):
        try:
            history(tmp_path / str(seed), seed, batch=1, size=2, staleness=1, buffer_class=broken)
        except (AssertionError, ValueError):
            caught += 1
            break
    assert caught
