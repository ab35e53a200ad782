"""What a reward pool and its workers send each other: a 4-byte length and a pickle."""

import dataclasses
import pickle
import struct
from typing import Any

LENGTH = struct.Struct("<I")


@dataclasses.dataclass(frozen=True, slots=True)
class RewardFailure:
    """Why a sample has no reward: a value, not an exception, so that its siblings go on."""

    kind: str
    """``timeout``, ``error`` (it raised), ``crash`` (the worker died) or ``bad_value``."""
    detail: str
    trace: str = ""
    """What it raised, with the lines of the user's code."""


def encode(message: Any) -> bytes:
    data = pickle.dumps(message, protocol=5)
    return LENGTH.pack(len(data)) + data


def decode(buffer: bytearray) -> list[Any]:
    """Takes the whole messages off the front of ``buffer``."""
    out = []
    place = 0
    while len(buffer) - place >= LENGTH.size:
        (size,) = LENGTH.unpack_from(buffer, place)
        if len(buffer) - place - LENGTH.size < size:
            break
        out.append(pickle.loads(memoryview(buffer)[place + LENGTH.size : place + LENGTH.size + size]))
        place += LENGTH.size + size
    del buffer[:place]
    return out
