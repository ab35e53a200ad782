"""Prompt sources: every bad row is named, slices are Python's, procedural questions are reproducible and disjoint."""

import datetime
import decimal
import json
import os
import sys

import pytest

from slime_cli.buffer.sources.open import open_source
from slime_cli.errors import DataError, UsageError
from slime_cli.gym import freeze, thaw

SUMS = "reasoning-gym:basic_arithmetic?min_terms=2&max_terms=2&min_digits=1&max_digits=1&operators=+"


def write_lines(path, lines):
    path.write_bytes(
        b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines) + b"\n"
    )
    return str(path)


def numbered(path, count=10):
    return write_lines(path, [{"input": f"q{i}", "label": i} for i in range(count)])


def test_rows_carry_prompt_label_metadata_tools_and_line(tmp_path):
    messages = [{"role": "user", "content": "hi"}]
    rows = [
        {"input": messages, "label": 4.5, "metadata": {"a": [1]}, "tools": [{"name": "t"}]},
        b"  ",
        {"input": "b", "label": "é"},
    ]
    source = open_source(write_lines(tmp_path / "a.jsonl", rows), label_key="label")
    assert len(source) == 2 and source.skipped == []
    assert (source[0].prompt, source[0].label) == (messages, "4.5")
    assert source[0].metadata == {"a": [1], "tools": [{"name": "t"}]}
    assert (source[1].label, source[1].row, source[-1].prompt) == ("é", 3, "b")
    with pytest.raises(IndexError):
        source[2]


@pytest.mark.parametrize(
    ("bad", "field", "reason"),
    [
        (b'{"input": "x"', "", "not JSON"),
        (b'{"input": "\xff", "label": 1}', "", "not UTF-8: byte 0xff at column 12"),
        (b'{"input": "x", "label": NaN}', "", "not JSON: NaN is no number there; null is"),
        (b'{"input": "x\\ud83d", "label": 1}', "", "not JSON: an escape is half of a pair of surrogates"),
        (b"[1, 2]", "", "a list, not a JSON object"),
        (b'"text"', "", "text, not a JSON object"),
        ({"inputs": "x", "label": 1}, "input", "did you mean 'inputs'"),
        ({"input": "  ", "label": 1}, "input", "empty text"),
        ({"input": 3, "label": 1}, "input", "a number"),
        ({"input": [], "label": 1}, "input", "empty list"),
        ({"input": [{"content": "x"}], "label": 1}, "input", "message 1 has no role"),
        ({"input": [{"role": "user", "content": None}], "label": 1}, "input", "null as content"),
        ({"input": "x"}, "label", "missing"),
        ({"input": "x", "label": None}, "label", "null"),
        ({"input": "x", "label": 1, "metadata": "m"}, "metadata", "text, not an object"),
        ({"input": "x", "label": 1, "tools": {}}, "tools", "not a list"),
        (
            {"input": "x", "label": 1, "metadata": {"seed": 2**64}},
            "metadata",
            "can't be stored as JSON: can't serialize ints",
        ),
        ({"input": [{"role": "user", "content": "x", "id": 2**64}], "label": 1}, "input", "can't be stored as JSON"),
    ],
)
def test_a_bad_row_fails_by_name_or_is_skipped_and_counted(tmp_path, bad, field, reason):
    path = write_lines(tmp_path / "a.jsonl", [{"input": "one", "label": 1}, b"", bad, {"input": "two", "label": 2}])
    with pytest.raises(DataError) as caught:
        open_source(path, label_key="label")
    assert f"{path}, line 3" in caught.value.message and reason in caught.value.message
    assert (f"field {field!r}" in caught.value.message) == bool(field)
    assert caught.value.fix == "fix the row or pass --on-bad-row skip"
    source = open_source(path, label_key="label", on_bad_row="skip")
    assert [(row.prompt, row.row) for row in source] == [("one", 1), ("two", 4)]
    assert [(skipped.file, skipped.row, skipped.field) for skipped in source.skipped] == [(path, 3, field)]


@pytest.mark.parametrize("text", ["-3:", ":3", "2:5", ":", "::2", "::-1", "-5:-2", "8:100", "5:1:-2"])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_slices_are_pythons(tmp_path, text, kind):
    path = numbered(tmp_path / "a.jsonl")
    if kind == "parquet":
        path = to_parquet(tmp_path, [{"input": f"q{i}"} for i in range(10)])
    window = slice(*(int(part) if part else None for part in text.split(":")))
    assert [row.prompt for row in open_source(f"{path}@[{text}]")] == [f"q{i}" for i in range(10)][window]


def test_slices_count_good_rows(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"input": "a"}, b"{", {"input": "b"}, {"input": "c"}])
    assert [row.row for row in open_source(f"{path}@[1:]", on_bad_row="skip")] == [3, 4]


@pytest.mark.parametrize("text", ["5", "a:b", "::0", "1:2:3:4"])
def test_a_slice_that_cannot_be_read_is_refused(tmp_path, text):
    with pytest.raises(UsageError, match="cannot read the slice"):
        open_source(f"{numbered(tmp_path / 'a.jsonl')}@[{text}]")


