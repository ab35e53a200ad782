"""The on-disk contracts' common part: JSON with a ``schema`` field, written atomically, read strictly.

A manifest is a frozen msgspec struct tagged ``slime.NAME/VERSION``. :func:`write` goes through a temporary file, fsync
and rename, so a reader sees the old manifest or the new one. :func:`read` refuses unknown names, future versions and
fields that do not fit, with the file's name in the message.
"""

import hashlib
import json
import os
import pathlib
import re
import tempfile
from typing import Any, TypeVar

import msgspec

from slime_cli import disk
from slime_cli.errors import DataError

T = TypeVar("T", bound=msgspec.Struct)
POINTER = "Git LFS pointer, not the file (git lfs pull)"
"""The first bytes of a file that stands for another in a clone without Git LFS."""


def fsync_folder(folder: str | os.PathLike) -> None:
    """Makes a rename in ``folder`` durable."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_bytes(path: str | os.PathLike, data: bytes) -> None:
    """Atomic, durable replacement of ``path``; its folder is made if need be. Raises EngineError when the disk does not
    take it."""
    path = pathlib.Path(path)
    with disk.naming(path):
        _replace(path, data)


def _replace(path: pathlib.Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "wb") as file:
            os.fchmod(file.fileno(), 0o644)  # mkstemp gives a file to its owner alone; other stages read it
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        pathlib.Path(temporary).unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def write_json(path: str | os.PathLike, value: object) -> None:
    """Any JSON value, indented, written like a manifest but without a schema."""
    write_bytes(path, (json.dumps(value, indent=2, default=str) + "\n").encode())


def read_json(path: str | os.PathLike) -> dict[str, Any]:
    """A JSON object that somebody else wrote. Raises ValueError with a message for people."""
    text = ""
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8")
        if text.startswith("version https://git-lfs"):
            raise ValueError(f"a {POINTER}")
        value = json.loads(text)
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: {error}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error if text.strip() else 'is empty'}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not a JSON object")
    return value


def file_hash(path: str | os.PathLike) -> str:
    """SHA-256 of a file, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def schema_of(kind: type[msgspec.Struct]) -> str:
    return str(kind.__struct_config__.tag)


def write(path: str | os.PathLike, manifest: msgspec.Struct) -> None:
    """Writes ``manifest`` with its ``schema`` field first."""
    write_bytes(path, msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")


def read(path: str | os.PathLike, kind: type[T]) -> T:
    """Reads and checks a manifest. Raises DataError naming the file and what does not fit."""
    path = pathlib.Path(path)
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"{path}: no such file", f"expected a {schema_of(kind)} manifest there") from None
    except (IsADirectoryError, NotADirectoryError, PermissionError) as error:
        raise DataError(f"{path}: {error.strerror}", f"give the file of a {schema_of(kind)} manifest") from None
    try:
        found = json.loads(raw).get("schema")
    except (ValueError, AttributeError) as error:
        raise DataError(f"{path}: not a JSON object ({error})", "the file is damaged; make it again") from None
    wanted = schema_of(kind)
    if found != wanted:
        raise DataError(f"{path}: schema is {found!r}, this slime reads {wanted!r}", _schema_fix(found, wanted))
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise DataError(f"{path}: {error}", "the file is damaged or was edited; make it again") from None


def _schema_fix(found: object, wanted: str) -> str:
    match = re.fullmatch(r"(.+)/(\d+)", str(found))
    name, version = wanted.rsplit("/", 1)
    if match and match[1] == name and int(match[2]) > int(version):
        return "it was written by a newer slime: upgrade this one"
    return "point at a file of the right kind"
