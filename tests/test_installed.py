"""What is installed: one list of versions, and words for what is missing."""

import pathlib
import re
import tomllib

import pytest

from slime_cli import installed
from slime_cli.errors import UsageError

ROOT = pathlib.Path(__file__).parents[1]


def test_the_tested_versions_are_those_of_pyproject_and_of_the_locks():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = dict(line.split("==") for line in project["dependencies"] if "==" in line)
    apart = {name: installed.TESTED[name] for name in installed.WITHOUT_REQUIREMENTS}
    assert installed.TESTED.items() <= (pinned | apart).items() and not pinned.keys() & apart.keys()
    for lock in ("lock-cpu.txt", "lock-cuda.txt"):
        locked = dict(re.findall(r"^([\w.-]+)==([\w.]+)", (ROOT / "ci" / lock).read_text(), re.MULTILINE))
        assert installed.TESTED.items() <= locked.items()


def test_what_is_missing_is_named_with_the_commands_that_install_it():
    have = installed.TESTED | {"megatron-bridge": None, "ray": None}
    installed.require("torch", "sglang", version=have.get)
    with pytest.raises(UsageError, match="not installed: megatron-bridge, ray") as caught:
        installed.require("torch", "megatron-bridge", "ray", version=have.get)
    assert "pip install --no-deps megatron-bridge==0.6.2 && pip install ray==2.60.0" in caught.value.fix
