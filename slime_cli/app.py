"""The command line: which commands there are. A command's module is imported when that command is called.

``train``, ``serve-rollout`` and ``sync`` take options that belong to the engines, so their words reach
``run(argv) -> int`` of the command's module untouched; the others are typer apps of their own.
"""

import difflib
import importlib
import importlib.metadata
import textwrap
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from slime_cli import plain
from slime_cli.errors import UsageError

COMMANDS = {
    "convert": "Checkpoints: HF to Megatron and back, FP8 and INT4.",
    "serve-rollout": "Start generation engines behind a router.",
    "train": "Train by reinforcement or supervision, from profiles.",
    "sync": "Publish weights to running engines, and verify them.",
    "trace": "What a run did: summary, ledger, exports.",
    "profile": "Where time goes: in a run's steps, inside the engines.",
    "doctor": "Check this machine, the engines and a checkpoint.",
}
"""Name -> one line of help, short enough for 80 columns; in the order of help."""

RAW = ("serve-rollout", "train", "sync")
"""Commands whose words are not parsed here."""

_OWN_HELP = ("train", "serve-rollout")
"""Raw commands that read slime's own option table; any other raw command answers ``--help`` itself."""


def module_of(name: str) -> Any:
    return importlib.import_module(f"slime_cli.commands.{name.replace('-', '_')}")


class RawCommand(TyperCommand):
    """Passes every word after its name to ``run`` of the command's module."""

    def __init__(self, name: str):
        super().__init__(
            name,
            callback=self._call,
            help=COMMANDS[name],
            add_help_option=False,
            context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        )

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.args = list(args)
        return ctx.args

    def invoke(self, ctx: Any) -> int:
        return self._call(ctx.args)

    def _call(self, words: Sequence[str]) -> int:
        assert self.name is not None  # given where it is made
        if self.name in _OWN_HELP and any(word in ("--help", "-h") for word in words):
            print(own_help(self.name))
            return 0
        return module_of(self.name).run(list(words))


class Commands(TyperGroup):
    """Lists commands without importing them, and loads the one that is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A stand-in with name and help: enough for ``slime --help`` and completion of names."""
        if cmd_name not in COMMANDS:
            return None
        return TyperCommand(cmd_name, help=COMMANDS[cmd_name])

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str, Any, list[str]]:
        name = args[0]
        if name not in COMMANDS:
            near = difflib.get_close_matches(name.replace("_", "-"), COMMANDS, 1, 0.5)
            fix = f"did you mean `slime {near[0]}`?" if near else f"commands: {', '.join(COMMANDS)}"
            raise UsageError(f"unknown command {name!r}", fix)
        command = RawCommand(name) if name in RAW else typer.main.get_command(module_of(name).app)
        return name, command, args[1:]


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    **plain.TYPER,
    help="RL post-training for LLMs: Megatron trains, SGLang generates, a Data Buffer joins them.",
    epilog="Exit codes: 0 done, 2 usage, 3 bad input data, 4 an engine or worker died, 5 interrupted but resumable.",
)


def _installed_version() -> str:
    try:
        return importlib.metadata.version("slime-cli")
    except importlib.metadata.PackageNotFoundError:
        return "(from a source tree that is not installed)"


def _version(asked: bool) -> None:
    if asked:
        print(f"slime {_installed_version()}")
        raise typer.Exit


@app.callback()
def _slime(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    pass


_USAGE = {
    "train": (
        "slime train [--profile NAME ...] [options]",
        [
            ("--profile NAME", "A profile by name or .yaml file; may be repeated, later ones win, flags win over all."),
            ("--dry-run", "Print the resolved options, the layout and the memory estimate, and exit."),
            (
                "--from-script FILE",
                "With --dry-run: a launch script of slime's as a command of ours, with what changed and why.",
            ),
            ("--verbose", "With --dry-run: options at their defaults too."),
        ],
    ),
    "serve-rollout": (
        "slime serve-rollout --run-dir DIR --hf-checkpoint DIR [options]",
        [("--profile NAME", "A profile by name or .yaml file; may be repeated.")],
    ),
}


def own_help(command: str) -> str:
    """slime's own options that ``command`` reads, by group, then how the engines' options are given. Torch-free."""
    from slime_cli.options import own
    from slime_cli.options.not_yet import NOT_WIRED

    usage, rows = _USAGE[command]
    dests, sections = own.READ_BY[command]
    groups: dict[str, list[tuple[str, str]]] = {"": rows}
    for option in own.OPTIONS:
        if (dests is None or option.dest in dests) and option.flag not in NOT_WIRED:
            groups.setdefault(option.group, []).append((option.spelling, _line(option)))
    lines = [f"Usage: {usage}", "", COMMANDS[command]]
    for group, entries in groups.items():
        lines += ["", f"{group.capitalize()} options:" if group else "Options:"]
        for flag, text in entries:
            lines += _entry(flag, text)
    lines += ["", "Options of the engines, by their own names (unknown ones are errors):"]
    native = {
        "megatron": ("--NAME", "Megatron's, as in its own scripts: --lr, --tensor-model-parallel-size"),
        "sglang": ("--sglang-NAME", "SGLang's server: --sglang-mem-fraction-static"),
        "router": ("--router-NAME", "SGLang's router: --router-policy"),
    }
    for section in sections:
        lines += _entry(*native[section])
    return "\n".join(lines)


def _line(option: Any) -> str:
    from slime_cli.options import own

    default = str(option.default) if option.takes_value and option.default not in (None, {}) else ""
    needed = " and ".join(f"with {need}" for need in own.needed(option))
    more = ", ".join(filter(None, (default, needed)))
    return f"{option.help} [{more}]" if more else option.help


def _entry(flag: str, text: str, indent: int = 38) -> list[str]:
    width = plain.width()
    head = textwrap.wrap(
        flag.replace(",", ", "),
        width - 2,
        initial_indent="  ",
        subsequent_indent=" " * 6,
        break_long_words=False,
        break_on_hyphens=False,
    )
    lines = [" " * indent + line for line in textwrap.wrap(text, width - indent, break_on_hyphens=False)]
    if len(head[-1]) >= indent - 1 or len(head) > 1:
        return [*(line.replace(", ", ",") for line in head), *lines]
    return [head[0].replace(", ", ",").ljust(indent) + lines[0].lstrip(), *lines[1:]]
