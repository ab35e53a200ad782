"""The journal's parts: its tables, the legal moves between fates, and the records that it answers with.

Used by :mod:`slime_cli.buffer.journal`, which re-exports the records.
"""

import collections
import dataclasses
import json
import pathlib
import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from slime_cli.buffer.types import Fate, PromptRow, Sample
from slime_cli.errors import DataError

VERSION = 3

_TRAININGS = f"""
CREATE TABLE commits(
    step INTEGER NOT NULL, era INTEGER NOT NULL, rollout_id INTEGER NOT NULL, weight_version TEXT NOT NULL,
    checkpoint TEXT NOT NULL, samples INTEGER NOT NULL, time REAL NOT NULL, PRIMARY KEY(step, era));
CREATE TABLE trained(
    sample_index INTEGER NOT NULL, era INTEGER NOT NULL, step INTEGER NOT NULL,
    PRIMARY KEY(sample_index, era)) WITHOUT ROWID;
CREATE TABLE rollbacks(
    era INTEGER PRIMARY KEY, from_step INTEGER NOT NULL, to_step INTEGER NOT NULL, reason TEXT NOT NULL,
    again INTEGER NOT NULL, dropped INTEGER NOT NULL, time REAL NOT NULL);
{
    "".join(
        f"""
CREATE TRIGGER {table}_never_{word} BEFORE {verb} ON {table}
BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END;"""
        for table in ("commits", "trained", "rollbacks")
        for word, verb in (("changes", "UPDATE"), ("shrinks", "DELETE"))
    )
}
{
    "".join(
        f'''
CREATE VIEW standing_{table} AS SELECT * FROM {table} AS t
    WHERE NOT EXISTS (SELECT 1 FROM rollbacks AS r WHERE r.era > t.era AND r.to_step < t.step);'''
        for table in ("commits", "trained")
    )
}
CREATE TABLE lines(rollout_id INTEGER PRIMARY KEY, line TEXT NOT NULL);
PRAGMA user_version = {VERSION};
"""
"""An era is the time between two rollbacks. What was committed in one stands until a later rollback goes back behind
its step."""

SCHEMA = f"""
CREATE TABLE groups(
    group_index INTEGER PRIMARY KEY, source TEXT NOT NULL, row INTEGER NOT NULL, epoch INTEGER NOT NULL,
    prompt BLOB NOT NULL);
CREATE TABLE samples(
    sample_index INTEGER PRIMARY KEY, group_index INTEGER NOT NULL REFERENCES groups, position INTEGER NOT NULL,
    fate TEXT NOT NULL, reason TEXT, rollout_id INTEGER, step INTEGER, weight_version TEXT,
    attempts INTEGER NOT NULL DEFAULT 1, reward, payload BLOB, leased_at INTEGER);
CREATE TABLE state(key TEXT PRIMARY KEY, value TEXT NOT NULL);
{_TRAININGS}"""

_WITH_AGES = f"""
ALTER TABLE samples ADD COLUMN leased_at INTEGER;
UPDATE samples SET leased_at = rollout_id WHERE payload IS NOT NULL;
PRAGMA user_version = {VERSION};
"""
"""Before, a rollout's groups were dealt when it began, by weights of all rollouts before it."""

UPGRADES = {
    1: f"""
DROP TRIGGER trained_never_changes;
DROP TRIGGER trained_never_shrinks;
ALTER TABLE commits RENAME TO commits_1;
ALTER TABLE trained RENAME TO trained_1;
{_TRAININGS}
INSERT INTO commits SELECT step, 0, rollout_id, weight_version, checkpoint, samples, time FROM commits_1;
INSERT INTO trained SELECT sample_index, 0, step FROM trained_1;
DROP TABLE commits_1;
DROP TABLE trained_1;
{_WITH_AGES}""",
    2: _WITH_AGES,
}
"""Version of an older journal -> what makes the present one of it."""

_OUT = (Fate.LEASED, Fate.GENERATED)

SOURCES: dict[Fate, tuple[Fate, ...]] = {
    Fate.PENDING: _OUT,
    Fate.LEASED: (Fate.PENDING,),
    Fate.GENERATED: (Fate.LEASED,),
    Fate.REWARDED: _OUT,
    Fate.BATCHED: (Fate.REWARDED,),
    Fate.TRAINED: (Fate.BATCHED,),
    Fate.DROPPED: (Fate.PENDING, *_OUT, Fate.REWARDED, Fate.BATCHED),
}
"""The fates that a trajectory may come from, by the fate that it goes to. New ones are LEASED."""

