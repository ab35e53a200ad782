"""Contracts of slime_cli.locks: 1. one process holds a lock, until it ends; 2. others learn who; 3. what is no lock is
said."""

import errno
import os
import subprocess
import sys

import pytest

from slime_cli import locks
from slime_cli.buffer.journal import Journal
from slime_cli.errors import UsageError

OTHER = """
import os, sys
from slime_cli import locks
os.write(locks.take(sys.argv[1]), b"somebody else")
print("held", flush=True)
sys.stdin.read()
"""


def test_another_process_is_named_and_its_lock_ends_with_it(tmp_path):
    path = tmp_path / "lock"
    command = [sys.executable, "-c", OTHER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(locks.TakenError, match="^somebody else$"):
            locks.take(path)
        other.kill()
    os.close(locks.take(path))


def test_a_file_is_made_only_where_that_is_asked_for(tmp_path):
    with pytest.raises(FileNotFoundError):
        locks.take(tmp_path / "lock", make=False)
    assert not (tmp_path / "lock").exists()


def test_a_disk_without_locks_is_not_taken_for_another_process(tmp_path, monkeypatch):
    def refuse(fd, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(locks.fcntl, "lockf", refuse)
    with pytest.raises(UsageError, match="cannot be locked: No locks available"):
        Journal(tmp_path / "journal.sqlite")


def test_a_lock_file_that_cannot_be_opened_is_a_usage_error(tmp_path):
    (tmp_path / "journal.sqlite.lock").mkdir()
    with pytest.raises(UsageError, match="journal.sqlite.lock: Is a directory"):
        Journal(tmp_path / "journal.sqlite")
