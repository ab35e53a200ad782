"""What is printed fits the place that it is printed to: whole names at 80 columns, any encoding, no escape codes in a
file."""

import io
import json
import os
import re
import signal
import subprocess
import sys

import pytest
import typer
from rich.console import Console

from slime_cli import __main__ as cli
from slime_cli import app, plain
from slime_cli.tracing import report
from tests.tracing.test_trace import fill_journal, run  # noqa: F401 (a fixture)


def commands():
    """Words of every command and subcommand that prints a help, and the options that it must show."""
    for name in app.COMMANDS:
        if name in app.RAW:
            yield [name], []
            continue
        command = typer.main.get_command(app.module_of(name).app)
        yield [name], options(command)
        for sub, found in getattr(command, "commands", {}).items():
            yield [name, sub], options(found)


def options(command) -> list[str]:
    return [flag for parameter in command.params for flag in parameter.opts if flag.startswith("--")]


@pytest.mark.parametrize(("words", "flags"), [pytest.param(*found, id=" ".join(found[0])) for found in commands()])
def test_help_has_whole_names_at_80_columns(words, flags, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    if words == ["sync"]:
        with pytest.raises(SystemExit):  # argparse's way to end
            cli.run([*words, "--help"])
        flags = ["--load", "--rollout-endpoint", "--publish", "--weight-version"]
    else:
        assert cli.run([*words, "--help"]) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    assert set(flags) <= set(said.replace(",", " ").split()) and "…" not in said and not re.search(r"\w\.\.\.\n", said)
    assert "\x1b" not in said


def test_a_line_of_choices_is_wrapped_between_them(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    said = app.own_help("train")
    assert "{grpo,gspo,cispo,reinforce_plus_plus,\n      reinforce_plus_plus_baseline,ppo}" in said


def ascii_stream() -> io.TextIOWrapper:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    plain.replace_unprintable(stream)
    return stream


def written(stream: io.TextIOWrapper) -> str:
    stream.flush()
    return stream.buffer.getvalue().decode("ascii")


def test_characters_that_an_encoding_lacks_become_plainer_ones():
    stream = ascii_stream()
    stream.write("5 ≠ 4 … ▁▅█ ┌─┐ ⠀⣿ é 中 \udcff")
    assert written(stream) == r"5 != 4 ~ .+@ +-+  * \xe9 \u4e2d \udcff"
    latin = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    plain.replace_unprintable(latin)
    latin.write("é × ≠")
    latin.flush()
    assert latin.buffer.getvalue() == "é × !=".encode("latin-1")


def lines(run_dir, rewards: list[float]) -> None:
    text = "".join(
        json.dumps({"phase": "rl", "rollout_id": i, "step": i, "reward_mean": r}) + "\n" for i, r in enumerate(rewards)
    )
    (run_dir / "metrics.jsonl").write_text(text)


@pytest.mark.parametrize("environment", [{}, {"TERM": "dumb"}, {"NO_COLOR": "1"}])
@pytest.mark.parametrize("rewards", [[0.5], [0.25, 0.5, 1.0]])
def test_the_result_of_a_run_in_a_file_has_neither_escape_codes_nor_a_plot_of_one_point(
    run,  # noqa: F811
    monkeypatch,
    environment,
    rewards,
):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    lines(run, rewards)
    out = io.StringIO()
    stream = ascii_stream()
    for file in (out, stream):
        report.show(Console(file=file), run, {"steps": len(rewards)})
    assert "\x1b" not in out.getvalue() + written(stream)
    plotted = len(rewards) > 1
    assert ("mean reward of the training samples" in out.getvalue()) == plotted == (run / "reward.png").exists()
    assert ("mean reward of the one rollout: 0.500" in out.getvalue()) == (not plotted)
    assert "8 dispatched = 4 trained" in written(stream)


@pytest.mark.parametrize(
    "encoding", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}]
)
def test_commands_write_where_only_ascii_fits(run, tmp_path, encoding):  # noqa: F811
    lines(run, [0.25, 0.5, 1.0])
    broken = tmp_path / "run-≠-é"
    fill_journal(broken / "journal.sqlite")
    drop_a_sample(broken / "journal.sqlite")
    environment = {k: v for k, v in os.environ.items() if k not in ("FORCE_COLOR", "PYTHONIOENCODING")} | encoding
    expected = {
        ("trace", run): 0,
        ("trace", "why", run, 1): 0,
        ("profile", "step", run): 0,
        ("trace", "ledger", broken): 1,
        ("trace", broken): 3,
    }
    for words, code in expected.items():
        done = subprocess.run(
            [sys.executable, "-m", "slime_cli", *map(str, words)], capture_output=True, env=environment
        )
        assert done.returncode == code and b"Traceback" not in done.stderr, done.stderr
        said = (done.stdout + done.stderr).decode("ascii")
        assert "\x1b" not in said
        if words[:2] == ("trace", "ledger"):
            assert "8 dispatched != 4 trained" in said
        if words == ("trace", run):
            assert "0.250 -> 1.000  .-@" in said


def drop_a_sample(path) -> None:
    import sqlite3

    db = sqlite3.connect(path)
    with db:
        db.execute("DELETE FROM samples WHERE sample_index = 7")
    db.close()


def test_a_pipe_that_nobody_reads_any_more_ends_the_command_as_it_ends_others():
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-m", "slime_cli", "train", "--help"], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")