Lease = tuple[int, PromptRow, int, Sequence[int]]
"""``(group_index, row, epoch, sample indices)``"""


@dataclasses.dataclass(frozen=True, slots=True)
class Commit:
    """One optimizer step whose checkpoint is durable."""

    step: int
    rollout_id: int
    weight_version: str
    checkpoint: str
    samples: int
    time: float
    """Unix seconds."""


@dataclasses.dataclass(frozen=True, slots=True)
class OpenGroup:
    """A group that has trajectories to generate or to batch. Its batched, trained and dropped ones are not listed."""

    group_index: int
    row: PromptRow
    epoch: int
    finished: tuple[Sample, ...]
    """REWARDED, in position order, siblings one after the other."""
    pending: tuple[int, ...]
    """Indices of those still to finish, in position order."""
    partial: dict[int, list[Sample]]
    """Tokens of some of ``pending``: cut-off generations, or whole ones that lack a reward; with siblings."""
    leased_at: int | None = None
    """The version, in rollouts trained, at which the oldest of what it has was leased; None where it has nothing."""


@dataclasses.dataclass(frozen=True, slots=True)
class Recovery:
    """Where a run stands when an attempt starts."""

    committed: Commit | None
    """The last committed step; None before the first."""
    groups: tuple[OpenGroup, ...]
    replay: dict[int, tuple[int, ...]]
    """Rollout id -> its BATCHED, uncommitted trajectories, oldest rollout first: train them from
    ``rollouts/NNNNNN``."""
    cursor: dict[str, Any] | None
    """As given to the last lease; None before the first."""
    next_group_index: int
    next_sample_index: int


@dataclasses.dataclass(frozen=True, slots=True)
class Rollback:
    """Commits that no longer stand, because their checkpoint is lost."""

    from_step: int
    to_step: int
    """The commit that training continued from; 0 for the phase's begin."""
    reason: str
    again: int
    """Samples whose training was undone and that were handed out to be trained again, from their batches."""
    dropped: int
    """Samples whose batches were gone as well."""
    time: float
    """Unix seconds."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ledger:
    """The conservation law in figures."""

    dispatched: int
    trained: int
    dropped: dict[str, int]
    """By reason."""
    in_flight: dict[str, int]
    """By fate; fates without samples are left out."""
    trained_twice: int
    """Trainings beyond the first of a sample, those that a rollback undid left out."""
    committed: int
    """Samples that the standing commits claim; equals ``trained``."""
    rollbacks: tuple[Rollback, ...] = ()

    @property
    def balanced(self) -> bool:
        total = self.trained + sum(self.dropped.values()) + sum(self.in_flight.values())
        return self.dispatched == total and self.trained == self.committed and self.trained_twice == 0


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """All that the journal says about one trajectory (``slime trace why``)."""

    sample_index: int
    group_index: int
    position: int
    source: str
    row: int
    epoch: int
    fate: Fate
    reason: str | None
    rollout_id: int | None
    step: int | None
    weight_version: str | None
    undone: tuple[int, ...]
    """Steps that trained it before and that a rollback undid."""
    attempts: int
    """Times that it went out to be generated, or continued."""
    reward: float | dict[str, Any] | list | None
    """A list when the trajectory fanned out: one for each sibling."""
    prompt: PromptRow


def plain(value: Any) -> Any:
    """numpy and torch scalars or arrays that a hook left in a sample, as Python values."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} can't be stored; use plain values")


encode = msgspec.msgpack.Encoder(enc_hook=plain).encode
decode = msgspec.msgpack.decode


def payload_of(siblings: list[Sample]) -> bytes:
    """A sample; a list of them where a trajectory fanned out."""
    parts = [sample.part for sample in siblings]
    if len(set(parts)) < len(parts):
        raise ValueError(f"sample {siblings[0].index} is named twice: its siblings are parts {parts}")
    try:
        # the bytes of its to_dict(), ten times as fast
        return encode(siblings if len(siblings) > 1 else siblings[0])
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"sample {siblings[0].index}: {error} (look at its metadata and reward)") from error


