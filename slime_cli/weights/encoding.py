"""What changed between two versions of a tensor, as bytes. Torch-free; called by the ranks that write a delta and by
whoever applies one.

A patch is a sequence of records, one for each :data:`CHUNK` bytes of the tensor: a kind, a length and a body. ``xor``
(new ^ old) must meet exactly its base; ``overwrite`` (places and new values) gives the same when it is applied twice.
Bodies are zstd of byte planes: all first bytes of the elements, then all second ones. The high bytes of weights rarely
change, so those planes are zeros, and a delta of 1 % of a bf16 model's values has 1.3 % of its bytes. A chunk whose
delta would be no shorter is stored whole, so that a version is never longer than a full one by more than its records.
"""

import enum
import struct
from collections.abc import Iterator
from typing import Literal

import numpy as np
import xxhash
import zstandard

from slime_cli.errors import DataError

Encoding = Literal["xor", "overwrite"]
CHUNK = 8 << 20
"""Bytes of a tensor in a record; a multiple of every element's size. Part of the format."""
_RECORD = struct.Struct("<BI")
_COUNTS = struct.Struct("<II")
_LEVEL = 1
_LONG = 255
"""A distance that is not below this is written apart, in four bytes."""


class Kind(enum.IntEnum):
    """How a record makes a chunk of the base's."""

    SAME = 0
    XOR = 1
    OVERWRITE = 2
    WHOLE = 3


def digest(data: bytes | memoryview | np.ndarray) -> str:
    """xxh3-128 in hex: the sum by which patches and what they make are checked."""
    return xxhash.xxh3_128_hexdigest(data)


def record(old: np.ndarray, new: np.ndarray, encoding: Encoding) -> bytes:
    """One record: ``old`` and ``new`` are a chunk's elements as unsigned integers."""
    changed = old ^ new
    if encoding == "xor":
        body = _compressed(_planes(changed)) if changed.any() else b""
        kind = Kind.XOR if body else Kind.SAME
    else:
        places = np.flatnonzero(changed)
        body = _compressed(_overwrite(places, new[places])) if len(places) else b""
        kind = Kind.OVERWRITE if body else Kind.SAME
    if len(body) >= new.nbytes:
        kind, body = Kind.WHOLE, new.tobytes()
    return _RECORD.pack(kind, len(body)) + body


def records(patch: memoryview, where: str) -> Iterator[tuple[Kind, memoryview]]:
    """The records of a tensor's patch, in order. Raises DataError for one that is cut off."""
    at = 0
    while at < len(patch):
        try:
            number, size = _RECORD.unpack_from(patch, at)
            kind = Kind(number)
        except (struct.error, ValueError) as error:
            raise _damaged(where, error) from None
        at += _RECORD.size
        if at + size > len(patch):
            raise _damaged(where, "cut off")
        yield kind, patch[at : at + size]
        at += size


def apply(kind: Kind, body: memoryview, chunk: np.ndarray, where: str) -> None:
    """Makes the new elements of the base's, in place. Raises DataError for a body that cannot be of this chunk."""
    try:
        if kind is Kind.XOR:
            chunk ^= _elements(_expanded(body, chunk.nbytes), chunk.dtype, len(chunk))
        elif kind is Kind.OVERWRITE:
            places, values = _overwritten(_expanded(body, _COUNTS.size + 5 * len(chunk) + chunk.nbytes), chunk.dtype)
            chunk[places] = values
        elif kind is Kind.WHOLE:
            chunk[:] = np.frombuffer(body, chunk.dtype)
    except (zstandard.ZstdError, struct.error, ValueError, IndexError) as error:
        raise _damaged(where, error) from None


def unsigned(size: int) -> np.dtype:
    """Elements of ``size`` bytes as numbers whose bits are compared: NaN is equal to itself, and -0 is not 0."""
    return np.dtype(f"u{size}")


def _damaged(where: str, why: object) -> DataError:
    return DataError(f"{where}: not a patch ({why})", "publish the version again")


def _planes(elements: np.ndarray) -> bytes:
    return elements.view(np.uint8).reshape(len(elements), -1).T.tobytes()


def _elements(planes: bytes | memoryview, dtype: np.dtype, count: int) -> np.ndarray:
    return np.ascontiguousarray(np.frombuffer(planes, np.uint8).reshape(dtype.itemsize, count).T).view(dtype)[:, 0]


def _overwrite(places: np.ndarray, values: np.ndarray) -> bytes:
    """Counts, distances from place to place, the long ones among them, values."""
    distances = np.diff(places, prepend=-1)
    long = distances >= _LONG
    short = np.where(long, _LONG, distances).astype(np.uint8)
    far = distances[long].astype("<u4")
    return _COUNTS.pack(len(places), len(far)) + short.tobytes() + far.tobytes() + _planes(values)


def _overwritten(content: bytes, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    count, long = _COUNTS.unpack_from(content)
    at = _COUNTS.size
    distances = np.frombuffer(content, np.uint8, count, at).astype(np.int64)
    far = np.frombuffer(content, "<u4", long, at + count)
    distances[distances == _LONG] = far
    return np.cumsum(distances) - 1, _elements(memoryview(content)[at + count + 4 * long :], dtype, count)


def _compressed(content: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=_LEVEL).compress(content)


def _expanded(body: memoryview, most: int) -> bytes:
    """What says that it is longer than ``most`` is not expanded."""
    if zstandard.get_frame_parameters(body).content_size > most:
        raise ValueError("too long")
    return zstandard.ZstdDecompressor().decompress(body)
