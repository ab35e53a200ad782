"""The journal: what became of every trajectory of a phase, in one SQLite file that survives kill -9.

Its one writer is the Data Buffer (:mod:`slime_cli.buffer.buffer`); ``slime trace`` reads along. A row of ``samples`` is
a trajectory: what it fanned out into moves, is counted and is recovered as one. Invariants:

* a trajectory moves only along ``SOURCES`` (PENDING -> LEASED -> GENERATED -> REWARDED -> BATCHED -> TRAINED |
  DROPPED); any other move raises ValueError naming it and changes nothing: each method is one transaction;
* what was generated is kept until a batch has it or it is dropped: PENDING, LEASED and GENERATED keep what was last
  given to :meth:`Journal.generated` or :meth:`Journal.release`, over a kill too; only :meth:`Journal.restart` forgets
  it;
* TRAINED is entered only by :meth:`Journal.commit`, together with the step, weight version and durable checkpoint, and
  once per trajectory: ``trained`` is append-only and unique by trajectory, whatever ``samples`` says;
* TRAINED is left only by :meth:`Journal.roll_back`, when the checkpoint of a commit is lost and with it what the
  training did. Nothing is taken out of ``commits`` and ``trained`` then: a row of ``rollbacks`` says which of theirs no
  longer stand, and a trajectory is trained at most once among those that do;
* the metrics of a rollout are in it before the rollout is committed, so ``metrics.jsonl`` can be made from it;
* the prompt cursor moves in the transaction that leases the rows it passed, so a row is neither lost nor dealt twice;
* dispatched = trained + dropped + in flight: the left side is counted when dealt, the right from where trajectories
  are.

A killed process loses no finished transaction. A power cut may lose the last few, but never one before a commit: that
one is fsynced, and with it everything older. ``tests/buffer/test_journal_states.py`` walks every small state.
"""

import collections
import dataclasses
import json
import sqlite3
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slime_cli.buffer.journal_file import JournalFile
from slime_cli.buffer.records import (
    SOURCES,
    Commit,
    Lease,
    Ledger,
    OpenGroup,
    Record,
    Recovery,
    Rollback,
    complaint,
    decode,
    encode,
    open_groups,
    payload_of,
    plain,
    quoted,
    reward_column,
)
from slime_cli.buffer.types import Fate, PromptRow, Sample, trajectories

__all__ = ["SOURCES", "Commit", "Journal", "Lease", "Ledger", "OpenGroup", "Record", "Recovery", "Rollback"]

NONE: Mapping[int, str] = {}
_COMMITS = "SELECT step, rollout_id, weight_version, checkpoint, samples, time FROM standing_commits"


