"""A disk that is full, read-only or failing: tried before a run, and named where it is met. Torch-free.

:func:`writable` and :func:`short_of_room` are called before anything starts. :func:`naming` is put around what writes a
file, so that the message has the path; :func:`cause` finds a disk's words in whatever error a library or a process made
of them.
"""

import contextlib
import errno
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterable, Iterator

from slime_cli.errors import EngineError, SlimeError, UsageError

_FAILING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE)
_SAID = (*map(os.strerror, _FAILING), "database or disk is full", "disk I/O error")
"""Messages of the system and of SQLite for a full or failing disk."""
_PROBE = bytes(1 << 20)
FIX = "make room there, or give another folder, and start the same command again; what was committed stays"


def cause(error: BaseException | None) -> str:
    """The disk's message, with the path where it is known, if ``error`` comes from a disk; else an empty string."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, OSError) and error.errno in _FAILING:
            return f"{error.strerror}: {error.filename}" if error.filename else str(error.strerror)
        for line in str(error).splitlines() if not isinstance(error, SlimeError) else ():
            if any(said in line for said in _SAID):
                return line.strip()[:400]
        error = getattr(error, "cause", None) or error.__cause__ or error.__context__
    return ""


@contextlib.contextmanager
def naming(path: str | os.PathLike) -> Iterator[None]:
    """Raises EngineError with ``path`` for an error of the disk that the block met. Torch's writer raises a
    RuntimeError that does not say what it met, Megatron's an exception of checkpoints: the disk is asked then."""
    try:
        yield
    except (SlimeError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # CheckpointException is no Exception
        said = cause(error) or (str(error) if isinstance(error, OSError) else "")
        if not said and (isinstance(error, RuntimeError) or not isinstance(error, Exception)):
            said = _refusal(pathlib.Path(path))
        if not said:
            raise
        raise EngineError(said if str(path) in said else f"{path}: {said}", FIX) from error


def _refusal(path: pathlib.Path) -> str:
    """The error of a probe write to the disk of ``path``; an empty string when it takes it."""
    try:
        _probe(_existing(path))
    except OSError as error:
        return str(error.strerror) if error.errno in _FAILING else ""
    return ""


def _existing(path: pathlib.Path) -> pathlib.Path:
    """The folder that ``path`` is, or the nearest one above it."""
    return next(p for p in (path.resolve(), *path.resolve().parents) if p.is_dir())


def _probe(folder: pathlib.Path) -> None:
    with tempfile.TemporaryFile(dir=folder, prefix=".probe-") as file:
        file.write(_PROBE)
        file.flush()
        os.fsync(file.fileno())


def writable(folder: str | os.PathLike, option: str) -> None:
    """Makes the folder and writes a probe to its disk. Raises UsageError, naming ``option``, when either cannot be
    done."""
    folder = pathlib.Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _probe(folder)
    except OSError as error:
        inner = "free some space there, or give" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "give"
        blame = (
            "" if error.filename in (None, str(folder)) or ".probe-" in str(error.filename) else f" ({error.filename})"
        )
        reason = "a file is there" if error.errno == errno.EEXIST else error.strerror
        raise UsageError(
            f"{option} {folder}: cannot write there: {reason}{blame}", f"{inner} a folder that you may write to"
        ) from None


def nothing_in_the_way(folder: str | os.PathLike, option: str) -> None:
    """Raises what :func:`writable` would, as far as looking shows. Changes nothing."""
    path = pathlib.Path(folder).resolve()
    nearest = next(p for p in (path, *path.parents) if p.exists())
    reason = ""
    if not nearest.is_dir():
        reason = "a file is there" if nearest == path else f"Not a directory ({nearest})"
    elif not os.access(nearest, os.W_OK | os.X_OK):
        reason = f"Permission denied ({nearest})"
    if reason:
        raise UsageError(f"{option} {folder}: cannot write there: {reason}", "give a folder that you may write to")


def short_of_room(needs: Iterable[tuple[pathlib.Path, str, int]]) -> list[str]:
    """A warning for each disk that has less room than the (folder, what, bytes) that go there, those counted that lie
    there already."""
    by_disk: dict[int, list[tuple[pathlib.Path, str, int]]] = {}
    for folder, what, size in needs:
        by_disk.setdefault(_existing(folder).stat().st_dev, []).append((folder, what, size - _size(folder)))
    found = []
    for parts in by_disk.values():
        free = shutil.disk_usage(_existing(parts[0][0])).free
        missing = sum(max(0, size) for _, _, size in parts)
        if missing > free:
            listing = ", ".join(f"{what} in {folder} about {_gb(size)}" for folder, what, size in parts if size > 0)
            found.append(f"{_gb(free)} are free, and {_gb(missing)} are still to be written there: {listing}")
    return found


def _size(folder: pathlib.Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 5e7 else f"{size / 1e6:.1f} MB"
