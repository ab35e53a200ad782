"""Messages between a reward pool and its workers: a 4-byte length and a pickle."""

import pickle
import struct
from typing import Any

LENGTH = struct.Struct("<I")


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
