"""``slime train --from-script run.sh --dry-run``: a launch script of slime's as a command of ours, then its dry run."""

from collections.abc import Sequence

from slime_cli.errors import UsageError
from slime_cli.options.scripts.move import Moved, move


def argv(path: str, more: Sequence[str], dry_run: bool) -> list[str]:
    """The options of the script, with ``more`` over them. Prints the command, and what changed and why."""
    if not dry_run:
        fix = "give --dry-run: it prints the command, which you look at, change and start yourself"
        raise UsageError("--from-script starts nothing", fix)
    moved = move(path)
    _show(moved, more)
    return [*moved.argv, *more]


def _show(moved: Moved, more: Sequence[str]) -> None:
    print(moved.command(more))
    _list("What changed, and why", moved.changed)
    _list("Not known without running the script", moved.unknown)
    if moved.exported:
        names = ", ".join(moved.exported)
        _list("Set these yourself where you start the command, if they matter", [f"exported by the script: {names}"])
    print()


def _list(title: str, lines: Sequence[str]) -> None:
    if lines:
        print(f"\n{title}:")
        for line in lines:
            print(f"  {line}")