def test_empty_sources_say_why(tmp_path):
    with pytest.raises(DataError, match="it has no rows"):
        open_source(write_lines(tmp_path / "empty.jsonl", [b""]))
    with pytest.raises(DataError, match=r"all 2 were skipped: .*row 1.*not JSON"):
        open_source(write_lines(tmp_path / "bad.jsonl", [b"{", b"["]), on_bad_row="skip")
    with pytest.raises(DataError, match="selects none of its 10 rows"):
        open_source(f"{numbered(tmp_path / 'a.jsonl')}@[10:]")


def test_missing_files_and_unknown_kinds_name_the_nearest(tmp_path):
    numbered(tmp_path / "train.jsonl")
    with pytest.raises(DataError, match="did you mean 'train.jsonl'"):
        open_source(str(tmp_path / "trian.jsonl"))
    with pytest.raises(DataError, match="no folder"):
        open_source(str(tmp_path / "nowhere" / "x.jsonl"))
    with pytest.raises(UsageError, match="did you mean 'datasets'"):
        open_source("dataset:foo")
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(UsageError, match="no prompt source"):
        open_source(str(tmp_path / "a.csv"))


def test_a_file_changed_in_place_is_an_error_and_a_replaced_one_is_not(tmp_path):
    path = numbered(tmp_path / "a.jsonl")
    source = open_source(path)
    os.replace(write_lines(tmp_path / "b.jsonl", [{"input": "other"}]), path)
    assert source[3].prompt == "q3"
    changed = open_source(path)
    write_lines(tmp_path / "a.jsonl", [{"input": "longer than before"}])
    with pytest.raises(DataError, match="changed while in use"):
        changed[0]


def test_fingerprints_follow_content_and_selection_not_the_files_date(tmp_path):
    path = numbered(tmp_path / "a.jsonl")
    first = open_source(path).fingerprint()
    os.utime(path, (1, 1))
    assert open_source(path).fingerprint() == first
    assert open_source(f"{path}@[1:]").fingerprint() != first
    assert open_source(path, label_key="label").fingerprint() != first
    numbered(tmp_path / "a.jsonl", 11)
    assert open_source(path).fingerprint() != first


def test_memory_is_offsets_only(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"input": "x" * 1000}] * 5000)
    source = open_source(path)
    held = sys.getsizeof(source._table._starts)
    assert held < 5000 * 12 and source[4999].prompt == "x" * 1000


def to_parquet(folder, rows, group=3):
    import pyarrow
    import pyarrow.parquet

    path = folder / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=group)
    return str(path)


def test_parquet_rows_over_row_groups(tmp_path):
    rows = [
        {
            "input": [{"role": "user", "content": f"q{i}", "name": None}],
            "label": i,
            "metadata": {"k": i},
            "tools": '[{"n": 1}]',
        }
        for i in range(8)
    ]
    source = open_source(to_parquet(tmp_path, rows), label_key="label")
    assert [row.label for row in source] == [str(i) for i in range(8)]
    assert source[7].prompt == [{"role": "user", "content": "q7"}]
    assert source[5].metadata == {"k": 5, "tools": [{"n": 1}]} and source[5].row == 6


def test_parquet_bad_rows_and_columns(tmp_path):
    path = to_parquet(
        tmp_path, [{"input": "a", "label": 1}, {"input": None, "label": 2}, {"input": "c", "label": None}]
    )
    with pytest.raises(DataError, match="row 2, field 'input': null"):
        open_source(path)
    source = open_source(path, label_key="label", on_bad_row="skip")
    assert [bad.row for bad in source.skipped] == [2, 3] and len(source) == 1
    with pytest.raises(DataError, match="no column 'labels' .did you mean 'label'"):
        open_source(path, label_key="labels")
    (tmp_path / "b.parquet").write_text("not parquet")
    with pytest.raises(DataError, match="not a readable Parquet file"):
        open_source(str(tmp_path / "b.parquet"))


COLUMN_VALUES = {
    "date": (datetime.date(2026, 11, 30), "2026-11-30"),
    "time": (datetime.datetime(2026, 11, 30, 1, 2), "2026-11-30 01:02:00"),
    "decimal": (decimal.Decimal("1.50"), "1.50"),
    "bytes": (b"1.50", None),
}


@pytest.mark.parametrize("kind", COLUMN_VALUES)
def test_dates_and_decimals_of_a_column_are_labels_as_written_and_no_metadata(tmp_path, kind):
    value, label = COLUMN_VALUES[kind]
    path = to_parquet(tmp_path, [{"input": "a", "label": value, "metadata": {"when": value}}])
    with pytest.raises(DataError, match="row 1, field 'metadata': it can't be stored as JSON"):
        open_source(path)
    path = to_parquet(tmp_path, [{"input": "a", "label": value}])
    if label is None:
        with pytest.raises(DataError, match="row 1, field 'label': bytes, not text"):
            open_source(path, label_key="label")
    else:
        assert open_source(path, label_key="label")[0].label == label


