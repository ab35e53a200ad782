"""The journal's file: opened by one process to write, or by many to read; transactions; upgrades of an older one.

The base of :class:`slime_cli.buffer.journal.Journal`, which says what a journal means. Invariants: one process writes,
and one thread of it at a time; a transaction is whole or not there; what the disk or a damaged file says names the
path.
"""

import contextlib
import os
import pathlib
import sqlite3
import threading
import urllib.parse
from collections.abc import Iterator
from typing import Self

from slime_cli import disk, locks
from slime_cli.buffer.records import SCHEMA, UPGRADES, VERSION, check_version, statements
from slime_cli.errors import DataError, UsageError


class JournalFile:
    """Threads of the process may share it."""

    def __init__(self, path: str | os.PathLike):
        self.path = pathlib.Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._mutex = threading.RLock()
        self._lock = self._lock_out_others()
        with self._held():
            self._open()

    def _open(self) -> None:
        self._db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False, timeout=60)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.execute("PRAGMA secure_delete=OFF")
        self._db.execute("PRAGMA cache_size=-32768")
        self._db.execute("PRAGMA wal_autocheckpoint=4000")
        self._db.execute("PRAGMA journal_size_limit=67108864")  # a burst of large payloads must not leave a large WAL
        version = check_version(self._db, self.path)
        if version < VERSION:
            with self._transaction():
                self._bring_up(version)

    def _bring_up(self, version: int) -> None:
        """An empty journal (0), or an older one, to what this slime writes."""
        for statement in statements(UPGRADES[version] if version else SCHEMA):
            self._db.execute(statement)

    @classmethod
    def open_readonly(cls, path: str | os.PathLike) -> Self:
        """For reading a live or dead run; every writing method then fails in SQLite."""
        self = cls.__new__(cls)
        self.path = pathlib.Path(path)
        if not self.path.is_file():
            raise DataError(f"{path}: no such journal", "point at the folder of a run that `slime train` has started")
        self._mutex = threading.RLock()
        self._lock = None
        name = urllib.parse.quote(os.fsencode(self.path.resolve()))
        # In a folder that can't be written, SQLite can't make the WAL's index; without a WAL it needs none.
        for uri in (f"file:{name}?mode=ro", f"file:{name}?immutable=1"):
            self._db = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=60)
            try:
                version = check_version(self._db, self.path)
            except sqlite3.OperationalError as error:
                self._db.close()
                wal = pathlib.Path(f"{self.path}-wal")
                if "immutable" in uri or (wal.exists() and wal.stat().st_size):
                    raise DataError(f"{path}: {error}", "read it where its folder can be written, or copy it") from None
            else:
                if not version:
                    self._db.close()
                    raise DataError(f"{path}: the journal is empty", "the run was stopped before its first rollout")
                if version < VERSION:
                    self._read_a_newer_copy(version)
                return self
        raise AssertionError("unreachable")

    def _read_a_newer_copy(self, version: int) -> None:
        """In memory: an older journal of a run that nobody resumes stays as it is."""
        copy = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self._db.backup(copy)
        self._db.close()
        self._db = copy
        self._bring_up(version)
        self._db.execute("PRAGMA query_only=ON")

    def _lock_out_others(self) -> int:
        path = f"{self.path}.lock"
        try:
            return locks.take(path)
        except locks.TakenError:
            message = f"{self.path}: another process is writing it"
            raise UsageError(message, "stop that run, or use another run directory") from None
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}", "use a run directory that you may write to") from None

    def close(self) -> None:
        """A thread that writes finishes its transaction first; one that comes later gets an error."""
        with self._mutex:
            self._db.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        """For one thread at a time; what the disk or a damaged file says comes with the path."""
        try:
            with self._mutex, disk.naming(self.path):
                yield
        except sqlite3.DatabaseError as error:
            if type(error) is not sqlite3.DatabaseError:  # OperationalError and the like are about a statement
                raise
            fix = (
                "restore a copy, or start another --run-dir with --load and this run's checkpoints: their weights are"
                " whole"
            )
            raise DataError(f"{self.path}: damaged: {error}", fix) from None

    @contextlib.contextmanager
    def _transaction(self, begin: str = "BEGIN IMMEDIATE") -> Iterator[sqlite3.Connection]:
        with self._held():
            self._db.execute(begin)
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
