"""A user's file as a module. Files of different folders that import a neighbour of the same name each get their own.

Called by :mod:`.hooks` alone. Invariants: a folder is a package under a private name, so that relative imports work
too; in its modules ``import helpers`` means the folder's ``helpers``, unless that name is Python's, an installed
library's or slime's; what can be imported by everybody from the same file is imported once, under its usual name.
"""

import builtins
import functools
import hashlib
import importlib
import importlib.util
import os
import pathlib
import re
import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

from slime_cli import processes
from slime_cli.hooks.raised import installed

_FOLDERS: dict[str, str] = {}
"""Private package -> its folder."""


def run(file: pathlib.Path) -> ModuleType:
    """The module of a resolved path; run once a process. Whatever it raises goes through."""
    package = _package(file.parent)
    name = f"{package}.{re.sub(r'[^0-9A-Za-z_-]', '_', file.stem)}"
    if name not in sys.modules:
        loader = _Loader(name, str(file))
        spec = importlib.util.spec_from_file_location(name, file, loader=loader)
        assert spec is not None  # only without a loader could it be
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _package(folder: pathlib.Path) -> str:
    name = (
        f"slime_hook_{re.sub('[^0-9A-Za-z_]', '_', folder.name)}_{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}"
    )
    if name not in _FOLDERS:
        _FOLDERS[name] = str(folder)
        sys.modules[name] = ModuleType(name, "The folder of a hook.")
        sys.modules[name].__path__ = [str(folder)]
        processes.find_in(str(folder))  # for imports by a computed name
        if _Finder not in sys.meta_path:
            sys.meta_path.insert(0, _Finder)
    return name


class _Finder:
    """Finds the modules of private packages."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in _FOLDERS:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    """Gives a module an ``import`` statement that looks into its folder first: Python takes it from the module's
    builtins."""

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__builtins__"] = vars(builtins) | {
            "__import__": functools.partial(_import, self.name.partition(".")[0])
        }
        super().exec_module(module)


def _import(
    package: str, name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
) -> ModuleType:
    top = name.partition(".")[0]
    if level or not _is_neighbour(_FOLDERS[package], top):
        return builtins.__import__(name, globals, locals, fromlist, level)
    if fromlist:
        return builtins.__import__(f"{package}.{name}", globals, locals, fromlist, 0)
    importlib.import_module(f"{package}.{name}")
    return sys.modules[f"{package}.{top}"]


@functools.cache
def _is_neighbour(folder: str, name: str) -> bool:
    found = None if name in sys.stdlib_module_names else PathFinder.find_spec(name, [folder])
    if found is None:
        return False
    public = _public(name)
    if public is None:
        return True
    if found.origin is None or public.origin is None:  # a bare folder is a package only where nothing else is
        return found.origin is not None
    return not installed(public.origin) and os.path.realpath(public.origin) != os.path.realpath(found.origin)


def _public(name: str) -> ModuleSpec | None:
    """The module that ``name`` is for code outside hooks' folders."""
    finders = (finder for finder in sys.meta_path if finder is not _Finder)
    specs = (finder.find_spec(name, None) for finder in finders)
    return next((spec for spec in specs if spec is not None), None)
