"""Parts that every prompt source shares: the row contract, slices and query strings.

Callers: :mod:`slime_cli.buffer.sources.open` and the source kinds beside it. Invariants: a row that reaches a caller
has passed :meth:`RowContract.check`; a row that has not is in ``skipped`` or was raised as a DataError; order is the
file's order.
"""

import abc
import bisect
import dataclasses
import json
import math
import operator
import os
import pathlib
import re
import urllib.parse
from array import array
from collections.abc import Iterator
from typing import Any

from slime_cli.buffer.sources.messages import (
    RowProblem,
    as_messages,
    as_tools,
    json_text,
    kind_of,
    parts_text,
)
from slime_cli.buffer.types import PromptRow
from slime_cli.buffer.values import unstorable
from slime_cli.errors import DataError, UsageError
from slime_cli.text import nearest

SLICE = re.compile(r"^(?P<uri>.*)@\[(?P<inside>[^\[\]]*)\]$", re.DOTALL)


@dataclasses.dataclass(frozen=True, slots=True)
class BadRow:
    """A row that was left out, and why."""

    file: str
    row: int
    """1-based line (JSONL) or row."""
    field: str
    """The offending field; empty when the row as a whole cannot be read."""
    reason: str

    def __str__(self) -> str:
        field = f", field {self.field!r}" if self.field else ""
        return f"{self.file}, row {self.row}{field}: {self.reason}"


def require_path(path: str) -> pathlib.Path:
    """The path, if something is there; else a DataError naming the nearest thing that is."""
    found = pathlib.Path(path).expanduser()
    if found.exists():
        return found
    parent = found.parent
    if not parent.is_dir():
        raise DataError(f"{path}: no such file, and no folder {parent}", "check the path")
    raise DataError(f"{path}: no such file{nearest(found.name, sorted(os.listdir(parent)))}", "check the path")


def split_slice(uri: str) -> tuple[str, slice]:
    """``"x@[-100:]"`` -> ``("x", slice(-100, None))``; without a slice, all rows. Bounds work as in Python lists."""
    match = SLICE.match(uri)
    if match is None:
        if uri.endswith("]") and "@[" in uri:
            raise UsageError(
                f"{uri}: cannot read the slice at its end", "write path@[start:end] or path@[start:end:step]"
            )
        return uri, slice(None)
    parts = match["inside"].split(":")
    try:
        if len(parts) not in (2, 3):
            raise ValueError("two or three bounds are needed")
        window = slice(*(int(part) if part.strip() else None for part in parts))
        if window.step == 0:
            raise ValueError("the step is zero")
    except ValueError as error:
        fix = "write path@[start:end] or path@[start:end:step]; each bound may be empty or negative"
        raise UsageError(f"{uri}: cannot read the slice [{match['inside']}]: {error}", fix) from None
    return match["uri"], window


def parse_query(text: str, where: str) -> dict[str, list[str]]:
    """``a=1,2&a=3`` -> ``{"a": ["1", "2", "3"]}``. Percent escapes are decoded after splitting; ``+`` stays ``+``."""
    found: dict[str, list[str]] = {}
    for pair in filter(None, text.split("&")):
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise UsageError(f"{where}: {pair!r} is not NAME=VALUE", "write KIND:NAME?arg=value&arg=value")
        found.setdefault(urllib.parse.unquote(key), []).extend(urllib.parse.unquote(part) for part in value.split(","))
    return found


def label_text(value: Any, field: str) -> str:
    """Labels are text: parts of text become it, numbers, booleans and structures their JSON text, a column's dates and
    decimals their own."""
    if isinstance(value, str):
        return value
    if (text := parts_text(value)) is not None:
        return text
    if value is None:
        raise RowProblem(field, "null")
    if isinstance(value, float) and not math.isfinite(value):
        raise RowProblem(field, f"{value} is no number to compare with")
    if isinstance(value, bytes):
        raise RowProblem(field, "bytes, not text")
    if not isinstance(value, bool | int | float | list | dict):  # of a column: a date, a decimal number
        return str(value)
    return json.dumps(value, ensure_ascii=False, default=str)


