"""A user's function that blocks the event loop is named: its file and line, once; slime's own code never is. One that
does so for too long ends the process with exit code 2."""

import asyncio
import importlib.util
import os
import pathlib
import subprocess
import sys
import threading
import time

import pytest

from slime_cli.hooks import blocking

FUNCTION = "def sleeps(until):\n    import time\n    while not until():\n        time.sleep(0.01)\n"
ENDS = """
import asyncio, sys, time
from slime_cli.hooks import blocking
async def main():
    with blocking.named(print, limit=0.1, after=0.05):
        time.sleep(60)
asyncio.run(main())
"""


def loaded(folder):
    path = folder / "mine.py"
    path.write_text(FUNCTION)
    spec = importlib.util.spec_from_file_location("mine", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, path


async def test_the_line_that_blocks_is_said_once(tmp_path):
    mine, path = loaded(tmp_path)
    said = []
    with blocking.named(said.append, limit=600, after=0.02):
        for _ in range(2):
            mine.sleeps(lambda: said)
            await asyncio.sleep(0)
        begun = time.monotonic()
        mine.sleeps(lambda: time.monotonic() > begun + 0.2)
    lines = {text.split(" blocks the run")[0] for text in said}
    assert len(lines) == len(said) and all(f"{path}:" in line and "(sleeps)" in line for line in lines)
    assert "asyncio.to_thread" in said[0]


@pytest.mark.parametrize("ours", [blocking.__file__, threading.__file__])
async def test_slime_and_libraries_are_not_named(ours):
    said = []
    code = compile("import time\nfor _ in range(20):\n    time.sleep(0.01)\n", ours, "exec")
    with blocking.named(said.append, limit=600, after=0.02):
        await asyncio.sleep(0)
        exec(code, {"__name__": "ours"})
    assert not any(text.startswith(f"warning: {ours}") for text in said)


def test_one_that_never_returns_ends_the_run(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(ENDS)
    environment = dict(os.environ, PYTHONPATH=str(pathlib.Path(blocking.__file__).parents[2]))
    command = [sys.executable, path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert done.returncode == 2 and f"error: {path}:6 (main) blocks the run for" in done.stderr, done.stderr
    assert "the same command resumes" in done.stderr
