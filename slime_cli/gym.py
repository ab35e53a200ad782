"""reasoning-gym's tasks: made by the source that deals their questions, and again by the grader of the answers.

Invariant: ``thaw(freeze(x)) == x``, types included, for what an entry holds; the frozen form is plain JSON, which a
journal keeps. Importing this module does not import reasoning_gym (seconds); :func:`load_library` does.
"""

import enum
import warnings
from typing import Any

from slime_cli.errors import DataError


def load_library() -> Any:
    """The reasoning_gym module; its own syntax warnings are not the user's business."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import reasoning_gym
    return reasoning_gym


def make_task(task: str, arguments: dict[str, Any]) -> Any:
    """The task's data set, which also scores answers (some verifiers read the configuration)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load_library().create_dataset(task, **arguments)


def freeze(value: Any) -> Any:
    """Plain JSON values that :func:`thaw` turns back exactly: some verifiers tell tuple from list, or 1 from "1"."""
    if isinstance(value, enum.Enum):
        return freeze(value.value)
    if value is None:
        return None
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, list):
        return [freeze(part) for part in value]
    if isinstance(value, tuple | set | frozenset):
        kind = "tuple" if isinstance(value, tuple) else "set"
        return {"__kind__": kind, "items": [freeze(part) for part in value]}
    if isinstance(value, dict):
        if all(type(key) is str for key in value) and "__kind__" not in value:
            return {key: freeze(part) for key, part in value.items()}
        return {"__kind__": "dict", "items": [[freeze(key), freeze(part)] for key, part in value.items()]}
    if hasattr(value, "tolist"):
        return freeze(value.tolist())
    raise DataError(
        f"reasoning-gym: an entry holds {type(value).__name__}, which cannot be stored", "choose another task"
    )


def thaw(value: Any) -> Any:
    """Inverse of :func:`freeze`; plain values pass through."""
    if isinstance(value, list):
        return [thaw(part) for part in value]
    if not isinstance(value, dict):
        return value
    kind = value.get("__kind__")
    if kind == "tuple":
        return tuple(thaw(part) for part in value["items"])
    if kind == "set":
        return {thaw(part) for part in value["items"]}
    if kind == "dict":
        return {thaw(key): thaw(part) for key, part in value["items"]}
    return {key: thaw(part) for key, part in value.items()}
