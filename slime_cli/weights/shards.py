"""Tensors into safetensors files, one after the other as they come: hashed while they are written, never collected.

The header of such a file stands first and says where each tensor lies, which is known last. So room is left for it, and
a file ends when that is used up. Called by the ranks that write a version.
"""

import collections
import concurrent.futures
import hashlib
import json
import pathlib
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from slime_cli import manifests
from slime_cli.weights import encoding
from slime_cli.weights.reading import shortened

HEADER = 1 << 17
"""Bytes left for a header: a thousand tensors or so. Spaces fill it, as the format allows."""
SHARD_BYTES = 4 * 2**30
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def content(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's bytes."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def checksum(data: np.ndarray) -> str:
    """First 8 bytes of SHA-256, in hex: what SGLang's weight checker reports on a CPU."""
    return shortened(hashlib.sha256(memoryview(data)))


class Hashing:
    """Sums of tensors in threads. At most ``most`` bytes of tensors wait for theirs."""

    def __init__(self, most: int, digests: bool) -> None:
        self.most = most
        self.digests = digests
        self._pool = concurrent.futures.ThreadPoolExecutor(max(1, torch.get_num_threads()))
        self._waiting: collections.deque[tuple[concurrent.futures.Future[None], int]] = collections.deque()
        self._size = 0

    def start(self, data: np.ndarray, done: Callable[[str, str], None]) -> None:
        """``done`` gets the checksum and the digest, in a thread, before :meth:`close` returns."""

        def sums() -> None:
            done(checksum(data), encoding.digest(data) if self.digests else "")

        self._waiting.append((self._pool.submit(sums), data.nbytes))
        self._size += data.nbytes
        while self._size > self.most:
            self._wait()

    def _wait(self) -> None:
        job, size = self._waiting.popleft()
        job.result()
        self._size -= size

    def close(self) -> None:
        while self._waiting:
            self._wait()
        self._pool.shutdown()


class Shards:
    """``prefix`` begins the files' names, which is another one on every rank."""

    def __init__(self, folder: pathlib.Path, prefix: str, *, buffer: int, digests: bool = False) -> None:
        self.folder = folder
        self.prefix = prefix
        self._tensors: dict[str, manifests.Tensor] = {}
        self._names: list[str] = []
        self._hashing = Hashing(buffer, digests)
        self._written = 0
        self._open()

    def _open(self) -> None:
        self._name = f"{self.prefix}{self._written:05d}.safetensors"
        self._file = open(self.folder / self._name, "wb", buffering=0)
        self._file.seek(HEADER + 8)
        self._entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._room = HEADER - len(json.dumps(self._entries))
        self._size = 0

    def add(self, name: str, tensor: torch.Tensor) -> np.ndarray:
        """Writes the tensor; its bytes, for whoever needs them as well."""
        data = content(tensor)
        entry = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [self._size, self._size + data.nbytes],
        }
        length = len(json.dumps({name: entry})) + 32  # the offsets of another file may have more digits
        if self._size and (self._size + data.nbytes > SHARD_BYTES or length > self._room):
            self._end()
            self._open()
            entry["data_offsets"] = [0, data.nbytes]
        file = self._name

        def done(checksum: str, digest: str) -> None:
            self._tensors[name] = manifests.Tensor(
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=list(tensor.shape),
                file=file,
                checksum=checksum,
                digest=digest,
            )

        self._names.append(name)
        self._hashing.start(data, done)
        write_all(self._file, data)
        self._entries[name] = entry
        self._room -= length
        self._size += data.nbytes
        return data

    def _end(self) -> None:
        header = json.dumps(self._entries).encode()
        if len(header) > HEADER:
            raise ValueError(f"{self._name}: names of tensors take {len(header):,} bytes, more than {HEADER:,}")
        self._file.seek(0)
        write_all(self._file, np.frombuffer(struct.pack("<Q", HEADER) + header.ljust(HEADER), np.uint8))
        self._file.close()
        (self.folder / self._name).chmod(0o644)  # engines of other users read it
        self._written += 1

    def close(self) -> dict[str, manifests.Tensor]:
        """Every tensor and its file, once all are written and summed up."""
        self._hashing.close()
        self._end()
        if not self._size:  # nothing is this rank's
            (self.folder / self._name).unlink()
        return {name: self._tensors[name] for name in self._names}


def write_all(file: Any, data: np.ndarray) -> None:
    """An unbuffered file takes 2 GiB at a time."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]
