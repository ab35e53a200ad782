"""Who may change the weights of an endpoint: one process at a time, by a lock beside ``endpoint.json``.

The lock is the kernel's (``flock``), so it ends with its holder, killed or not; the file says who holds it, or who
did. It holds for all processes that reach the file: those of one machine, and of others where they share the disk and
it carries such locks (NFS does). ``endpoint.json`` names the file, so a copy of it leads to the same lock. Whoever
owns an endpoint makes the file, for all users to write; runs and ``slime sync`` take it.
"""

import contextlib
import fcntl
import os
import pathlib
import time
from collections.abc import Callable

import msgspec

from slime_cli import manifests
from slime_cli.errors import DataError, UsageError
from slime_cli.manifests import layout


def beside(endpoint: str | os.PathLike) -> pathlib.Path:
    return pathlib.Path(endpoint).resolve().parent / layout.CLAIM


def offer(path: pathlib.Path) -> None:
    """Makes the file, held by nobody."""
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666))
        os.chmod(path, 0o666)


class Claim:
    """Held until :meth:`close`, or until this process ends."""

    def __init__(self, path: pathlib.Path, holder: str, say: Callable[[str], None]):
        """``holder``: what others are told. Raises UsageError that names the present holder."""
        self.path = path
        try:
            offer(path)
            self._file: int | None = os.open(path, os.O_RDWR)
        except OSError as error:
            raise UsageError(
                f"{path}: cannot be opened to claim the endpoint's weights ({error.strerror})",
                "let its owner allow writing, or use an endpoint of your own: slime serve-rollout",
            ) from None
        before = None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._file)
            raise UsageError(
                f"the weights of this endpoint are updated by {_described(holder_of(path))}",
                "wait until that ends, or start an endpoint of your own: slime serve-rollout",
            ) from None
        except OSError as error:
            say(
                f"warning: {path.parent} carries no locks ({error.strerror}): nothing keeps a second run from "
                "updating these engines"
            )
        else:
            before = holder_of(path)
        if before is not None:
            say(f"took the endpoint over from {_described(before)}, which ended without releasing it")
        _write(self._file, manifests.Claim(holder=holder, host=os.uname().nodename, pid=os.getpid(), since=time.time()))

    def close(self) -> None:
        if self._file is not None:
            os.ftruncate(self._file, 0)
            os.close(self._file)
            self._file = None


def _write(file: int, claim: manifests.Claim) -> None:
    """In place: the lock is on this file, not on one that would replace it."""
    data = msgspec.json.encode(claim)
    os.ftruncate(file, 0)
    os.pwrite(file, data, 0)
    os.fsync(file)


def holder_of(path: pathlib.Path) -> manifests.Claim | None:
    """Who is written there; None when nobody, or when it is being written just now."""
    try:
        return manifests.read(path, manifests.Claim)
    except DataError:
        return None


def _described(claim: manifests.Claim | None) -> str:
    if claim is None:
        return "another process"
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(claim.since))
    return f"{claim.holder} (pid {claim.pid} on {claim.host}, since {since})"
