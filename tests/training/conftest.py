"""The layouts' jobs take minutes and a core or two: they begin with the session, beside the tests that mostly wait for
engines."""

import pathlib
import sys

import pytest

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))

import layout_launch  # noqa: E402


def pytest_collection_finish(session: pytest.Session) -> None:
    if not session.config.option.collectonly and any(
        "layout_launch" in vars(item.module) for item in session.items if hasattr(item, "module")
    ):
        layout_launch.start()
