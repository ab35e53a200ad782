"""Values of users as plain ones, and which of them a run can keep.

What a row carries and what a user's function leaves in a sample goes into the journal (MessagePack), a batch's file
(JSON text) and
through the pipe of a reward worker. Callers: prompt sources, samples, hooks, reward workers. Invariant: what
:func:`unstorable`
finds nothing wrong with, all of these take.
"""

import dataclasses
import json
from typing import Any

import msgspec

_pack = msgspec.msgpack.Encoder().encode


class NotPlain(TypeError):
    """A value that has no plain form."""


def plain(value: Any) -> Any:
    """Numbers, text, lists, tuples and dicts of them; arrays and tensors become numbers and lists; else NotPlain."""
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if isinstance(value, dict):
        return {plain(key): plain(part) for key, part in value.items()}
    if isinstance(value, list):
        return [plain(part) for part in value]
    if isinstance(value, tuple):
        return tuple(plain(part) for part in value)
    if isinstance(value, str):
        return str.__str__(value)  # an enumeration's own text is its name
    for base in (int, float):
        if isinstance(value, base):
            return base(value)
    listed = value.tolist() if hasattr(value, "tolist") else value
    if type(listed) is not type(value):  # numpy leaves what Python has no number for as it is
        return plain(listed)
    raise NotPlain(f"{type(value).__name__} {value!r:.200} is no plain value")


def unstorable(value: Any) -> str | None:
    """Why a run can't keep the value: a type that JSON lacks, an integer beyond 64 bits, text that is no Unicode."""
    try:
        json.dumps(value)
        _pack(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        return str(error)
    return None


@dataclasses.dataclass(frozen=True, slots=True)
class RewardFailure:
    """Why a sample has no reward: a value, not an exception, so that its siblings are scored."""

    kind: str
    """``timeout``, ``error`` (it raised), ``crash`` (the worker died) or ``bad_value``."""
    detail: str
    trace: str = ""
    """The exception, with the lines of the user's code."""
