"""How slime starts Python children: none outlives its parent, and no file of the working directory takes a library's
place in any of them.

``python -m`` puts the working directory first on the import path, so a user's own ``h2.py`` or ``json.py`` there
would be imported in place of the library; at the end of the path it still would be where a library looks for another
that is not installed. So it is not on the path at all. Whoever starts a child takes its command from :func:`python`
and its environment from :func:`environment`; a user's function that lies in the working directory is found by
:func:`find_here`.
"""

import ctypes
import functools
import gc
import importlib.metadata
import json
import os
import pathlib
import signal
import sys
import sysconfig
import urllib.parse
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

from slime_cli.errors import UsageError

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
_LOCAL = ("127.0.0.1", "localhost", "::1")
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def spare_libraries() -> None:
    """Python's garbage collector leaves all that is there now alone for good: to go through the libraries, as it does
    again and again, takes as long as a small rollout. Called when they are imported, and before anything is made that
    is to be freed."""
    gc.collect()
    gc.freeze()


def python(module: str, *arguments: str) -> list[str]:
    """The command line of a module in an interpreter of its own."""
    return [sys.executable, "-P", "-m", module, *arguments]


def die_with_parent() -> None:
    """Asks the kernel to end this process (SIGKILL) when the thread that made it ends (Linux, PR_SET_PDEATHSIG).

    Also called between fork and exec, so it imports nothing.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def die_with(owner: int) -> None:
    """:func:`die_with_parent` in a child that was told its ``owner``: that one may have ended before the call."""
    die_with_parent()
    if os.getppid() != owner:
        os._exit(1)


def environment(*, users_functions: bool = False) -> dict[str, str]:
    """This process's environment for a child: proxies off for local addresses, the working directory off the import
    path.

    With ``users_functions``, Python programs that those functions start find their own folder as they do anywhere else.
    """
    out = dict(os.environ, PYTHONPATH=import_path(os.environ.get("PYTHONPATH", "")))
    if not users_functions:
        out["PYTHONSAFEPATH"] = "1"  # for what an engine starts by `python -m` itself, such as torch's compile workers
    if any(out.get(name) for name in _PROXIES):
        for name in ("no_proxy", "NO_PROXY"):
            out[name] = ",".join(x for x in (out.get(name, ""), *_LOCAL) if x)
    return out


def without_proxies(given: dict[str, str]) -> dict[str, str]:
    """``given`` without proxies, for a program that speaks to engines alone, wherever they are."""
    return {name: value for name, value in given.items() if name not in _PROXIES}


def import_path(given: str) -> str:
    """``PYTHONPATH`` for a child: slime where Python does not find it by itself, then ``given`` without the working
    directory.

    An empty entry means the working directory too.
    """
    kept = [entry for entry in given.split(os.pathsep) if not _is_here(entry) and entry != str(_ROOT)]
    return os.pathsep.join(([] if _is_installed() else [str(_ROOT)]) + kept)


def leave_working_directory() -> None:
    """Takes it off this process's import path. Raises UsageError when it was removed under this process."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UsageError("the working directory does not exist any more", "cd to one that does") from None
    sys.path[:] = [entry for entry in sys.path if not _is_here(entry) or entry == str(_ROOT)]


def find_here(module: str) -> None:
    """From now on ``module`` is found in the working directory where it is nowhere else, and so is what modules there
    import.
    """
    leave_working_directory()
    find_in(os.getcwd()).add(module.partition(".")[0])


def find_in(folder: str) -> set[str]:
    """From now on code of ``folder`` finds its neighbours; everybody finds those whose names are put into what this
    returns.
    """
    finder = next((f for f in sys.meta_path if isinstance(f, _Folder) and f.folder == folder), None)
    if finder is None:
        finder = _Folder(folder)
        sys.meta_path.append(finder)
    return finder.names


class _Folder:
    """Finds top-level modules of a folder, as the last of all finders: those named, for everybody; others, for code of
    the folder.
    """

    def __init__(self, folder: str):
        self.folder = folder
        self.names: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if path is None and (name in self.names or self._is_ours(_importer())):
            return PathFinder.find_spec(name, [self.folder], target)
        return None

    def _is_ours(self, file: str) -> bool:
        """Code of the folder, and not of an environment of libraries that lies in it."""
        inside = os.path.relpath(file, self.folder).split(os.sep)
        return os.path.isabs(file) and inside[0] != os.pardir and not {"site-packages", "dist-packages"} & set(inside)


def _importer() -> str:
    """The file whose import statement, or call of importlib, is being carried out."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file != __file__ and "importlib" not in file:
            return file
        frame = frame.f_back
    return ""


def enter(folder: str) -> None:
    """A process that another program started (a Ray worker) works where the user does, on this import path's terms.

    What it starts in its turn keeps to them too. A machine that lacks the folder stays where it is.
    """
    os.environ["PYTHONSAFEPATH"] = "1"
    if os.path.isdir(folder):
        os.chdir(folder)
    leave_working_directory()


def _is_here(entry: str) -> bool:
    return not entry or os.path.realpath(entry) == os.path.realpath(os.getcwd())


@functools.cache
def _is_installed() -> bool:
    """Python finds this very copy without help: it is in site-packages, or installed from its source tree."""
    if str(_ROOT) in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        return True
    try:
        where = json.loads(importlib.metadata.distribution("slime-cli").read_text("direct_url.json") or "{}")
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return False
    source = urllib.parse.unquote(urllib.parse.urlsplit(where.get("url", "")).path)
    return bool(where.get("dir_info", {}).get("editable")) and pathlib.Path(source).resolve() == _ROOT
