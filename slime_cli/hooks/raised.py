"""Shows an exception of a user's function as a user reads it: the last line of their own code, and the traceback
without our frames.

Called by :mod:`.hooks`, by reward workers and by the generator. Whatever was raised, nothing here raises.
"""

import os
import pathlib
import sysconfig
import traceback

OURS = str(pathlib.Path(__file__).parents[1]) + os.sep
LIBRARIES = tuple(
    {
        path + os.sep
        for name, path in sysconfig.get_paths().items()
        if name in ("stdlib", "platstdlib", "purelib", "platlib")
    }
)


def installed(file: str) -> bool:
    """True for a file of Python, of an installed library or of slime."""
    return file.startswith((*LIBRARIES, OURS, "<frozen"))


def sentence(error: BaseException) -> str:
    """``KeyError: 'x' at FILE:LINE``."""
    found = place(error)
    return f"{type(error).__name__}: {_text(error)}" + (f" at {found}" if found else "")


def place(error: BaseException) -> str:
    """FILE:LINE of the innermost line of the user's own; of a library's where the user has none; empty where nobody has
    one."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    theirs = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((OURS, "<frozen"))]
    own = [f for f in theirs if not installed(f.filename)]
    return next((f"{f.filename}:{f.lineno}" for f in reversed(own or theirs)), "")


def by_user(error: BaseException) -> bool:
    """True when a line of the user's own was running: a function, or what it left behind (a model, a gradient)."""
    files = (frame.filename for frame in traceback.extract_tb(error.__traceback__))
    return any(os.path.isabs(file) and not installed(file) and os.path.isfile(file) for file in files)


def trace(error: BaseException) -> str:
    """The traceback from the first line that is neither ours nor a library's on."""
    found = traceback.TracebackException.from_exception(error, compact=True)
    first = next((i for i, f in enumerate(found.stack) if not installed(f.filename)), 0)
    found.stack = traceback.StackSummary.from_list(found.stack[first:])
    try:
        return "".join(found.format()).rstrip()
    except Exception:  # a message that can't be made
        return sentence(error)


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as another:
        return f"(its message raised {type(another).__name__})"
