"""Makes printed text fit the place that it is printed to: any encoding, 80 columns, a file. Imports nothing heavy.

:mod:`slime_cli.__main__` calls :func:`replace_unprintable` once; every command's typer app takes :data:`TYPER`.
"""

import codecs
import io
import shutil
import sys
from typing import Any, TextIO

TYPER: dict[str, Any] = {"add_completion": False, "rich_markup_mode": None, "pretty_exceptions_enable": False}
"""For every ``typer.Typer``. rich's help cuts the names of options to the terminal's width, and doubles the time of
``--help``."""

_ERRORS = "slime-plain"
_RAMP = dict(zip("▁▂▃▄▅▆▇█", ".:-=+*#@", strict=True))
_PLAIN = _RAMP | {
    "≠": "!=",
    "…": "~",
    "·": "-",
    "×": "x",
    "–": "-",
    "—": "-",
    "→": "->",
    "─": "-",
    "━": "-",
    "│": "|",
    "┃": "|",
    "\u2800": " ",
}


def width(most: int = 110) -> int:
    """Columns to wrap at: the terminal's, ``most`` at the most and where there is none."""
    return max(60, min(shutil.get_terminal_size((most, 24)).columns, most))


def replace_unprintable(*streams: TextIO) -> None:
    """Standard output and error write plainer characters for those that their encoding lacks, instead of raising."""
    codecs.register_error(_ERRORS, _replacement)
    for stream in streams or (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # None without a console; anything in place of a stream
            stream.reconfigure(errors=_ERRORS)


def _replacement(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_plain, error.object[error.start : error.end])), error.end


def _plain(character: str) -> str:
    if character in _PLAIN:
        return _PLAIN[character]
    if "\u2500" <= character <= "\u257f":  # corners and crossings of a frame
        return "+"
    if "\u2580" <= character <= "\u259f":
        return "#"
    if "\u2801" <= character <= "\u28ff":  # a braille pattern: a plot's points
        return "*"
    return character.encode("ascii", "backslashreplace").decode()