def test_datasets_saved_and_loaded(tmp_path):
    datasets = pytest.importorskip("datasets")
    saved = datasets.Dataset.from_list([{"input": f"q{i}", "label": i} for i in range(5)])
    datasets.DatasetDict(train=saved, test=saved.select([0])).save_to_disk(tmp_path / "both")
    saved.save_to_disk(tmp_path / "one")
    for uri in (str(tmp_path / "one"), f"datasets:{tmp_path / 'one'}", f"datasets:{tmp_path / 'both'}?split=train"):
        source = open_source(f"{uri}@[-2:]", label_key="label")
        assert [(row.prompt, row.label, row.row) for row in source] == [("q3", "3", 4), ("q4", "4", 5)]
    with pytest.raises(DataError, match="several splits; it has train, test"):
        open_source(f"datasets:{tmp_path / 'both'}")
    with pytest.raises(DataError, match="did you mean 'both'"):
        open_source(f"datasets:{tmp_path / 'boht'}")


def test_gym_rows_are_reproducible_and_plain():
    one, again, other = (open_source(f"{SUMS}&seed={seed}&size=50") for seed in (3, 3, 4000))
    assert one[7] == again[7] and one[7].prompt != other[7].prompt and len(one) == 50
    assert one[7].label.lstrip("-").isdigit() and one[7].metadata["rm_type"] == "reasoning-gym"
    assert json.loads(json.dumps(one[7].metadata)) == one[7].metadata
    assert one.fingerprint() == again.fingerprint() != other.fingerprint()


def test_gym_answers_can_be_graded_by_another_grader_than_the_task_s():
    plain, other = (open_source(f"{SUMS}&size=3{more}") for more in ("", "&rm_type=math"))
    assert [source[1].metadata["rm_type"] for source in (plain, other)] == ["reasoning-gym", "math"]
    assert plain[1].label == other[1].label and plain.fingerprint() != other.fingerprint()


def test_gym_distinct_gives_each_question_once():
    source = open_source(f"{SUMS}&allow_negation=false&distinct=true&size=60")
    prompts = [row.prompt for row in source]
    assert len(prompts) == len(set(prompts)) == 60 < source.tried
    plain = [row.prompt for row in open_source(f"{SUMS}&allow_negation=false&size=60")]
    assert len(set(plain)) < 60, "the case is too easy: it has no repeats"


def test_gym_parts_are_disjoint_across_seeds_and_cover_everything():
    low = {row.prompt for row in open_source(f"{SUMS}&part=0:0.5&size=300&seed=1")}
    high = {row.prompt for row in open_source(f"{SUMS}&part=0.5:1&size=300&seed=77")}
    everything = {row.prompt for row in open_source(f"{SUMS}&size=300&seed=5")}
    assert low and high and not low & high
    assert len(everything & (low | high)) > 0.8 * len(everything)


@pytest.mark.parametrize(
    "text", ["operators=%2B,-", "operators=+,-", "operators=+&operators=-", "operators=%2B&operators=%2D"]
)
def test_gym_arguments_keep_plus_and_take_lists(text):
    assert open_source(f"reasoning-gym:basic_arithmetic?{text}&size=1").options.arguments == {"operators": ["+", "-"]}


@pytest.mark.parametrize(
    ("rest", "words"),
    [
        ("basic_arithmetics", "did you mean 'basic_arithmetic'"),
        ("basic_arithmetic?min_term=2", "did you mean 'min_terms'"),
        ("basic_arithmetic?min_terms=two", "invalid literal"),
        ("basic_arithmetic?min_terms=1,2", "takes one value"),
        ("basic_arithmetic?allow_negation=maybe", "neither true nor false"),
        ("basic_arithmetic?whitespace=lots", "none of no_space, single, random"),
        ("basic_arithmetic?min_terms=9&max_terms=2", "refuses these arguments"),
        ("basic_arithmetic?part=0.5:0.2", "part=0.5:0.2"),
        ("basic_arithmetic?part=0:2", "part=0:2"),
        ("basic_arithmetic?size=0", "size=0"),
        ("basic_arithmetic?size", "not NAME=VALUE"),
        ("game_of_life_halting", "pays full reward"),
    ],
)
def test_gym_refuses_by_name(rest, words):
    with pytest.raises(UsageError) as caught:
        open_source(f"reasoning-gym:{rest}")
    assert words in caught.value.message


def test_freeze_survives_json_exactly():
    value = {"pair": (1, 2), "by_number": {3: "x", "3": "y"}, "nested": [{"t": ((),)}], "set": {1}, "__kind__": "mine"}
    assert thaw(json.loads(json.dumps(freeze(value)))) == value
    assert isinstance(thaw(json.loads(json.dumps(freeze(value))))["pair"], tuple)


def test_importing_sources_loads_no_heavy_library():
    import subprocess

    heavy = "{'reasoning_gym', 'datasets', 'pyarrow', 'torch'}"
    code = f"import sys, slime_cli.buffer.sources.open; print({heavy} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
