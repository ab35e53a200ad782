"""Weights through a folder that trainer and engines both see: HF safetensors, loaded by ``/update_weights_from_disk``.

``weights/vNNNNNN`` is whole when its ``manifest.json`` is there, which is written last and removed first. Whoever went
away in between left a folder that nobody takes for a version. Torch-free.
"""

import dataclasses
import functools
import pathlib
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

from slime_cli import engine_api, manifests
from slime_cli.errors import DataError, EngineError
from slime_cli.manifests import layout
from slime_cli.manifests.proof import Proof
from slime_cli.models import headers
from slime_cli.weights import verification
from slime_cli.weights.transport import Learner, Version

CHUNK = 8 << 20
"""Bytes of a tensor in memory at a time; a multiple of every element's size."""
LOAD_TIMEOUT = 1800.0


@dataclasses.dataclass(frozen=True)
class Folder:
    """A :class:`Version` in a folder."""

    path: pathlib.Path
    name: str
    manifest: manifests.Weights

    def chunks(self, tensor: str) -> Iterator[bytes]:
        file = self.path / self.manifest.tensors[tensor].file
        begin, end = _place(file, tensor)
        with open(file, "rb") as content:
            content.seek(begin)
            while begin < end:
                chunk = content.read(min(CHUNK, end - begin))
                begin += len(chunk)
                yield chunk


def _place(file: pathlib.Path, tensor: str) -> tuple[int, int]:
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


class Disk:
    """The versions of one phase. ``folder`` is the phase's; ``newest`` of them stay, whether they are needed or not."""

    name = "disk"
    can_go_back = True

    def __init__(self, folder: pathlib.Path, newest: int):
        self.folder = folder
        self.newest = newest

    def write(self, learner: Learner, step: int) -> Folder:
        path = layout.version(self.folder, step)
        learner.publish(str(path), path.name)
        return opened(path)

    def send(self, version: Version, engines: Sequence[str], *, flush: bool) -> None:
        load(_folder(version), engines, flush=flush)

    def verify(self, version: Version, engines: Sequence[str]) -> list[Proof]:
        return verification.verify(version, engines)

    def kept(self, step: int) -> Folder | None:
        path = layout.version(self.folder, step)
        return opened(path) if (path / layout.MANIFEST).exists() else None

    def restore(self, version: Version, learner: Learner) -> None:
        learner.load_published(str(_folder(version).path))

    def prune(self, keep: set[str]) -> None:
        for path in layout.versions(self.folder)[: -self.newest or None]:
            if path.name not in keep:
                remove(path)


def _folder(version: Version) -> Folder:
    assert isinstance(version, Folder), f"{version.name} was not written to a disk"
    return version


def load(version: Folder, engines: Sequence[str], *, flush: bool) -> None:
    """Every engine loads the version from its folder. Raises EngineError that names those that could not.

    An engine that is not paused finishes its requests before. It never flushes within the update: then it ends by an
    assertion when anything is in it, be it paused requests or a health check that has just been answered (SGLang
    0.5.16). ``flush`` therefore asks for it afterwards, and waits for what is about to end.
    """
    body = {"model_path": str(version.path.resolve()), "weight_version": version.name, "flush_cache": False}

    def one(url: str) -> None:
        answer = engine_api.post(url, "/update_weights_from_disk", body, LOAD_TIMEOUT)
        try:
            said = answer.json()
        except ValueError:
            said = {"message": f"{answer.status_code} {answer.text[:300]}"}
        if not said.get("success"):
            raise EngineError(f"{url} could not load {version.path}: {said.get('message')}", "see the engine's log")
        if flush:
            engine_api.flush(url)

    engine_api.each(engines, one)


def remove(path: pathlib.Path) -> None:
    """Takes a version away, its manifest first so that it never looks whole."""
    (path / layout.MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path)