def samples_of(payload: bytes) -> list[Sample]:
    """Inverse of :func:`payload_of`."""
    found = decode(payload)
    return [Sample.from_dict(values) for values in (found if isinstance(found, list) else [found])]


def reward_column(siblings: list[Sample]) -> float | str | None:
    """The number; as JSON a dict, or what each sibling has."""
    rewards = [_reward(sample) for sample in siblings]
    value = rewards[0] if len(rewards) == 1 else rewards
    return json.dumps(value, default=plain) if isinstance(value, dict | list) else value


def _reward(sample: Sample) -> float | dict[str, Any] | None:
    try:
        return sample.reward if sample.reward is None or isinstance(sample.reward, dict) else float(sample.reward)
    except (TypeError, ValueError) as error:
        raise ValueError(f"sample {sample.index}: reward {sample.reward!r} is no number ({error})") from error


def quoted(fates: Iterable[Fate]) -> str:
    return ", ".join(f"'{fate.value}'" for fate in fates)


def complaint(db: sqlite3.Connection, to: Fate, indices: Sequence[int]) -> str:
    """Why samples can't go to ``to``, for the first ten."""
    problems = []
    seen = set()
    for index in indices:
        row = db.execute("SELECT fate FROM samples WHERE sample_index = ?", (index,)).fetchone()
        if row is None:
            problems.append(f"sample {index} is not in the journal")
        elif Fate(row[0]) not in SOURCES[to]:
            problems.append(f"sample {index} can't go {row[0]} -> {to.value}")
        elif index in seen:
            problems.append(f"sample {index} is named twice on its way {row[0]} -> {to.value}")
        seen.add(index)
    more = f"; and {len(problems) - 10} more" if len(problems) > 10 else ""
    return "; ".join(problems[:10]) + more


def open_groups(db: sqlite3.Connection) -> tuple[OpenGroup, ...]:
    """Groups that have trajectories to generate or to batch, by index."""
    rows = db.execute(
        "SELECT group_index, epoch, prompt, sample_index, fate, payload, leased_at"
        " FROM samples JOIN groups USING(group_index)"
        " WHERE fate IN ('PENDING', 'REWARDED') ORDER BY group_index, position"
    )
    found: dict[int, OpenGroup] = {}
    members: dict[int, list[_Member]] = collections.defaultdict(list)
    for group, epoch, prompt, *member in rows:
        if group not in found:
            found[group] = OpenGroup(group, PromptRow(**decode(prompt)), epoch, (), (), {})
        members[group].append(_Member(*member))
    return tuple(_with_members(group, members[group.group_index]) for group in found.values())


class _Member(NamedTuple):
    sample: int
    fate: str
    payload: bytes | None
    leased_at: int | None


def _with_members(group: OpenGroup, members: list[_Member]) -> OpenGroup:
    samples = {m.sample: samples_of(m.payload) for m in members if m.payload is not None}
    pending = tuple(m.sample for m in members if m.fate == Fate.PENDING.value)
    ages = [m.leased_at for m in members if m.payload is not None and m.leased_at is not None]
    return dataclasses.replace(
        group,
        finished=tuple(s for m in members if m.fate == Fate.REWARDED.value for s in samples[m.sample]),
        pending=pending,
        partial={index: samples[index] for index in pending if index in samples},
        leased_at=min(ages, default=None),
    )


def check_version(db: sqlite3.Connection, path: pathlib.Path) -> int:
    """The schema's version, 0 for an empty file. Raises DataError for other files and newer journals."""
    try:
        version = db.execute("PRAGMA user_version").fetchone()[0]
    except sqlite3.DatabaseError as error:
        if isinstance(error, sqlite3.OperationalError):
            raise
        raise DataError(f"{path}: not a journal ({error})", "point at a run directory's journal.sqlite") from None
    if version > VERSION:
        raise DataError(f"{path}: journal version {version}, this slime reads {VERSION}", "upgrade this slime")
    return version


def statements(script: str) -> list[str]:
    """Statements one by one: ``executescript`` would commit between them, and a kill would leave half a schema."""
    found = []
    part = ""
    for line in script.splitlines(keepends=True):
        part += line
        if sqlite3.complete_statement(part):
            found.append(part)
            part = ""
    return found
