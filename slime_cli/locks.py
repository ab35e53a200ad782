"""A lock file that one process holds until it ends, however that is. Callers: a run's folder, and the journal in it.

It is a POSIX lock, not ``flock``: it ends with the process that took it, even when a child that was forked lives on.
(:mod:`slime_cli.serving.claim` takes ``flock``, which is held by an open file and not lost when another one of the same
path is closed.)
"""

import errno
import fcntl
import os

from slime_cli.errors import UsageError


class TakenError(Exception):
    """Another process holds it; the text is what that process wrote into the file."""


def take(path: str | os.PathLike, *, make: bool = True) -> int:
    """The open file, locked; closing it ends the lock. Raises TakenError, UsageError for a disk without locks, and
    OSError for a file that cannot be opened: ``make`` says whether one that is not there is made."""
    fd = os.open(path, os.O_RDWR | (os.O_CREAT if make else 0), 0o644)
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.read(fd, 200).decode(errors="replace").strip()
        os.close(fd)
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise TakenError(holder) from None
        raise UsageError(f"{path}: cannot be locked: {error.strerror}", "choose a disk that has locks") from None
    return fd
