"""The functions by which engines sum up a tensor's bytes, computed here chunk by chunk. Torch-free.

SGLang (``/weights_checker``) takes SHA-256 of a tensor on a CPU. On a GPU it mixes each 32-bit word with its place in
the tensor (murmur's 32-bit finalizer, with two seeds), adds up the words of a tile, mixes that with the tensor's size,
adds up the tiles in 64 bits and mixes once more (splitmix64). Tiles add up in any order and the size comes last, so a
tensor is summed up as it is read. Another version may have another function there, by which every tensor would look
wrong: :func:`function` gives those that a test compares with the genuine ones.
:mod:`slime_cli.weights.verification` is the caller.
"""

import hashlib
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]

_TILES_IN = ("0.5.16",)
"""SGLang versions whose sum on a GPU is :class:`Tiles`."""
_TILE = 8192
"""Words of a tile."""
_BLOCK = 8 * _TILE
"""Words that are mixed at a time: they and what is made of them fit a core's cache."""
_SEED = 0x243F6A88
MIXES = ((_SEED, 0x27D4EB2D, 15), (((_SEED * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF, 0x165667B1, 13))
"""For each half of a sum: its seed, and the factor and rotation by which a word's place goes into it."""
FINALIZER = ((16, 0x85EBCA6B), (13, 0xC2B2AE35))
"""Murmur's: shift and factor of its steps."""
ALL_64 = (1 << 64) - 1


class Sum(Protocol):
    """A tensor's bytes go in, in order; then the sum, as the engine writes it."""

    def update(self, data: bytes) -> None: ...

    def text(self) -> str: ...


def function(server: dict[str, Any]) -> type[Sum] | None:
    """What an engine (its ``/server_info``) sums up its tensors by; None where that is not known."""
    if server.get("device") == "cpu":
        return Sha
    known = str(server.get("device")).startswith("cuda") and server.get("version") in _TILES_IN
    return Tiles if known else None


class Sha:
    """The first 8 bytes of SHA-256, which is also what manifests hold."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def update(self, data: bytes) -> None:
        self._hash.update(data)

    def text(self) -> str:
        return self._hash.digest()[:8].hex()


class Tiles:
    """What a GPU sums up."""

    def __init__(self) -> None:
        self._rest = b""
        """Less than a tile, behind those that are done."""
        self._done = 0
        """Words of whole tiles."""
        self._halves: tuple[list[Words], list[Words]] = ([], [])

    def update(self, data: bytes) -> None:
        data = self._rest + data if self._rest else data
        whole = len(data) // (4 * _TILE) * _TILE
        for at in range(0, whole, _BLOCK):
            self._mix(np.frombuffer(data, "<u4", min(_BLOCK, whole - at), 4 * at))
        self._rest = bytes(memoryview(data)[4 * whole :])

    def text(self) -> str:
        rest = self._rest + bytes(-len(self._rest) % 4)
        halves = [list(half) for half in self._halves]
        words = self._done + len(rest) // 4
        if not words:
            return f"{0:016x}"
        if rest:
            last = np.frombuffer(rest, "<u4")
            for half, mix in zip(halves, MIXES, strict=True):
                half.append(_added(_placed(last, self._done, *mix)[None]))
        size = np.uint32(4 * words & 0xFFFFFFFF)
        high, low = (_finalised(np.concatenate(half) ^ size).astype(np.uint64) for half in halves)
        added = (high << np.uint64(32)) | low
        return f"{splitmix(int(added.sum(dtype=np.uint64))):016x}"

    def _mix(self, words: Words) -> None:
        """Whole tiles."""
        for half, mix in zip(self._halves, MIXES, strict=True):
            half.append(_added(_placed(words, self._done, *mix).reshape(-1, _TILE)))
        self._done += len(words)


NAMES: dict[str, type[Sum]] = {function.__name__: function for function in (Sha, Tiles)}


def _placed(words: Words, first: int, seed: int, factor: int, rotation: int) -> Words:
    """Each word mixed with its place; ``first`` is that of the first one."""
    places = np.arange(first, first + len(words), dtype=np.uint64).astype(np.uint32)
    turned = places >> np.uint32(32 - rotation)
    turned |= places << np.uint32(rotation)
    places *= np.uint32(factor)
    places += np.uint32(seed)
    places ^= turned
    places ^= words
    return _finalised(places)


def _finalised(words: Words) -> Words:
    """Murmur's 32-bit finalizer, in place."""
    for shift, factor in FINALIZER:
        words ^= words >> np.uint32(shift)
        words *= np.uint32(factor)
    words ^= words >> np.uint32(16)
    return words


def _added(tiles: Words) -> Words:
    return tiles.sum(axis=1, dtype=np.uint32)


def splitmix(word: int) -> int:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        word = (word ^ word >> shift) * factor & ALL_64
    return word ^ word >> 31