@dataclasses.dataclass(frozen=True)
class RowContract:
    """Which fields a row has and what they must hold."""

    input_key: str = "input"
    label_key: str | None = None
    metadata_key: str = "metadata"
    tool_key: str = "tools"

    def columns(self) -> list[str]:
        keys = (self.input_key, self.label_key, self.metadata_key, self.tool_key)
        return list(dict.fromkeys(key for key in keys if key))

    def check(self, record: Any, file: str, row: int, columnar: bool = False) -> PromptRow:
        """The checked row. Raises RowProblem. ``columnar``: JSON text is taken for an object or a list."""
        if not isinstance(record, dict):
            raise RowProblem("", f"{kind_of(record)}, not a JSON object")
        prompt = self._field(record, self.input_key)
        if isinstance(prompt, list):
            prompt = as_messages(prompt, self.input_key)
        elif not isinstance(prompt, str):
            raise RowProblem(self.input_key, f"{kind_of(prompt)}, neither text nor a list of messages")
        elif not prompt.strip():
            raise RowProblem(self.input_key, "empty text")
        label = label_text(self._field(record, self.label_key), self.label_key) if self.label_key else None
        metadata = self._metadata(record, columnar)
        for key, value in ((self.input_key, prompt), (self.metadata_key, metadata)):
            if (why := unstorable(value)) is not None:
                raise RowProblem(key, f"it can't be stored as JSON: {why}; write it as text")
        return PromptRow(prompt, label, metadata, file, row)

    def _field(self, record: dict[str, Any], key: str) -> Any:
        if key not in record:
            raise RowProblem(key, f"missing{nearest(key, record)}")
        return record[key]

    def _metadata(self, record: dict[str, Any], columnar: bool) -> dict[str, Any]:
        def optional(key: str, kind: type, words: str) -> Any:
            value = json_text(record.get(key), key) if columnar else record.get(key)
            if value is not None and not isinstance(value, kind):
                raise RowProblem(key, f"{kind_of(value)}, not {words}")
            return value

        metadata = dict(optional(self.metadata_key, dict, "an object") or {})
        tools = as_tools(optional(self.tool_key, list, "a list") or [], self.tool_key, columnar)
        if tools:
            metadata["tools"] = tools
        return metadata


class Gaps:
    """Maps the i-th good row to its 1-based physical row, in memory proportional to the rows left out."""

    def __init__(self) -> None:
        self._good_before = array("Q")

    def __len__(self) -> int:
        return len(self._good_before)

    def add(self, row: int) -> None:
        """Rows are added in ascending order."""
        self._good_before.append(row - 1 - len(self._good_before))

    def row(self, index: int) -> int:
        return index + 1 + bisect.bisect_right(self._good_before, index)


class PromptSource(abc.ABC):
    """Random access to checked prompts. ``name`` is the URI as given; ``skipped`` lists every bad row left out."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.skipped: list[BadRow] = []
        self._order = range(0)

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> PromptRow:
        return self._get(self._order[operator.index(index)])

    def __iter__(self) -> Iterator[PromptRow]:
        return (self[index] for index in range(len(self)))

    @abc.abstractmethod
    def _get(self, good: int) -> PromptRow:
        """The good row at a position before slicing."""

    @abc.abstractmethod
    def fingerprint(self) -> str:
        """Changes when the rows or their order may have changed; a resumed run compares it."""

    def _select(self, good: int, window: slice) -> None:
        """Applies the slice to ``good`` rows; an empty result is a DataError saying why."""
        self._order = range(good)[window]
        if self._order:
            return
        if good:
            raise DataError(f"{self.name}: the slice selects none of its {good} rows", "widen the slice")
        if self.skipped:
            reasons = "; ".join(str(bad) for bad in self.skipped[:3])
            raise DataError(
                f"{self.name}: no row can be used: all {len(self.skipped)} were skipped: {reasons}", "fix the rows"
            )
        raise DataError(f"{self.name}: it has no rows", "check that the file is the one you mean")
