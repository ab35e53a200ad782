"""An assistant's reasoning in a message: a field of its own, or the beginning of its content, up to ``</think>``."""

import re
from typing import Any

FIELDS = ("reasoning_content", "reasoning", "thinking")
OPENED = re.compile(r"<([\w:]*think(?:ing)?)>\s*\Z")
"""The end of a generation prompt that opens the reasoning."""
CLOSED = re.compile(r"</[\w:]*think(?:ing)?>\s*\Z")
"""The end of one that has ended it."""
TAG = "think"


def of_field(message: dict[str, Any]) -> str:
    """Empty where there is none."""
    return next((message[name] for name in FIELDS if isinstance(message.get(name), str)), "").strip()


def answer(message: dict[str, Any], tag: str = TAG) -> str:
    """The content without reasoning, with the white space that the row has."""
    return (message.get("content") or "").rpartition(f"</{tag}>")[2]


def of_content(message: dict[str, Any], tag: str = TAG) -> str | None:
    """The reasoning that begins the content, as the row has it but for ``<think>`` itself; None where there is none."""
    before, close, _ = (message.get("content") or "").rpartition(f"</{tag}>")
    return before.removeprefix(before.partition(f"<{tag}>")[0] + f"<{tag}>") if close else None


def of(message: dict[str, Any]) -> str:
    """The reasoning, wherever it is."""
    return of_field(message) or (of_content(message) or "").strip()


def without(message: dict[str, Any], tag: str = TAG) -> dict[str, Any]:
    """The message as if it had been answered at once."""
    rest = {name: value for name, value in message.items() if name not in FIELDS}
    return rest | {"content": answer(message, tag)} if isinstance(message.get("content"), str) else rest


def verbatim(message: dict[str, Any], body: str, tag: str = TAG) -> str:
    """The reasoning that begins the content, as the row has it, and ``body``, the turn without reasoning."""
    content = message["content"]
    rest = answer(message, tag)
    space = rest[: len(rest) - len(rest.lstrip())]
    return content[: len(content) - len(rest)] + space + body.lstrip()


def filled(message: dict[str, Any], opened: re.Match[str], body: str) -> str:
    """The text after a generation prompt that ends in ``opened``, ``<think>`` or the like: the message's reasoning, its
    end, and ``body``, the turn without reasoning."""
    tag = opened[1]
    close = f"</{tag}>"
    line = "\n" if opened[0].endswith("\n") else ""
    body = body.removeprefix(close)
    own = of_content(message, tag)
    if own is not None and not of_field(message):
        space = "" if answer(message, tag) else 2 * line
        return verbatim(message, space + body, tag).removeprefix(f"<{tag}>").removeprefix(line)
    return of_field(message) + line + close + 2 * line + body.lstrip("\n")
