"""A user's module, written where a test needs one."""

import pathlib
from collections.abc import Callable

import pytest

from slime_cli.hooks.kinds import Hook


@pytest.fixture
def hook(tmp_path: pathlib.Path) -> Callable[..., Hook]:
    """``hook(kind, code)``: the function ``f`` of a module with that code, loaded as of that kind."""
    count = 0

    def make(kind: str, code: str) -> Hook:
        nonlocal count
        count += 1
        file = tmp_path / f"mine{count}.py"
        file.write_text(code)
        return Hook.load(f"{file}:f", kind)

    return make
