"""The benchmark of the log-probability path's memory, which is no matter of speed: it runs, and the chunks do what they
are for."""

import json
import subprocess
import sys

import pytest


@pytest.mark.engine
def test_logits_are_never_held_whole():
    done = subprocess.run([sys.executable, "-m", "bench.heads", "4096"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["chunked"] < 1 < found["plain"]
