"""Chat messages and tools of a row, checked and in one shape. Caller: the row contract of source_base.

After :func:`as_messages` every message has a ``role`` that is one word and a ``content`` that is text or null: a list
of text parts became its text. Null stands only where a message may say nothing, because it calls tools, reasons, or is
the answer of a tool; the renderer decides how a template is given it. Any other field of a message that is null is left
out: in the API that such messages come from, ``"tool_calls": null`` means that there are none."""

import re
from typing import Any

import msgspec

ROLE = re.compile(r"[\w.-]+")
"""Templates write a role between the characters of a control token; one word cannot close that token and begin
another."""
TEXT_PARTS = (None, "text", "input_text", "output_text")
SAYS_NOTHING = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
"""Fields beside which a message needs no content."""


class RowProblem(Exception):
    """Internal: why a row is refused; becomes a BadRow or a DataError."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(field, reason)
        self.field = field
        self.reason = reason


def kind_of(value: Any) -> str:
    """A value's type in the words of a JSON file."""
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "text", list: "a list"}
    return names.get(type(value), "an object" if isinstance(value, dict) else type(value).__name__)


def as_messages(value: list[Any], field: str) -> list[dict[str, Any]]:
    """Raises RowProblem for what is no conversation."""
    if not value:
        raise RowProblem(field, "an empty list of messages")
    return [_message(message, field, f"message {number}") for number, message in enumerate(value, 1)]


def _message(message: Any, field: str, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RowProblem(field, f"{where} is {kind_of(message)}, not an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RowProblem(field, f"{where} has no role")
    if not ROLE.fullmatch(role):
        raise RowProblem(field, f"{where} has the role {role!r}, which is not one word")
    _check_calls(message.get("tool_calls"), field, where)
    if message.get("step_loss_mask", 1) not in (0, 1, None):
        raise RowProblem(
            field, f"{where} has the step_loss_mask {message['step_loss_mask']!r}, which is neither 0 nor 1"
        )
    content = message.get("content")
    if isinstance(content, list):
        content = _joined(content, field, where) if content or not _says_otherwise(message) else None
    elif content is None and role != "tool" and not _says_otherwise(message):
        raise RowProblem(field, f"{where} has null as content, not text")
    elif not isinstance(content, str | None):
        raise RowProblem(field, f"{where} has {kind_of(content)} as content, not text")
    return {key: part for key, part in message.items() if part is not None} | {"content": content}


def _says_otherwise(message: dict[str, Any]) -> bool:
    return any(message.get(name) for name in SAYS_NOTHING)


def _joined(parts: list[Any], field: str, where: str) -> str:
    """The text of a content's parts, one after the other."""
    texts = []
    for number, part in enumerate(parts, 1):
        text = part.get("text") if isinstance(part, dict) and part.get("type") in TEXT_PARTS else part
        if not isinstance(text, str):
            kind = f"of type {part['type']!r}" if isinstance(part, dict) and part.get("type") else kind_of(part)
            raise RowProblem(field, f"{where}, part {number} is {kind}, not text")
        texts.append(text)
    if not texts:
        raise RowProblem(field, f"{where} has an empty list as content")
    return "".join(texts)


def parts_text(value: Any) -> str | None:
    """The text of a value that is a list of text parts and nothing else; None for any other."""
    if isinstance(value, list) and value and all(isinstance(p, dict) and p.get("type") == "text" for p in value):
        texts = [part.get("text") for part in value]
        return "".join(texts) if all(isinstance(text, str) for text in texts) else None
    return None


def _check_calls(calls: Any, field: str, where: str) -> None:
    if calls is None:
        return
    if not isinstance(calls, list):
        raise RowProblem(field, f"{where} has {kind_of(calls)} as tool_calls, not a list")
    for number, call in enumerate(calls, 1):
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RowProblem(field, f"{where}, tool call {number} names no function")


def as_tools(value: list[Any], field: str, columnar: bool) -> list[dict[str, Any]]:
    """Tools are objects; in a columnar file each may be JSON text."""
    tools = [json_text(tool, field) if columnar else tool for tool in value]
    for number, tool in enumerate(tools, 1):
        if not isinstance(tool, dict):
            raise RowProblem(field, f"tool {number} is {kind_of(tool)}, not an object")
    return tools


def json_text(value: Any, field: str) -> Any:
    """A text read as JSON; anything but text stays as it is."""
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value)
    except msgspec.MsgspecError as error:
        raise RowProblem(field, f"its text is not JSON: {error}") from None