class Journal(JournalFile):
    """The one writer's handle, or a reader's; see the module for its invariants."""

    # ---- writing: one transaction each ----

    def lease(self, rows: Iterable[Lease], cursor: dict[str, Any], rollout_id: int, version: int | None = None) -> None:
        """Deals groups of new trajectories (LEASED) and moves the prompt cursor past their rows. ``version``: how many
        rollouts the engines' weights were trained on; a group counts its age from it."""
        rows = list(rows)
        groups = [(group, row.source, row.row, epoch, encode(row)) for group, row, epoch, _ in rows]
        samples = [
            (index, group, position, rollout_id, version)
            for group, _, _, indices in rows
            for position, index in enumerate(indices)
        ]
        with self._transaction() as db:
            try:
                db.executemany("INSERT INTO groups VALUES(?,?,?,?,?)", groups)
                self._insert(samples)
            except sqlite3.IntegrityError as error:
                raise ValueError(f"a group or sample of rollout {rollout_id} was dealt before ({error})") from error
            self._put("cursor", cursor)

    def resume(self, indices: Iterable[int], rollout_id: int, version: int | None = None) -> None:
        """PENDING ones go out again. ``version``: as in :meth:`lease`; those that have older tokens keep their age, and
        None is for those that get no more tokens."""
        age = "leased_at = CASE WHEN payload IS NULL OR ? < leased_at THEN ? ELSE leased_at END"
        with self._transaction():
            rows = [(rollout_id, version, version, i) for i in indices]
            self._move(Fate.LEASED, rows, f"rollout_id = ?, attempts = attempts + 1, {age}")

    def generated(self, samples: Sequence[Sample]) -> None:
        """Generation ended; the reward is still to come."""
        with self._transaction():
            self._store(Fate.GENERATED, samples)

    def finish(self, samples: Sequence[Sample], failed: Mapping[int, str] = NONE) -> None:
        """Rewarded, and so fit for a batch; all siblings of a trajectory in one call. ``failed``: trajectories that are
        dropped, and why."""
        with self._transaction():
            self._store(Fate.REWARDED, samples)
            self._drop([(reason, i) for i, reason in failed.items()])

    def release(self, samples: Sequence[Sample]) -> None:
        """Back to PENDING with what was generated so far, to be continued (partial rollouts)."""
        with self._transaction():
            self._store(Fate.PENDING, samples)

    def restart(self, indices: Iterable[int]) -> None:
        """Back to PENDING, to be generated from the start: what there was of them is forgotten."""
        with self._transaction():
            rows = [(i,) for i in indices]
            self._move(Fate.PENDING, rows, "reward = NULL, payload = NULL, leased_at = NULL")

    def drop(self, indices: Iterable[int], reason: str) -> None:
        with self._transaction():
            self._drop([(reason, i) for i in indices])

    def batched(self, indices: Iterable[int], rollout_id: int) -> None:
        """In a rollout that is durable on disk, which is why the payloads go."""
        with self._transaction():
            self._move(Fate.BATCHED, [(rollout_id, i) for i in indices], "rollout_id = ?, payload = NULL")

    def commit(self, *, steps: Iterable[tuple[int, int, str, Sequence[int]]], checkpoint: str) -> None:
        """``steps`` (step, rollout_id, weight_version, indices) are in the durable ``checkpoint``: all or nothing.

        Raises ValueError, naming them, when trajectories are not BATCHED (trained before, say) or a step was committed.
        """
        steps = [(step, rollout, version, list(indices)) for step, rollout, version, indices in steps]
        moves = [(step, version, i) for step, _, version, indices in steps for i in indices]
        now = time.time()
        with self._mutex:
            self._db.execute("PRAGMA synchronous=FULL")
            try:
                with self._transaction() as db:
                    self._move(Fate.TRAINED, moves, "step = ?, weight_version = ?")
                    try:
                        era = self._era()
                        db.executemany("INSERT INTO trained VALUES(?,?,?)", [(i, era, step) for step, _, i in moves])
                        rows = [(step, era, rollout, v, checkpoint, len(ids), now) for step, rollout, v, ids in steps]
                        db.executemany("INSERT INTO commits VALUES(?,?,?,?,?,?,?)", rows)
                    except sqlite3.IntegrityError as error:
                        raise ValueError(f"steps {[s[0] for s in steps]}: committed before ({error})") from error
            finally:
                self._db.execute("PRAGMA synchronous=NORMAL")

    def roll_back(self, to_step: int, reason: str, lost: Iterable[int] = ()) -> Rollback:
        """Commits after ``to_step`` (0: all) no longer stand, for their checkpoints are lost: what they trained is
        BATCHED again.

        Samples of the rollouts ``lost``, whose batches are gone, are dropped as ``batch_lost``.
        """
        with self._transaction() as db:
            last = self._last_commit()
            if last is None or last.step <= to_step or to_step and not any(c.step == to_step for c in self.commits()):
                raise ValueError(f"no rollback from step {last and last.step} to step {to_step}")
            undone = "(fate = 'TRAINED' AND step > ?)"
            gone = f"({undone} OR fate = 'BATCHED') AND rollout_id IN ({', '.join(str(int(r)) for r in lost)})"
            clear = "step = NULL, weight_version = NULL"
            dropped = db.execute(
                f"UPDATE samples SET fate = 'DROPPED', reason = 'batch_lost', {clear} WHERE {gone}", (to_step,)
            ).rowcount
            again = db.execute(f"UPDATE samples SET fate = 'BATCHED', {clear} WHERE {undone}", (to_step,)).rowcount
            found = Rollback(last.step, to_step, reason, again, dropped, time.time())
            db.execute("INSERT INTO rollbacks VALUES(?,?,?,?,?,?,?)", (self._era() + 1, *dataclasses.astuple(found)))
            db.execute("DELETE FROM state WHERE key IN ('finished', 'stopped')")  # in the rollout that is trained again
            return found

    def line(self, rollout_id: int, values: dict[str, Any]) -> None:
        """The metrics of a rollout, over what they were before."""
        with self._transaction() as db:
            db.execute("INSERT OR REPLACE INTO lines VALUES(?,?)", (rollout_id, json.dumps(values, default=plain)))

    def put(self, key: str, value: Any) -> None:
        """Keeps a JSON value of the caller's under ``key``."""
        with self._transaction():
            self._put(key, value)

    def recover(self) -> Recovery:
        """Takes over from an attempt that ended anyhow: what was under way becomes PENDING, with what it had; the rest
        stays."""
        with self._transaction() as db:
            db.execute("UPDATE samples SET fate = 'PENDING' WHERE fate IN ('LEASED', 'GENERATED')")
            batched = db.execute(
                "SELECT rollout_id, sample_index FROM samples WHERE fate = 'BATCHED' ORDER BY rollout_id, sample_index"
            )
            replay: dict[int, list[int]] = collections.defaultdict(list)
            for rollout_id, index in batched:
                replay[rollout_id].append(index)
            (last_group,) = db.execute("SELECT COALESCE(MAX(group_index), -1) FROM groups").fetchone()
            (last_sample,) = db.execute("SELECT COALESCE(MAX(sample_index), -1) FROM samples").fetchone()
            return Recovery(
                committed=self._last_commit(),
                groups=open_groups(db),
                replay={rollout_id: tuple(indices) for rollout_id, indices in replay.items()},
                cursor=self._get("cursor"),
                next_group_index=last_group + 1,
                next_sample_index=last_sample + 1,
            )

    # ---- reading ----

    def get(self, key: str, default: Any = None) -> Any:
        """The value that :meth:`put` (or :meth:`lease`, for ``cursor``) kept."""
        with self._held():
            return self._get(key, default)

    def ledger(self) -> Ledger:
        """One consistent look, also while another process writes."""
        with self._transaction("BEGIN") as db:
            fates = db.execute("SELECT fate, COALESCE(reason, ''), COUNT(*) FROM samples GROUP BY 1, 2").fetchall()
            twice = (
                "SELECT COALESCE(SUM(n - 1), 0) FROM (SELECT COUNT(*) AS n FROM standing_trained GROUP BY sample_index)"
            )
            claims = "SELECT COALESCE(SUM(samples), 0) FROM standing_commits"
            rollbacks = db.execute(
                "SELECT from_step, to_step, reason, again, dropped, time FROM rollbacks ORDER BY era"
            )
            return Ledger(
                dispatched=self._get("dispatched", 0),
                trained=sum(n for fate, _, n in fates if fate == Fate.TRAINED.value),
                dropped={reason: n for fate, reason, n in fates if fate == Fate.DROPPED.value},
                in_flight={fate: n for fate, _, n in fates if fate not in (Fate.TRAINED.value, Fate.DROPPED.value)},
                trained_twice=db.execute(twice).fetchone()[0],
                committed=db.execute(claims).fetchone()[0],
                rollbacks=tuple(Rollback(*row) for row in rollbacks),
            )

    def record(self, sample_index: int) -> Record | None:
        """None when no such sample was dispatched."""
        with self._held():
            row = self._db.execute(
                "SELECT sample_index, group_index, position, source, row, epoch, fate, reason, rollout_id, step,"
                " weight_version, attempts, reward, prompt FROM samples JOIN groups USING(group_index)"
                " WHERE sample_index = ?",
                (sample_index,),
            ).fetchone()
            steps = self._db.execute(
                "SELECT step FROM trained WHERE sample_index = ? ORDER BY era", (sample_index,)
            ).fetchall()
        if row is None:
            return None
        index, group, position, source, number, epoch, fate, reason, *places, attempts, reward, prompt = row
        rollout_id, step, version = places
        undone = tuple(s for (s,) in (steps[:-1] if fate == Fate.TRAINED.value else steps))
        reward = json.loads(reward) if isinstance(reward, str) else reward
        row = PromptRow(**decode(prompt))
        return Record(
            index,
            group,
            position,
            source,
            number,
            epoch,
            Fate(fate),
            reason,
            rollout_id,
            step,
            version,
            undone,
            attempts,
            reward,
            row,
        )

    def ages(self, indices: Iterable[int]) -> dict[int, int]:
        """Trajectory -> how many rollouts the weights were trained on when it was leased; where an older slime did not
        say, as many as came before its own."""
        sql = "SELECT COALESCE(leased_at, rollout_id) FROM samples WHERE sample_index = ?"
        with self._held():
            return {i: row[0] for i in indices if (row := self._db.execute(sql, (i,)).fetchone())}

    def commits(self) -> list[Commit]:
        """Those that stand, by step."""
        with self._held():
            return [Commit(*row) for row in self._db.execute(f"{_COMMITS} ORDER BY step")]

    def lines(self) -> dict[int, dict[str, Any]]:
        """Rollout id -> its metrics, of committed rollouts and of later ones."""
        with self._held():
            return {
                r: json.loads(line) for r, line in self._db.execute("SELECT rollout_id, line FROM lines ORDER BY 1")
            }

    # ---- inside a transaction ----

    def _insert(self, samples: list[tuple[int, int, int, int, int | None]]) -> None:
        self._db.executemany(
            "INSERT INTO samples(sample_index, group_index, position, fate, rollout_id, leased_at)"
            " VALUES(?,?,?,'LEASED',?,?)",
            samples,
        )
        self._put("dispatched", self._get("dispatched", 0) + len(samples))

    def _drop(self, rows: list[tuple[str, int]]) -> None:
        self._move(Fate.DROPPED, rows, "reason = ?, payload = NULL")

    def _store(self, to: Fate, samples: Sequence[Sample]) -> None:
        rows = [(reward_column(s), payload_of(s), index) for index, s in trajectories(samples).items()]
        self._move(to, rows, "reward = ?, payload = ?")

    def _move(self, to: Fate, rows: list[tuple], columns: str) -> None:
        """Moves the samples that end each row, setting ``columns`` from what precedes; all of them or ValueError."""
        legal = quoted(SOURCES[to])
        sql = f"UPDATE samples SET fate = '{to.value}', {columns} WHERE sample_index = ? AND fate IN ({legal})"
        if rows and self._db.executemany(sql, rows).rowcount != len(rows):
            self._db.execute("ROLLBACK")  # so that the message tells where the samples stood before
            raise ValueError(complaint(self._db, to, [row[-1] for row in rows]))

    def _put(self, key: str, value: Any) -> None:
        self._db.execute("INSERT OR REPLACE INTO state VALUES(?,?)", (key, json.dumps(value, default=plain)))

    def _get(self, key: str, default: Any = None) -> Any:
        row = self._db.execute("SELECT value FROM state WHERE key = ?", (key,)).fetchone()
        return default if row is None else json.loads(row[0])

    def _last_commit(self) -> Commit | None:
        row = self._db.execute(f"{_COMMITS} ORDER BY step DESC LIMIT 1").fetchone()
        return Commit(*row) if row else None

    def _era(self) -> int:
        return self._db.execute("SELECT COALESCE(MAX(era), 0) FROM rollbacks").fetchone()[0]
