"""Every ``--flag`` in README.md and docs/ exists, and is one that slime takes; every metric that they name is one."""

import functools
import pathlib
import re

import pytest
import typer

from slime_cli import app
from slime_cli.commands import sync
from slime_cli.options import layers
from slime_cli.options.managed import refusal
from slime_cli.options.not_yet import NOT_YET

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FLAG = re.compile(r"(?<![\w-])--[A-Za-z][\w-]*")
MOVING = "moving.md"
"""The page that lists what slime has and this has not, and natives that are refused, each with the reason."""
EXCEPTIONS: dict[str, str] = {
    "--no-deps": "pip's, which installs megatron-bridge",
    "--no-build-isolation": "pip's, which installs Transformer Engine",
}
"""Flag of another program, or a placeholder -> why it is on a page."""


def parameters(command: typer.core.TyperCommand) -> set[str]:
    """Flags of a typer command and of those below it."""
    own = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    return own.union(*map(parameters, getattr(command, "commands", {}).values()))


@functools.cache
def of_commands() -> set[str]:
    """Flags that commands declare beside the options that ``layers.find`` knows."""
    found = {"--help"} | parameters(typer.main.get_command(app.app))
    for name in app.COMMANDS:
        if name not in app.RAW:
            found |= parameters(typer.main.get_command(app.module_of(name).app))
    for name in ("train", "serve-rollout"):
        found |= set(re.findall(r"^ +(--[\w-]+)", app.own_help(name), re.MULTILINE))
    return found


@pytest.fixture
def of_sync(capsys) -> set[str]:
    """Its parser is argparse's, made when it is called."""
    with pytest.raises(SystemExit):
        sync.run(["--help"])
    return set(FLAG.findall(capsys.readouterr().out))


def exists(flag: str) -> bool:
    found = layers.find(flag)
    return found is not None and not refusal(found[0], found[1].dest) or flag in of_commands()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_flag_of_a_page_exists(page, of_sync):
    flags = sorted(set(FLAG.findall(page.read_text())))
    assert flags or page.name == "conversions.md"
    listed = {*NOT_YET, "--spec", "--eval-"} if page.name == MOVING else set()
    flags = [flag for flag in flags if flag not in listed and not (page.name == MOVING and layers.find(flag))]
    unknown = [flag for flag in flags if not exists(flag) and flag not in of_sync and flag not in EXCEPTIONS]
    assert not unknown, {flag: layers.nearest(flag) for flag in unknown}


def test_an_exception_is_still_one_and_is_still_on_a_page():
    text = "".join(page.read_text() for page in PAGES)
    assert not [flag for flag in EXCEPTIONS if exists(flag) or flag not in FLAG.findall(text)]


def test_a_flag_that_is_not_there_is_found(of_sync):
    assert FLAG.findall("`--lr 1` --- |---| x--y (`--sglang-NAME`)") == ["--lr", "--sglang-NAME"]
    assert not exists("--use-tsi") and not exists("--train-iters") and "--use-tis" not in of_sync


def test_every_option_of_the_algorithms_is_on_their_page():
    from slime_cli.options import own

    page = (ROOT / "docs" / "algorithms.md").read_text()
    assert not [
        o.flag
        for o in own.OPTIONS
        if o.group in ("training", "algorithm", "off-policy") and o.flag not in FLAG.findall(page)
    ]


def test_every_metric_of_the_page_is_named_in_the_code():
    page = (ROOT / "docs" / "algorithms.md").read_text()
    rows = re.findall(r"^\| (`[^|]*) \|", page[page.index("## Metrics") :], re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([a-z]\w+)`", row)}
    code = {
        path: path.read_text()
        for path in [*(ROOT / "slime_cli" / "loop").glob("*.py"), *(ROOT / "slime_cli" / "training").rglob("*.py")]
    }
    words = set(re.findall(r"\w+", "\n".join(code.values()))) | {
        f"critic_{name}" for name in ("grad_norm", "lr", "skipped_steps")
    }
    assert len(named) > 30 and not named - words
