"""``slime`` and ``python -m slime_cli``: runs the command line and turns its errors into messages and exit codes.

Every error that a user is meant to read is two lines on stderr, ``error:`` and ``fix:``. Anything else is a defect and
keeps its traceback. ``SLIME_TRACEBACK=1`` shows the traceback of the former as well.
"""

import os
import signal
import sys
import traceback

if __name__ == "__main__" and not sys.flags.safe_path:
    # `python -m` put the working directory first, where a user's json.py would be imported in place of the library. It
    # goes to the end, in case that it holds slime, until slime itself takes it away.
    sys.path.append(sys.path.pop(0))

from collections.abc import Sequence

from slime_cli import interrupts, plain


def main(argv: Sequence[str] | None = None) -> None:
    plain.replace_unprintable()
    interrupts.listen()
    interrupts.leave(run(sys.argv[1:] if argv is None else list(argv)))


def run(argv: list[str]) -> int:
    """The exit code of ``slime ARGV``."""
    from slime_cli import disk, processes
    from slime_cli.errors import EngineError, Interrupted, SlimeError, UsageError

    try:
        processes.leave_working_directory()
        return _dispatch(argv)
    except SlimeError as error:
        _say(error.message, error.fix)
        return error.exit_code
    except Exception as error:
        if str(error).startswith("Symlink loop from"):  # pathlib's RuntimeError, of any path that was given
            _say(str(error), "repair the link, or give another path")
            return UsageError.exit_code
        said = disk.cause(error)
        if not said:
            raise
        _say(said, disk.FIX)
        return EngineError.exit_code
    except KeyboardInterrupt:
        _say("interrupted", "")
        return Interrupted.exit_code


def _dispatch(argv: list[str]) -> int:
    import typer.exceptions

    from slime_cli.app import app

    command = typer.main.get_command(app)
    try:
        code = command.main(argv, prog_name="slime", standalone_mode=False)
    except typer.exceptions.TyperException as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            if text := error.format_message():  # empty where rich has printed the help already
                print(text)
        else:
            context = getattr(error, "ctx", None)
            _say(error.format_message(), f"see `{context.command_path if context else 'slime'} --help`")
        return error.exit_code
    except SystemExit as error:  # typer's answer to a pipe that is read no more, as by `head`
        if isinstance(error.__context__, BrokenPipeError):
            return 128 + signal.SIGPIPE
        raise
    except typer.Abort:
        raise KeyboardInterrupt from None
    if code == 130:  # typer's answer to a KeyboardInterrupt, which it does not let through
        raise KeyboardInterrupt
    return code if isinstance(code, int) else 0


def _say(message: str, fix: str) -> None:
    """On a terminal in colour and wrapped; elsewhere whole lines, so that a path can be copied or searched for."""
    if os.environ.get("SLIME_TRACEBACK") == "1" and sys.exception() is not None:
        traceback.print_exc()
    lines = [("error", "bold red", message)] + ([("fix", "bold green", fix)] if fix else [])
    if not sys.stderr.isatty():
        for label, _, text in lines:
            print(f"{label}: {text}", file=sys.stderr)
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True)
    for label, style, text in lines:
        console.print(Text.assemble((f"{label}: ", style), text), soft_wrap=True)


if __name__ == "__main__":
    main()
