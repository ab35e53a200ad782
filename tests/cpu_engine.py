"""A test file's own ``__main__`` in a process with the environment of an engine on a CPU."""

import json
import subprocess
import sys
from typing import Any

from slime_cli import processes
from slime_cli.hardware import device as hardware


def found(file: str) -> Any:
    """What the file, run as a script, printed last, as JSON."""
    environment = hardware.engine_environment(processes.environment())
    made = subprocess.run([sys.executable, file], capture_output=True, text=True, env=environment, timeout=600)
    assert made.returncode == 0, made.stderr[-4000:]
    return json.loads(made.stdout.splitlines()[-1])
