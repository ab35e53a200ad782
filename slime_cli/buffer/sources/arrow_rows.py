"""Rows of Arrow tables as the JSON objects that they were made from. Callers: the columnar tables of source_files.

A struct type holds every field that any row has, so Arrow shows a row's absent field as null. A null field of a struct
is therefore absent here, at every depth. What Arrow knows for certain stays: a null in a list, the null value of a
map's key, a null column, and whatever is JSON text (Arrow's own ``json`` type is decoded, its nulls included).
"""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

Reader = Callable[[Any], Any]
"""A value that is not null, as ``to_pylist`` gives it -> the value of a JSON file."""


def rows(table: Any) -> Iterator[dict[str, Any]]:
    """The rows of a pyarrow Table or RecordBatch."""
    readers = {field.name: reader for field in table.schema if (reader := _reader(field.type)) is not None}
    for row in table.to_pylist():
        for name, reader in readers.items():
            if row[name] is not None:
                row[name] = reader(row[name])
        yield row


def _reader(type: Any) -> Reader | None:
    """None where ``to_pylist`` says it already."""
    from pyarrow import types

    if types.is_struct(type):
        return _struct({type.field(i).name: _reader(type.field(i).type) for i in range(type.num_fields)})
    if types.is_map(type):
        return _map(_reader(type.item_type))
    if types.is_list(type) or types.is_large_list(type) or types.is_fixed_size_list(type):
        return _list(_reader(type.value_type))
    if types.is_list_view(type) or types.is_large_list_view(type):
        return _list(_reader(type.value_type))
    if types.is_dictionary(type):
        return _reader(type.value_type)
    if getattr(type, "extension_name", "") == "arrow.json":
        return _json
    return None


def _struct(fields: dict[str, Reader | None]) -> Reader:
    def read(value: dict[str, Any]) -> dict[str, Any]:
        present = ((name, part, fields[name]) for name, part in value.items() if part is not None)
        return {name: part if reader is None else reader(part) for name, part, reader in present}

    return read


def _map(item: Reader | None) -> Reader:
    def read(value: list[tuple[str, Any]]) -> dict[str, Any]:
        return {key: part if item is None or part is None else item(part) for key, part in value}

    return read


def _list(item: Reader | None) -> Reader | None:
    if item is None:
        return None
    return lambda value: [None if part is None else item(part) for part in value]


def _json(value: Any) -> Any:
    """Text that is no JSON stays text: the row's check names what is wrong with it."""
    if not isinstance(value, str | bytes):
        return value
    try:
        return msgspec.json.decode(value)
    except msgspec.MsgspecError:
        return value
