"""A whole version on a disk near the engines, brought from one version to the next by deltas. Torch-free.

A delta is of use only together with its base, so there is a copy: a folder of full weights that engines load, changed
in place. It is whole when its manifest is there, like any version; while patches are applied the manifest has another
name (:data:`PATCHING`). Nothing is served that was not checked: patches before the copy is touched, every tensor of the
copy after it. A copy that is wrong or was left half patched is made anew from the chain's full version, and that is
said. Called by transports and by ``slime sync``.
"""

import concurrent.futures
import hashlib
import math
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np
import xxhash

from slime_cli import disk, locks, manifests
from slime_cli.errors import DataError, UsageError
from slime_cli.manifests import layout
from slime_cli.models import headers
from slime_cli.weights import encoding
from slime_cli.weights.folder import Folder, opened, place

PATCHING = "patching.json"
"""The manifest of the base, while a version's patches are applied to it."""
THREADS = min(8, os.cpu_count() or 1)


def identity(manifest: manifests.Weights) -> str:
    """A version by its tensors: two of the same name may be of different weights."""
    whole = xxhash.xxh3_128()
    for name in sorted(manifest.tensors):
        tensor = manifest.tensors[name]
        whole.update(f"{name} {tensor.dtype} {tensor.shape} {tensor.digest or tensor.checksum}\n".encode())
    return whole.hexdigest()


def chain(version: Folder) -> list[Folder]:
    """The full version that ``version`` began with, and every delta up to it. Raises DataError for a base that is
    missing or another one than the delta was made against."""
    found = [version]
    while (base := found[0].manifest.base) is not None:
        path = found[0].path.parent / base
        try:
            before = opened(path)
        except DataError as error:
            raise DataError(f"{found[0].path} applies to {base}, which is not there: {error.message}", _AGAIN) from None
        _fits(found[0], before.manifest, str(path))
        if before in found:
            raise DataError(f"{version.path}: its bases lead back to {base}", _AGAIN)
        found.insert(0, before)
    return found


_AGAIN = "publish a full version"


def _fits(delta: Folder, base: manifests.Weights, where: str) -> None:
    if base.version != delta.manifest.base or identity(base) != delta.manifest.base_digest:
        raise DataError(
            f"{delta.path} applies to {delta.manifest.base}, and {where} holds "
            + (f"{base.version}" if base.version != delta.manifest.base else "other weights of that name"),
            _AGAIN,
        )


