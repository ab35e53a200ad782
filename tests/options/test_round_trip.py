"""Native values go back into argv that the engines' own parsers read as the same values.

One slow test (a subprocess imports the engines): the shipped tables are what the installed parsers say, and every
option's round trip is exact. The rest runs against a small argparse parser of each kind of action.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys

import pytest

from slime_cli.errors import UsageError
from slime_cli.options import catalogue
from slime_cli.options.resolve import resolve
from slime_cli.options.spec import Option, check_passable, to_words


def test_every_kind_of_action_round_trips():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--number", type=float)
    parser.add_argument("--names", nargs="+")
    parser.add_argument("--numbers", nargs="*", type=float)
    parser.add_argument("--pair", nargs=2, type=int)
    parser.add_argument("--maybe", nargs="?", const="yes")
    parser.add_argument("--on", action="store_true")
    parser.add_argument("--no-off", dest="off", action="store_false")
    parser.add_argument("--both", action=argparse.BooleanOptionalAction)
    parser.add_argument("--add", action="append", nargs="+")
    parser.add_argument("--object", type=json.loads)
    options = {
        fields["dest"]: catalogue.option_of(fields)
        for action in parser._actions
        if (fields := catalogue.describe(action))
    }
    values = [
        ("number", -1e-05),
        ("number", 1e22),
        ("number", -3.5),
        ("names", ["a b", "", "=x"]),
        ("numbers", [-1e-7, 2.0]),
        ("numbers", []),
        ("pair", [-1, 2]),
        ("maybe", "yes"),
        ("maybe", "-no"),
        ("on", True),
        ("off", False),
        ("both", True),
        ("both", False),
        ("add", [["a", "b"], ["c"]]),
        ("object", {"a": [1, None]}),
        ("object", -2),
    ]
    for dest, value in values:
        words = to_words(options[dest], value)
        assert getattr(parser.parse_args(words), dest) == value, words


def test_a_word_that_argparse_would_take_for_a_flag_is_refused_in_a_list():
    option = Option(dest="x", flags=("--x",), nargs="+")
    with pytest.raises(UsageError, match="looks like a flag"):
        check_passable(option, ["a", "-b"], "--x")
    check_passable(option, ["-b"], "--x")
    assert to_words(option, ["-b"]) == ["--x=-b"]


def test_two_flags_of_one_dest():
    assert (
        resolve(["--no-yarn-correction-range-round-to-int"]).megatron_argv()[-1]
        == "--no-yarn-correction-range-round-to-int"
    )
    assert (
        resolve(["--yarn-correction-range-round-to-int"]).megatron_argv()[-1] == "--yarn-correction-range-round-to-int"
    )


def test_a_deprecated_spelling_becomes_the_current_one():
    argv = resolve("--sglang-cuda-graph-max-bs 4 --sglang-disable-piecewise-cuda-graph".split()).sglang_argv()
    assert argv[-4:] == ["--cuda-graph-max-bs-decode", "4", "--cuda-graph-backend-prefill", "disabled"]


def test_an_unknown_version_is_read_into_the_cache(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(catalogue, "NATIVE", tmp_path / "none shipped")
    found = catalogue.load.__wrapped__("router")
    assert "--policy" in found.by_flag and "is new here" in capfd.readouterr().err
    assert catalogue.load.__wrapped__("router").options == found.options and capfd.readouterr().err == ""


GENUINE = """
import json, sys
from importlib import metadata
from slime_cli.errors import UsageError
from slime_cli.options import catalogue
from slime_cli.options.spec import to_words, from_words

def plain(value):
    return getattr(value, "name", value)

samples = {"int": ["-3", "7"], "float": ["-1e-05", "2.5"], "str": ["some text", "x"]}
samples["json"] = ['{"a": [1]}', '[{"b": 2}]']
for section, engine in catalogue.ENGINES.items():
    parser = catalogue.native_parser(section)
    table = catalogue.load(section)
    version = metadata.version(engine)
    assert table.version == version, (engine, table.version, version)
    found = [fields for action in parser._actions if (fields := catalogue.describe(action))]
    shipped = json.loads((catalogue.NATIVE / f"{engine}-{version}.json").read_text())["options"]
    for want, have in zip(found, shipped, strict=True):
        assert json.loads(json.dumps(want)) == have, (want, have)
    if section == "megatron":
        from slime_cli.training.network.megatron import _add_ours

        _add_ours(parser)
    tried = 0
    for option in table.options:
        if option.type == "other" and not option.choices:
            continue
        for flag in option.flags:
            if not option.takes_value:
                value = option.set_by(flag)
                direct = [flag]
            else:
                words = [str(choice) for choice in option.choices or samples[option.type]][:2]
                if option.nargs is None or option.nargs == "?":
                    words = words[:1]
                elif isinstance(option.nargs, int):
                    words = (words * 3)[: option.nargs]
                if option.many and option.type == "float":
                    words[0] = "-1"  # argparse itself would refuse -1e-05 in a list
                direct = [flag, *words] if option.many else [f"{flag}={words[0]}"]
                value = from_words(option, words, flag)
            again = to_words(table.option_for(option.dest, value), value)
            one, two = (parser.parse_known_args(required(section) + argv)[0] for argv in (direct, again))
            assert vars(one) == vars(two), (direct, again)
            stored = getattr(two, option.dest)
            stored = [plain(item) for item in stored] if isinstance(stored, list) else plain(stored)
            assert stored == value, (option, stored, value)
            tried += 1
    print("COUNT", section, tried)
"""


REQUIRED = "required = lambda section: ['--model-path', 'm'] if section == 'sglang' else []\n"


@pytest.mark.engine
def test_shipped_tables_and_round_trip_with_the_genuine_parsers(tmp_path):
    code = GENUINE.replace("samples =", REQUIRED + "samples =")
    env = os.environ | {"PYTHONPATH": str(pathlib.Path(catalogue.__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    counts = {line.split()[1]: int(line.split()[2]) for line in done.stdout.splitlines() if line.startswith("COUNT")}
    assert counts["megatron"] > 780 and counts["sglang"] > 420 and counts["router"] > 90
