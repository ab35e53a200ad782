"""The journal's transitions, exhaustively: every operation on every subset of a small world, in every state it can
reach.

The world is one group of two trajectories, with at most three commits and one rollback. What must hold is written down
here a second time, by hand (``MOVES``, :func:`after`), and each edge is walked in the real journal: in memory, restored
from a snapshot of the state before. Contracts:

1. an operation does what ``after`` says to fates, payloads and commits, or is refused, names a trajectory, and changes
   no byte of what the journal says;
2. the ledger balances in every state; no trajectory is trained twice among the commits that stand;
3. a kill (recover) at any moment loses nothing that was generated, and hands everything out again: what is unfinished
   as pending, rewarded as finished, batched to be trained again;
4. a payload is there as long as it is needed, and no longer;
5. from every state, each trajectory can still come to an end: TRAINED or DROPPED.

Broken journals are each caught by one of these.
"""

import itertools
import sqlite3
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from slime_cli.buffer import journal as journals
from slime_cli.buffer.journal import Journal
from slime_cli.buffer.records import samples_of
from slime_cli.buffer.types import Fate, PromptRow, Sample, Status

ROW = PromptRow("p", None, {}, "d.jsonl", 1)
ALL = (0, 1)
SUBSETS = ((0,), (1,), (0, 1))
COMMITS = 3

MOVES = {
    "resume": ({"PENDING"}, "LEASED"),
    "generated": ({"LEASED"}, "GENERATED"),
    "release": ({"LEASED", "GENERATED"}, "PENDING"),
    "restart": ({"LEASED", "GENERATED"}, "PENDING"),
    "finish": ({"LEASED", "GENERATED"}, "REWARDED"),
    "drop": ({"PENDING", "LEASED", "GENERATED", "REWARDED", "BATCHED"}, "DROPPED"),
    "batched": ({"REWARDED"}, "BATCHED"),
    "commit": ({"BATCHED"}, "TRAINED"),
}
"""Operation -> the fates that it may begin in, and the one that it leads to."""
GIVES = {"generated": "whole", "release": "part", "finish": "rewarded"}
"""What the operation keeps of a trajectory."""
FORGETS = {"restart", "drop", "batched"}


class One(NamedTuple):
    """A trajectory as a reader sees it."""

    fate: str
    kept: str | None
    """``part`` of a generation, a ``whole`` one, a ``rewarded`` one."""
    step: int | None


class World(NamedTuple):
    trajectories: tuple[One, ...]
    commits: tuple[tuple[int, tuple[int, ...]], ...]
    """(step, indices) of those that stand."""
    made: int
    """Commits, with those that a rollback undid."""
    undone: int
    """Rollbacks."""


class Op(NamedTuple):
    name: str
    indices: tuple[int, ...] = ()


NOTHING = World((), (), 0, 0)


def operations(world: World) -> Iterator[Op]:
    yield Op("lease")
    yield Op("recover")
    for name, some in itertools.product(MOVES, SUBSETS):
        if name != "commit" or world.made < COMMITS:
            yield Op(name, some)
    if world.undone < 1:
        yield Op("roll_back")  # the last commit
        yield Op("roll_back_lost")  # of which the batches are gone, too


def after(world: World, op: Op) -> World | None:
    """What must come of it; None: it must be refused."""
    if op.name == "lease":
        return None if world.trajectories else world._replace(trajectories=(One("LEASED", None, None),) * 2)
    if op.name == "recover":
        back = [t._replace(fate="PENDING") if t.fate in ("LEASED", "GENERATED") else t for t in world.trajectories]
        return world._replace(trajectories=tuple(back))
    if op.name.startswith("roll_back"):
        return rolled_back(world, lost=op.name.endswith("lost"))
    begins, fate = MOVES[op.name]
    found = list(world.trajectories)
    for i in op.indices:
        if not found or found[i].fate not in begins:
            return None
        kept = None if op.name in FORGETS else GIVES.get(op.name, found[i].kept)
        found[i] = One(fate, kept, world.made + 1 if op.name == "commit" else None)
    commits = ((world.made + 1, op.indices),) if op.name == "commit" else ()
    return world._replace(trajectories=tuple(found), commits=world.commits + commits, made=world.made + bool(commits))


