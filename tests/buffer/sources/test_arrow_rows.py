"""Columnar files give, row for row, what JSON lines give: no null that nobody wrote, and every null that Arrow knows
of."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from slime_cli.buffer.sources import arrow_rows
from slime_cli.buffer.sources.open import open_source

CITY = {"type": "object", "properties": {"city": {"type": "string", "enum": ["Rome", None]}}, "required": ["city"]}
DAYS = {"type": "object", "properties": {"days": {"type": "integer"}}}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"function": {"name": "f", "arguments": {"city": "Rome"}}}],
}
ROWS = [
    {
        "input": [{"role": "user", "content": "Weather?"}, CALL, {"role": "tool", "content": "sun", "name": "f"}],
        "tools": [{"name": "weather", "parameters": CITY}],
        "metadata": {"deep": [{"a": {"b": 1}}, {"a": {}}]},
    },
    {
        "input": [{"role": "user", "content": "And then?"}],
        "tools": [{"name": "forecast", "parameters": DAYS}, {"name": "now", "parameters": {"properties": {}}}],
        "metadata": {"deep": [{"c": None}, {}], "e": "x"},
    },
]


def parquet(folder, rows) -> str:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet", row_group_size=1)
    return str(folder / "rows.parquet")


def saved(folder, rows) -> str:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(rows).save_to_disk(folder / "saved")
    return str(folder / "saved")


@pytest.mark.parametrize("write", [parquet, saved])
def test_columnar_rows_are_those_of_json_lines(tmp_path, write):
    lines = tmp_path / "rows.jsonl"
    lines.write_text("\n".join(json.dumps(row) for row in ROWS).replace('{"c": null}', "{}"))
    expected = [(row.prompt, row.metadata) for row in open_source(str(lines))]
    assert [(row.prompt, row.metadata) for row in open_source(write(tmp_path, ROWS))] == expected
    assert expected[0][1]["tools"][0]["parameters"] == CITY, "the null that is in a list was written by somebody"


def test_json_lines_keep_every_null(tmp_path):
    tool = {"name": "f", "parameters": {"default": None}}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"input": "a", "tools": [tool], "metadata": {"m": None}}))
    assert open_source(str(path))[0].metadata == {"m": None, "tools": [tool]}


def test_json_text_keeps_its_nulls_in_any_column(tmp_path):
    tool = {"name": "f", "parameters": {"default": None}}
    rows = [
        {"input": "a", "tools": json.dumps([tool]), "metadata": '{"m": null}'},
        {"input": "b", "tools": None, "metadata": None},
    ]
    found = list(open_source(parquet(tmp_path, rows)))
    assert found[0].metadata == {"m": None, "tools": [tool]} and found[1].metadata == {}
    each = [{"input": "a", "tools": [json.dumps(tool)]}]
    assert open_source(parquet(tmp_path, each))[0].metadata == {"tools": [tool]}


def test_maps_and_the_json_type_are_objects():
    item = pyarrow.struct([("a", pyarrow.int64()), ("b", pyarrow.string())])
    table = pyarrow.table(
        {
            "map": pyarrow.array([[("k", {"a": 1}), ("none", None)], []], pyarrow.map_(pyarrow.string(), item)),
            "json": pyarrow.array(['{"x": null}', None], pyarrow.json_()),
            "large": pyarrow.array([[{"a": 1}, None], []], pyarrow.large_list(item)),
            "plain": ["text", None],
        }
    )
    assert list(arrow_rows.rows(table)) == [
        {"map": {"k": {"a": 1}, "none": None}, "json": {"x": None}, "large": [{"a": 1}, None], "plain": "text"},
        {"map": {}, "json": None, "large": [], "plain": None},
    ]


def test_a_data_set_loaded_from_json_lines_is_read_alike_in_the_scan_and_by_row(tmp_path):
    """Where rows differ, the datasets library stores JSON text in a type of its own."""
    pytest.importorskip("datasets")
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in ROWS))
    source = open_source(f"datasets:json?data_files={path}&split=train&cache_dir={tmp_path / 'cache'}")
    assert [row.metadata["tools"] for row in source] == [row["tools"] for row in ROWS]