class Copy:
    """Held by one process at a time, until :meth:`close` or its end."""

    def __init__(self, path: pathlib.Path, say: Callable[[str], None]) -> None:
        self.path = path
        self.say = say
        self._lock: int | None = None

    def bring(self, chain: Sequence[Folder]) -> Folder:
        """The copy at the last version of ``chain``, checked tensor by tensor."""
        self._hold()
        with disk.naming(self.path):
            try:
                copy = self._forward(chain)
                self._check(copy)
            except _WrongError as wrong:
                self.say(f"{self.path} {wrong}: made anew from {chain[0].name}")
                copy = self._anew(chain)
                try:
                    self._check(copy)
                except _WrongError as error:
                    raise DataError(f"{chain[-1].path}: what it makes {error}", _AGAIN) from None
        return copy

    def _forward(self, chain: Sequence[Folder]) -> Folder:
        """From what the copy holds, where that is in the chain, else from the beginning."""
        steps = [identity(version.manifest) for version in chain]
        held = self._manifest(layout.MANIFEST)
        half = None if held is not None else self._manifest(PATCHING)
        found = held or half
        at = steps.index(identity(found)) if found is not None and identity(found) in steps else None
        if half is not None and not (at is not None and self._again(chain[at + 1 :])):
            raise _WrongError("was left half patched")
        if found is None or at is None:
            return self._anew(chain)
        return self._through(Folder(self.path, found.version, found), chain[at + 1 :], chain[-1])

    def _again(self, left: Sequence[Folder]) -> bool:
        """What was applied in part can be applied once more: ``overwrite`` gives the same again."""
        return bool(left) and left[0].manifest.encoding == "overwrite"

    def _through(self, copy: Folder, deltas: Sequence[Folder], last: Folder) -> Folder:
        """Under the name that the caller gave the last version."""
        for delta in deltas:
            copy = self._patch(copy, delta)
        return Folder(self.path, last.name, copy.manifest)

    def _anew(self, chain: Sequence[Folder]) -> Folder:
        first = chain[0]
        (self.path / layout.MANIFEST).unlink(missing_ok=True)
        for path in self.path.iterdir():
            if path.is_file() and path.name != layout.LOCK:
                path.unlink()
        for path in first.path.iterdir():
            if path.is_file() and path.name not in (layout.MANIFEST, layout.LOCK):
                shutil.copyfile(path, self.path / path.name)
        manifests.write(self.path / layout.MANIFEST, first.manifest)
        return self._through(Folder(self.path, first.name, first.manifest), chain[1:], chain[-1])

    def _patch(self, copy: Folder, delta: Folder) -> Folder:
        """Applies a delta in place. Raises DataError before anything is changed for what does not fit or is damaged."""
        base = copy.manifest
        _fits(delta, base, str(self.path))
        patches = _Patches(delta)
        tensors = {
            name: msgspec.structs.replace(tensor, file=base.tensors[name].file)
            for name, tensor in delta.manifest.tensors.items()
        }
        manifest = msgspec.structs.replace(
            delta.manifest, base=None, base_digest="", encoding="full", tensors=tensors, patches={}
        )
        if (self.path / layout.MANIFEST).exists():
            os.replace(self.path / layout.MANIFEST, self.path / PATCHING)
        with _Files(self.path) as files:
            for name, patch in patches:
                files.apply(patch, name, tensors[name], str(delta.path / delta.manifest.patches[name].file))
        manifests.write(self.path / layout.MANIFEST, manifest)
        (self.path / PATCHING).unlink(missing_ok=True)
        return Folder(self.path, delta.name, manifest)

    def _check(self, copy: Folder) -> None:
        """Raises _WrongError unless every tensor is what was published."""

        def wrong(name: str) -> bool:
            tensor = copy.manifest.tensors[name]
            found = xxhash.xxh3_128() if tensor.digest else hashlib.sha256()
            try:
                for chunk in copy.chunks(name):
                    found.update(chunk)
            except DataError:
                return True
            return not (tensor.digest or tensor.checksum) == found.hexdigest()[: len(tensor.digest or tensor.checksum)]

        names = list(copy.manifest.tensors)
        with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
            bad = [name for name, is_wrong in zip(names, pool.map(wrong, names), strict=True) if is_wrong]
        if bad:
            (self.path / layout.MANIFEST).unlink(missing_ok=True)
            raise _WrongError(f"is not {copy.name} in {len(bad)} tensors, {bad[0]} first")

    def _manifest(self, name: str) -> manifests.Weights | None:
        try:
            return manifests.read(self.path / name, manifests.Weights)
        except DataError:
            return None

    def _hold(self) -> None:
        if self._lock is not None:
            return
        with disk.naming(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        try:
            self._lock = locks.take(self.path / layout.LOCK)
        except locks.TakenError:
            raise UsageError(
                f"{self.path} is kept by another process, which brings its own versions there",
                "give this one a folder of its own: --update-weight-local-checkpoint-dir",
            ) from None

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class _WrongError(Exception):
    """The copy is not what it should be; the text completes its name."""


class _Patches:
    """A delta's patches with their tensors' names, all of them checked when this is made."""

    def __init__(self, delta: Folder) -> None:
        self.delta = delta
        for name, patch in delta.manifest.patches.items():
            if encoding.digest(self._read(patch)) != patch.digest:
                raise DataError(f"{delta.path / patch.file}: what it has of {name} is not what was published", _AGAIN)

    def _read(self, patch: manifests.Patch) -> bytes:
        file = self.delta.path / patch.file
        try:
            with open(file, "rb") as content:
                content.seek(patch.begin)
                found = content.read(patch.size)
        except OSError as error:
            raise DataError(f"{file}: {error.strerror}", _AGAIN) from None
        if len(found) < patch.size:
            raise DataError(f"{file}: cut off", _AGAIN)
        return found

    def __iter__(self) -> Iterator[tuple[str, bytes]]:
        for name, patch in self.delta.manifest.patches.items():
            yield name, self._read(patch)


class _Files:
    """Files of a copy, mapped to be changed in place."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self._mapped: dict[str, np.memmap] = {}

    def __enter__(self) -> "_Files":
        self._pool = concurrent.futures.ThreadPoolExecutor(THREADS)
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def apply(self, patch: bytes, name: str, tensor: manifests.Tensor, where: str) -> None:
        try:
            begin, end = place(self.folder / tensor.file, name)
        except DataError as error:
            raise _WrongError(f"is damaged ({error.message})") from None
        if tensor.file not in self._mapped:
            self._mapped[tensor.file] = np.memmap(self.folder / tensor.file, np.uint8, "r+")
        size = (end - begin) // max(1, math.prod(tensor.shape))
        elements = self._mapped[tensor.file][begin:end].view(encoding.unsigned(size))
        step = encoding.CHUNK // size
        chunks = [elements[at : at + step] for at in range(0, len(elements), step)]
        records = list(encoding.records(memoryview(patch), where))
        if len(records) != len(chunks):
            raise DataError(f"{where}: not a patch of {name}, which has {end - begin:,} bytes", _AGAIN)
        jobs = [
            self._pool.submit(encoding.apply, kind, body, chunk, where)
            for (kind, body), chunk in zip(records, chunks, strict=True)
        ]
        for job in jobs:
            job.result()


def is_whole(version: Folder) -> bool:
    """Whether every version that it needs is there, and every file of theirs."""
    try:
        return all(_complete(step) for step in chain(version))
    except DataError:
        return False


def _complete(version: Folder) -> bool:
    if version.manifest.base is None:
        try:
            headers.read(version.path)
        except ValueError:
            return False
        return True
    ends: dict[str, int] = {}
    for patch in version.manifest.patches.values():
        ends[patch.file] = max(ends.get(patch.file, 0), patch.begin + patch.size)
    sizes = {path.name: path.stat().st_size for path in version.path.iterdir()}
    return all(sizes.get(file, -1) >= end for file, end in ends.items())