def rolled_back(world: World, lost: bool) -> World | None:
    if not world.commits:
        return None
    *stand, (step, _) = world.commits
    again = One("DROPPED" if lost else "BATCHED", None, None)
    found = [again if t.step == step or (lost and t.fate == "BATCHED") else t for t in world.trajectories]
    return World(tuple(found), tuple(stand), world.made, world.undone + 1)


# -- the real journal ----------------------------------------------------------------------------------------------


def sample(index: int, kept: str) -> Sample:
    made = Sample(index, 0, "p", [1], status=Status.ABORTED if kept == "part" else Status.COMPLETED)
    made.append([2], log_probs=[-0.5], version="v000000", trained=True)
    made.reward = 1.0 if kept == "rewarded" else None
    return made


def kind(made: Sample) -> str:
    return "rewarded" if made.reward is not None else "part" if made.status is Status.ABORTED else "whole"


class Recorder:
    """A journal whose file is in memory, so that a state can be kept and restored."""

    def __init__(self, path, journal_class: type[Journal]):
        self.journal = journal_class(path)
        file, self.journal._db = self.journal._db, sqlite3.connect(":memory:", isolation_level=None)
        file.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        file.execute("PRAGMA journal_mode=DELETE")
        file.backup(self.journal._db)
        file.close()

    def save(self) -> bytes:
        return self.journal._db.serialize()

    def restore(self, saved: bytes) -> None:
        self.journal._db.deserialize(saved)

    def said(self) -> list[str]:
        """All that is in it, text for text."""
        return list(self.journal._db.iterdump())

    def do(self, op: Op, world: World) -> Any:
        j = self.journal
        step = world.made + 1
        calls = {
            "lease": lambda: j.lease([(0, ROW, 0, ALL)], {"position": 1}, 0, version=0),
            "recover": j.recover,
            "resume": lambda: j.resume(op.indices, 0, version=0),
            "restart": lambda: j.restart(op.indices),
            "drop": lambda: j.drop(op.indices, "why"),
            "batched": lambda: j.batched(op.indices, 0),
            "commit": lambda: j.commit(steps=[(step, 0, f"v{step:06d}", op.indices)], checkpoint=f"c{step}"),
            "roll_back": lambda: j.roll_back(last_but_one(world), "lost"),
            "roll_back_lost": lambda: j.roll_back(last_but_one(world), "lost", [0]),
        }
        if op.name in GIVES:
            return getattr(j, op.name)([sample(i, GIVES[op.name]) for i in op.indices])
        return calls[op.name]()

    def seen(self) -> World:
        db = self.journal._db
        rows = db.execute("SELECT fate, payload, step FROM samples ORDER BY sample_index").fetchall()
        found = [One(f, p and kind(samples_of(p)[0]), step) for f, p, step in rows]
        trained = db.execute("SELECT step, sample_index FROM standing_trained ORDER BY 1, 2").fetchall()
        commits = [c.step for c in self.journal.commits()]
        return World(
            tuple(found),
            tuple((step, tuple(i for s, i in trained if s == step)) for step in commits),
            db.execute("SELECT COUNT(*) FROM commits").fetchone()[0],
            db.execute("SELECT COUNT(*) FROM rollbacks").fetchone()[0],
        )


def last_but_one(world: World) -> int:
    return world.commits[-2][0] if len(world.commits) > 1 else 0


def check_state(recorder: Recorder, world: World) -> None:
    """Contracts 2 and 4."""
    ledger = recorder.journal.ledger()
    assert ledger.balanced and ledger.trained_twice == 0, f"{world}: {ledger}"
    assert ledger.dispatched == len(world.trajectories)
    for one in world.trajectories:
        needed = {"REWARDED": {"rewarded"}, "GENERATED": {"whole"}, "PENDING": {None, "part", "whole"}}
        gone = {"BATCHED": {None}, "TRAINED": {None}, "DROPPED": {None}, "LEASED": {None, "part", "whole"}}
        assert one.kept in (needed | gone)[one.fate], f"{world} keeps {one.kept}"


