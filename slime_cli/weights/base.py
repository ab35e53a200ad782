"""What a rank published last, against which it finds what has changed. Called by the rank alone.

The rank keeps its own share of the tensors, in a file without a name that is mapped: the system may take its pages out
of memory at any time, and nothing of it is left when the process ends. So an attempt's first version is always full.
"""

import concurrent.futures
import pathlib
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator
from typing import IO, Any

import msgspec
import numpy as np
import torch

from slime_cli import manifests
from slime_cli.errors import EngineError
from slime_cli.weights import encoding, publish, shards
from slime_cli.weights.transport import Part, Writing


class Base:
    """The share of one rank. ``version`` is None unless all of it is of one version."""

    def __init__(self) -> None:
        self.version: str | None = None
        self._file: IO[Any] | None = None
        self._tensors: dict[str, manifests.Tensor] = {}
        self._places: dict[str, tuple[int, int]] = {}

    def write(self, named: Iterable[tuple[str, torch.Tensor]], target: pathlib.Path, prefix: str, how: Writing) -> Part:
        """This rank's share ``named`` of the weights into ``target``, as ``how`` says. ``prefix``: of its files."""
        if how.base is not None:
            return self._delta(named, target, prefix, how)
        if how.keep:
            return self._full(named, target, prefix, how)
        return publish.write_part(named, target, prefix=prefix, buffer=how.buffer)

    def _full(self, named: Iterable[tuple[str, torch.Tensor]], target: pathlib.Path, prefix: str, how: Writing) -> Part:
        """Writes full weights into ``target``, and keeps them as the base of the next version."""
        self.version = None
        self._places = {}
        if self._file is not None:
            self._file.close()
        if how.scratch:
            pathlib.Path(how.scratch).mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=how.scratch, buffering=0)
        files = shards.Shards(target, f"model-{prefix}", buffer=how.buffer, digests=True)
        at = 0
        for name, tensor in named:
            data = files.add(name, tensor)
            shards.write_all(self._file, data)
            self._places[name] = at, data.nbytes
            at += data.nbytes
        self._tensors = files.close()
        self.version = target.name
        return Part(self._tensors)

    def _delta(
        self, named: Iterable[tuple[str, torch.Tensor]], target: pathlib.Path, prefix: str, how: Writing
    ) -> Part:
        """Writes what has changed since ``how.base``. Raises EngineError when that is not what is kept here."""
        if self._file is None or self.version is None or self.version != how.base:
            raise EngineError(
                f"{target}: a delta against {how.base}, and this rank keeps {self.version or 'nothing'}",
                "the same command resumes from the last commit, with full weights",
            )
        self.version = None  # until all of it is of the new one
        kept = np.memmap(self._file, np.uint8, "r+")
        name_of_file = f"delta-{prefix.rstrip('-') or '00000'}.patch"
        tensors: dict[str, manifests.Tensor] = {}
        patches: dict[str, manifests.Patch] = {}
        changes = _Changes(how)
        with open(target / name_of_file, "wb", buffering=0) as file:
            at = 0
            for name, tensor in named:
                old = self._base_of(name, tensor, kept)
                data = shards.content(tensor)
                patch = changes.of(old, data, tensor.element_size())
                entry = self._tensors[name]
                if patch:
                    shards.write_all(file, np.frombuffer(patch, np.uint8))
                    patches[name] = manifests.Patch(
                        file=name_of_file, begin=at, size=len(patch), digest=encoding.digest(patch)
                    )
                    at += len(patch)
                    entry = msgspec.structs.replace(entry, checksum=shards.checksum(data), digest=encoding.digest(data))
                tensors[name] = entry
        if tensors.keys() != self._tensors.keys():
            raise EngineError(f"{target}: the model has other tensors than {how.base}", "this is a defect: report it")
        changes.close()
        self._tensors = tensors
        self.version = target.name
        return Part({name: msgspec.structs.replace(entry, file="") for name, entry in tensors.items()}, patches)

    def _base_of(self, name: str, tensor: torch.Tensor, kept: np.memmap) -> np.ndarray:
        begin, size = self._places.get(name, (0, -1))
        known = self._tensors.get(name)
        dtype = str(tensor.dtype).removeprefix("torch.")
        if known is None or size != tensor.nbytes or known.dtype != dtype:
            raise EngineError(f"{name} is of another type or shape than before", "this is a defect: report it")
        return kept[begin : begin + size]


class _Changes:
    """Patches of tensors, chunk by chunk in threads; the base takes the new bytes meanwhile."""

    def __init__(self, how: Writing) -> None:
        assert how.encoding in ("xor", "overwrite")
        self.encoding: encoding.Encoding = how.encoding
        self.ahead = max(1, how.buffer // encoding.CHUNK)
        self._pool = concurrent.futures.ThreadPoolExecutor(max(1, torch.get_num_threads()))

    def of(self, old: np.ndarray, new: np.ndarray, size: int) -> bytes:
        """Empty where nothing has changed."""
        found = list(self._records(old.view(encoding.unsigned(size)), new.view(encoding.unsigned(size))))
        return b"".join(found) if any(part[0] != encoding.Kind.SAME for part in found) else b""

    def _records(self, old: np.ndarray, new: np.ndarray) -> Iterator[bytes]:
        step = encoding.CHUNK // old.itemsize

        def one(at: int) -> bytes:
            was, now = old[at : at + step], new[at : at + step]
            made = encoding.record(was, now, self.encoding)
            if made[0] != encoding.Kind.SAME:
                was[:] = now
            return made

        jobs: deque[concurrent.futures.Future[bytes]] = deque()
        for at in range(0, len(old), step):
            jobs.append(self._pool.submit(one, at))
            if len(jobs) >= self.ahead:
                yield jobs.popleft().result()
        while jobs:
            yield jobs.popleft().result()

    def close(self) -> None:
        self._pool.shutdown()
