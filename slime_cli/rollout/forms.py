"""The forms of a message among which a chat template decides: content that is null or empty, a tool call's arguments
as an object or as JSON text, the name of the field that holds reasoning. Caller: :mod:`slime_cli.rollout.chat`.

Data sets have any of these, and a template that is given the other one raises, or writes nonsense: the word
None, JSON text in quotes, an object as Python shows it, nothing. What renders well stays as the row has it."""

import json
from collections.abc import Callable, Iterator
from typing import Any

from slime_cli.buffer.types import RowError
from slime_cli.rollout import reasoning

Messages = list[dict[str, Any]]
Render = Callable[[Messages], str]
"""Raises RowError."""


def settled(messages: Messages, render: Render) -> Messages:
    """``messages`` in the form that the template takes; as they are where it takes none."""
    messages = _reasoning(messages, render)
    if not any(message.get("tool_calls") for message in messages):
        return _contents(messages, render)
    first = None
    for form in _arguments(messages):
        candidate = _contents(form, render)
        first = first or candidate
        text = _text(candidate, render)
        if text is not None and not _miswritten(candidate, text):
            return candidate
    return first or messages


def _text(messages: Messages, render: Render) -> str | None:
    try:
        return render(messages)
    except RowError:
        return None


def _contents(messages: Messages, render: Render) -> Messages:
    """Null contents become empty text, but for templates that look for null: where the two differ in more than that
    word."""
    for i, message in enumerate(messages):
        if message.get("content") is None:
            empty = [*messages[:i], message | {"content": ""}, *messages[i + 1 :]]
            given = _text(messages, render)
            if given is None or _but_for_null(given) == _but_for_null(_text(empty, render) or ""):
                messages = empty
    return messages


def _but_for_null(text: str) -> str:
    """Without the words in which templates write null, without quotes and white space."""
    for word in ("None", "null", '"'):
        text = text.replace(word, "")
    return "".join(text.split())


def _reasoning(messages: Messages, render: Render) -> Messages:
    """Under the name that the template reads, as far as the first message with reasoning shows that."""
    i, own = next(((i, name) for i, m in enumerate(messages) for name in reasoning.FIELDS if m.get(name)), (0, ""))
    if not own:
        return messages
    head = _contents(messages[:i], render)
    bare = reasoning.without(messages[i]) | {"content": messages[i].get("content") or ""}
    without = _text([*head, bare], render)
    for name in (own, *reasoning.FIELDS):
        if (text := _text([*head, bare | {name: messages[i][own]}], render)) is not None and text != without:
            return [_renamed(message, own, name) for message in messages]
    return messages


def _renamed(message: dict[str, Any], own: str, name: str) -> dict[str, Any]:
    return {name if key == own else key: value for key, value in message.items()} if own in message else message


def _arguments(messages: Messages) -> Iterator[Messages]:
    """As they are, with objects for arguments, with JSON text."""
    yield messages
    for change in (_object, _json):
        yield [_with(message, change) for message in messages]


def _with(message: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    if not calls(message):
        return message
    return message | {"tool_calls": [_changed(call, change) for call in calls(message)]}


def calls(message: dict[str, Any]) -> list[dict[str, Any]]:
    """A message's tool calls."""
    return message.get("tool_calls") or []


def function(call: dict[str, Any]) -> dict[str, Any]:
    """Name and arguments of a tool call, which some data sets nest and some do not."""
    return call.get("function", call)


def _changed(call: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    inner = function(call)
    if "arguments" not in inner:
        return call
    inner = inner | {"arguments": change(inner["arguments"])}
    return call | {"function": inner} if "function" in call else inner


def _object(arguments: Any) -> Any:
    try:
        found = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments
    return found if isinstance(found, dict) else arguments


def _json(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _miswritten(messages: Messages, text: str) -> bool:
    """True where a call's arguments are in the text as JSON text in quotes, or as Python shows an object."""
    given = [function(call).get("arguments") for message in messages for call in calls(message)]
    quoted = [json.dumps(one, ensure_ascii=False) for one in given if isinstance(one, str)]
    shown = [repr(one) for one in given if isinstance(one, dict) and repr(one) != json.dumps(one, ensure_ascii=False)]
    return any(wrong in text for wrong in (*quoted, *shown))