def check_recovery(found: Any, world: World) -> None:
    """Contract 3: what the next attempt is told of."""
    pending = {i for g in found.groups for i in g.pending}
    finished = {s.index for g in found.groups for s in g.finished}
    partial = {i: kind(siblings[0]) for g in found.groups for i, siblings in g.partial.items()}
    replayed = {i for indices in found.replay.values() for i in indices}
    unfinished = {"PENDING", "LEASED", "GENERATED"}
    assert pending == {i for i, t in enumerate(world.trajectories) if t.fate in unfinished}
    assert finished == {i for i, t in enumerate(world.trajectories) if t.fate == "REWARDED"}
    assert replayed == {i for i, t in enumerate(world.trajectories) if t.fate == "BATCHED"}
    assert partial == {i: t.kept for i, t in enumerate(world.trajectories) if t.fate in unfinished and t.kept}
    assert all(g.leased_at == (0 if g.partial or g.finished else None) for g in found.groups)
    assert (found.committed and found.committed.step) == (world.commits[-1][0] if world.commits else None)
    assert found.cursor == ({"position": 1} if world.trajectories else None)
    assert (found.next_group_index, found.next_sample_index) == (1, 2) if world.trajectories else (0, 0)


def check_edge(recorder: Recorder, world: World, op: Op, saved: bytes) -> World | None:
    """Contract 1; what came of it, None where it was refused."""
    recorder.restore(saved)
    expected = after(world, op)
    if expected is None:
        before = recorder.said()
        with pytest.raises(ValueError, match="sample|rollback"):
            recorder.do(op, world)
        assert recorder.said() == before, f"{world}: {op} was refused, and changed something"
        return None
    found = recorder.do(op, world)
    assert recorder.seen() == expected, f"{world}: {op}"
    if op.name == "recover":
        check_recovery(found, world)
    return expected


def walk(path, journal_class: type[Journal] = Journal) -> int:
    """How many states there are; every one of them, and every edge, is checked."""
    recorder = Recorder(path, journal_class)
    states = {NOTHING: recorder.save()}
    edges: dict[World, set[World]] = {}
    todo = [NOTHING]
    while todo:
        world = todo.pop()
        recorder.restore(states[world])
        check_state(recorder, world)
        edges[world] = set()
        for op in operations(world):
            reached = check_edge(recorder, world, op, states[world])
            if reached is not None:
                edges[world].add(reached)
                if reached not in states:
                    states[reached] = recorder.save()
                    todo.append(reached)
    recorder.journal.close()
    check_ends(edges)
    return len(states)


def check_ends(edges: dict[World, set[World]]) -> None:
    """Contract 5. A rollback opens a state again, so that none is the last; only the ends are counted."""
    ended = {w for w in edges if all(t.fate in ("TRAINED", "DROPPED") for t in w.trajectories)}
    while more := {w for w, reached in edges.items() if w not in ended and reached & ended}:
        ended |= more
    assert ended == {*edges}, f"no end from {[*{*edges} - ended][:3]}"


def test_every_operation_in_every_state_does_what_it_says_or_nothing(tmp_path):
    assert walk(tmp_path / "journal.sqlite") == 189


# -- broken journals -----------------------------------------------------------------------------------------------


class ReleaseForgets(Journal):
    """What was generated before a release is lost."""

    def release(self, samples):
        self.restart([s.index for s in samples])


class RestartKeeps(Journal):
    """A trajectory that begins anew is continued instead."""

    def restart(self, indices):
        with self._transaction():
            self._move(Fate.PENDING, [(i,) for i in indices], "leased_at = NULL")


class ResumeForgets(Journal):
    """A kill in a continuation loses what it continued."""

    def resume(self, indices, rollout_id, version=None):
        with self._transaction():
            self._move(Fate.LEASED, [(i,) for i in indices], "payload = NULL")


class RecoveryForgets(Journal):
    """A kill before the reward loses the generation."""

    def recover(self):
        with self._transaction() as db:
            db.execute("UPDATE samples SET payload = NULL WHERE fate = 'GENERATED'")
        return super().recover()


class RecoveryOverlooks(Journal):
    """What waits for its reward is left where it is, for ever."""

    def recover(self):
        with self._transaction() as db:
            waiting = db.execute("SELECT sample_index FROM samples WHERE fate = 'GENERATED'").fetchall()
        found = super().recover()
        with self._transaction() as db:
            db.executemany("UPDATE samples SET fate = 'GENERATED' WHERE sample_index = ?", waiting)
        return found


