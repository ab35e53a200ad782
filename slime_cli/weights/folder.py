"""A version in a folder: safetensors or what a delta has of them, and the manifest that makes it whole. Torch-free.

``weights/vNNNNNN`` is whole when its ``manifest.json`` is there, which is written last and removed first. Whoever went
away in between left a folder that nobody takes for a version.
"""

import dataclasses
import functools
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

from slime_cli import manifests
from slime_cli.errors import DataError
from slime_cli.manifests import layout
from slime_cli.models import headers
from slime_cli.weights.transport import Version

CHUNK = 8 << 20
"""Bytes of a tensor in memory at a time; a multiple of every element's size."""


@dataclasses.dataclass(frozen=True)
class Folder:
    """A :class:`Version` in a folder."""

    path: pathlib.Path
    name: str
    manifest: manifests.Weights

    def chunks(self, tensor: str) -> Iterator[bytes]:
        if self.manifest.base is not None:
            raise DataError(
                f"{self.path} is a delta: its tensors can be read where it is applied", "see docs/weights.md"
            )
        file = self.path / self.manifest.tensors[tensor].file
        begin, end = place(file, tensor)
        with open(file, "rb") as content:
            content.seek(begin)
            while begin < end:
                chunk = content.read(min(CHUNK, end - begin))
                begin += len(chunk)
                yield chunk


def place(file: pathlib.Path, tensor: str) -> tuple[int, int]:
    """First byte of a tensor in a safetensors file, and the one after the last."""
    try:
        stat = file.stat()
        begin, end = _header(file, stat.st_size, stat.st_mtime_ns)[tensor]["place"]
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{file}: no {tensor} to read there ({error})", "publish the version again") from None
    return begin, end


@functools.lru_cache(maxsize=16)
def _header(file: pathlib.Path, size: int, modified: int) -> dict[str, dict[str, Any]]:
    return headers.header(file)


def opened(path: pathlib.Path, name: str | None = None) -> Folder:
    """The version in ``path``, under another name if one is given. Raises DataError when it is not whole."""
    manifest = manifests.read(path / layout.MANIFEST, manifests.Weights)
    return Folder(path, name or manifest.version, manifest)


def if_whole(path: pathlib.Path, name: str | None = None) -> Folder | None:
    """:func:`opened`, or None where no whole version is in ``path``."""
    return opened(path, name) if (path / layout.MANIFEST).exists() else None


def as_folder(version: Version) -> Folder:
    assert isinstance(version, Folder), f"{version.name} was not written to a disk"
    return version


def remove(path: pathlib.Path) -> None:
    """Takes a version away, its manifest first so that it never looks whole."""
    (path / layout.MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path)
