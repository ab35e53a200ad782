"""The command line's frame: start-up, lazy commands, raw words, messages and exit codes."""

import os
import subprocess
import sys
import time
import types

import pytest

from slime_cli import __main__ as cli
from slime_cli import app
from slime_cli.errors import DataError, EngineError, Interrupted, UsageError

HEAVY = ("torch", "transformers", "megatron", "sglang", "ray", "numpy", "pyarrow", "rich", "yaml")


@pytest.fixture
def raw(monkeypatch):
    """Installs a stand-in for the module of a raw command; returns the words that its ``run`` got."""
    got = []

    def install(run=lambda words: 0):
        def record(words):
            got.append(words)
            return run(words)

        monkeypatch.setattr(app, "module_of", lambda name: types.SimpleNamespace(run=record))
        return got

    return install


def raiser(error):
    def run(words):
        raise error

    return run


def test_help_lists_every_command_and_imports_nothing_heavy():
    code = (
        "import sys; from slime_cli.__main__ import run; code = run(['--help']); "
        f"print('HEAVY', [name for name in {HEAVY} if name in sys.modules]); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "HEAVY []" in done.stdout
    for name, line in app.COMMANDS.items():
        assert f"  {name} " in done.stdout and line in done.stdout  # whole, not cut at 80 columns


def test_help_starts_within_half_a_second():
    best = 9.0
    for _ in range(5):
        begun = time.perf_counter()
        subprocess.run([sys.executable, "-m", "slime_cli", "--help"], check=True, capture_output=True)
        best = min(best, time.perf_counter() - begun)
        if best < 0.5:
            return
    assert best < 0.5 or os.getloadavg()[0] > 1.5 * os.cpu_count(), best


@pytest.mark.parametrize("command", app.COMMANDS)
def test_every_command_has_a_module_with_what_is_called(command):
    module = app.module_of(command)
    assert callable(module.run) if command in app.RAW else module.app is not None


@pytest.mark.parametrize("command", app.RAW)
def test_raw_words_arrive_untouched(raw, command):
    got = raw()
    words = ["--lr", "1e-6", "--sglang-x=1", "-h2", "--", "word", "--profile", "a b"]
    assert cli.run([command, *words]) == 0
    assert got == [words]


def test_a_raw_command_s_answer_is_the_exit_code(raw):
    raw(lambda words: 4)
    assert cli.run(["sync"]) == 4


@pytest.mark.parametrize("command", ["train", "serve-rollout"])
def test_own_help_lists_exactly_what_the_command_reads(raw, capsys, command):
    from slime_cli.options import own
    from slime_cli.options.not_yet import NOT_WIRED

    got = raw()
    assert cli.run([command, "--load", "x", "--help"]) == 0
    said = capsys.readouterr().out
    dests = own.READ_BY[command][0]
    for option in own.OPTIONS:
        read = (dests is None or option.dest in dests) and option.flag not in NOT_WIRED
        assert (f"  {option.flag}" in said) == read, option.flag
    assert "--sglang-NAME" in said and "--router-NAME" in said and ("Megatron's" in said) == (command == "train")
    assert max(map(len, said.splitlines())) <= 110 and not got


@pytest.mark.parametrize(
    ("error", "code"),
    [(UsageError("m", "f"), 2), (DataError("m", "f"), 3), (EngineError("m", "f"), 4), (Interrupted("m", "f"), 5)],
)
def test_errors_are_two_lines_and_a_code(raw, capsys, error, code):
    raw(raiser(error))
    assert cli.run(["train"]) == code
    assert capsys.readouterr().err == "error: m\nfix: f\n"


def test_a_long_path_is_not_broken_and_markup_is_text(raw, capsys):
    path = "/data/" + "very-long-folder-name/" * 12 + "[red]file"
    raw(raiser(DataError(path)))
    cli.run(["train"])
    assert capsys.readouterr().err == f"error: {path}\n"


def test_a_key_press_ends_with_5(raw, capsys):
    raw(raiser(KeyboardInterrupt()))
    assert cli.run(["train"]) == 5
    assert capsys.readouterr().err.strip() == "error: interrupted"


def test_traceback_on_request_and_for_defects(raw, monkeypatch, capsys):
    raw(raiser(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        cli.run(["train"])
    monkeypatch.setenv("SLIME_TRACEBACK", "1")
    raw(raiser(DataError("m", "f")))
    assert cli.run(["train"]) == 3  # the exit code stays what it means
    said = capsys.readouterr().err
    assert said.startswith("Traceback") and said.endswith("error: m\nfix: f\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian"], "did you mean `slime train`?"),
        (["serve_rollout"], "did you mean `slime serve-rollout`?"),
        (["xyzzy"], "commands: convert, serve-rollout"),
        (["doctor", "--bogus"], "see `slime doctor --help`"),
        (["convert", "hf-to-dist"], "see `slime convert hf-to-dist --help`"),
        (["--bogus"], "see `slime --help`"),
    ],
)
def test_usage_errors(capsys, words, said):
    assert cli.run(words) == 2
    captured = capsys.readouterr()
    assert said in captured.err and "Traceback" not in captured.err and captured.out == ""


def test_no_command_shows_the_help(capsys):
    assert cli.run([]) == 2
    assert "serve-rollout" in capsys.readouterr().out


def test_version(capsys):
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("slime ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--dry-run"], "`slime serve-rollout` does not read --dry-run"),
        (["--hf-checkpoint", "m", "--sglang-router-port", "80000"], "it must be between 1 and 65535"),
        ([], "--hf-checkpoint is missing"),
    ],
)
def test_serve_rollout_checks_its_options(words, said):
    with pytest.raises(UsageError) as caught:
        app.module_of("serve-rollout").run(words)
    assert said in f"{caught.value.message} | {caught.value.fix}"


@pytest.mark.parametrize("number", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_a_signal_that_ends_a_command_is_an_interruption(number):
    """So that what it began is taken away."""
    code = (
        "import os, signal, time, types; from slime_cli import __main__ as cli, app\n"
        f"signal.signal(signal.{number}, signal.SIG_DFL)\n"  # tests that run in the background inherit ignored ones
        f"def run(words):\n    try:\n        os.kill(os.getpid(), signal.{number}); time.sleep(9)\n"
        "    finally:\n        print('cleaned')\n"
        "app.module_of = lambda name: types.SimpleNamespace(run=run); cli.main(['sync'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (Interrupted.exit_code, "cleaned\n", "error: interrupted\n")


DEAF = """
import signal
from slime_cli import interrupts
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests that run in the background inherit an ignored Ctrl-C
interrupts.listen()
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT, signal.SIGINT):
    try:
        signal.raise_signal(number)
    except BaseException as error:
        print(type(error).__name__, flush=True)
print("still there")
"""


def test_who_insists_on_an_interruption_is_heard_by_a_function_that_catches_everything():
    done = subprocess.run([sys.executable, "-c", DEAF], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split()) == (Interrupted.exit_code, ["KeyboardInterrupt"] * 3), done.stderr
    assert "interrupted, and what was running did not end" in done.stderr