class GeneratedWithoutPayload(Journal):
    """The fate moves, the tokens do not."""

    def generated(self, samples):
        with self._transaction():
            self._move(Fate.GENERATED, [(s.index,) for s in samples], "reward = NULL")


class HalfOfAFinish(Journal):
    """One transaction a trajectory: what comes before a refused one stays."""

    def finish(self, samples):
        for one in samples:
            super().finish([one])


class CommitsOneByOne(Journal):
    """The trajectories are TRAINED before the commit that says so."""

    def commit(self, *, steps, checkpoint):
        for step in steps:
            for index in step[3]:
                with self._transaction():
                    self._move(Fate.TRAINED, [(step[0], index)], "step = ?")
        super().commit(steps=[(*step[:3], ()) for step in steps], checkpoint=checkpoint)


class DispatchedTwice(Journal):
    """What goes out again is counted again."""

    def resume(self, indices, rollout_id, version=None):
        super().resume(indices, rollout_id, version)
        self.put("dispatched", self.get("dispatched") + len(list(indices)))


class DropKeeps(Journal):
    """The payloads of dropped trajectories fill the disk."""

    def drop(self, indices, reason):
        with self._transaction():
            self._move(Fate.DROPPED, [(reason, i) for i in indices], "reason = ?")


class BatchKeeps(Journal):
    """So do those of batched ones."""

    def batched(self, indices, rollout_id):
        with self._transaction():
            self._move(Fate.BATCHED, [(rollout_id, i) for i in indices], "rollout_id = ?")


class RollbackLeavesTrained(Journal):
    """What a lost checkpoint was trained on is not trained again."""

    def roll_back(self, to_step, reason, lost=()):
        with self._transaction() as db:
            before = db.execute("SELECT fate, sample_index FROM samples").fetchall()
        found = super().roll_back(to_step, reason, lost)
        with self._transaction() as db:
            db.executemany("UPDATE samples SET fate = ? WHERE sample_index = ?", before)
        return found


class AgeIsForgotten(Journal):
    """Groups come back from a kill as if they were new."""

    def lease(self, rows, cursor, rollout_id, version=None):
        super().lease(rows, cursor, rollout_id)


BROKEN = [
    ReleaseForgets,
    RestartKeeps,
    ResumeForgets,
    RecoveryForgets,
    RecoveryOverlooks,
    GeneratedWithoutPayload,
    HalfOfAFinish,
    CommitsOneByOne,
    DispatchedTwice,
    DropKeeps,
    BatchKeeps,
    RollbackLeavesTrained,
    AgeIsForgotten,
]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_the_walk_catches(tmp_path, broken):
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        walk(tmp_path / "journal.sqlite", broken)


@pytest.mark.parametrize(
    ("to", "wrongly"),
    [
        (Fate.BATCHED, Fate.GENERATED),  # a batch without rewards
        (Fate.BATCHED, Fate.PENDING),
        (Fate.TRAINED, Fate.REWARDED),  # trained from no durable batch
        (Fate.TRAINED, Fate.TRAINED),  # twice
        (Fate.DROPPED, Fate.TRAINED),
        (Fate.DROPPED, Fate.DROPPED),
        (Fate.LEASED, Fate.LEASED),  # generated by two at once
        (Fate.LEASED, Fate.DROPPED),
        (Fate.PENDING, Fate.REWARDED),
        (Fate.PENDING, Fate.BATCHED),
        (Fate.REWARDED, Fate.PENDING),
        (Fate.REWARDED, Fate.REWARDED),
    ],
    ids=lambda fate: fate.value,
)
def test_the_walk_catches_a_move_too_many(tmp_path, monkeypatch, to, wrongly):
    monkeypatch.setitem(journals.SOURCES, to, (*journals.SOURCES[to], wrongly))
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        walk(tmp_path / "journal.sqlite")


@pytest.mark.parametrize(
    ("to", "missing"),
    [(to, fate) for to, fates in journals.SOURCES.items() for fate in fates],
    ids=lambda fate: fate.value,
)
def test_the_walk_catches_a_move_that_is_missing(tmp_path, monkeypatch, to, missing):
    left = tuple(fate for fate in journals.SOURCES[to] if fate is not missing)
    monkeypatch.setitem(journals.SOURCES, to, left)
    with pytest.raises((AssertionError, ValueError, pytest.fail.Exception)):
        walk(tmp_path / "journal.sqlite")
