"""Commands as a user runs them. The engines that they share are a fixture of tests/conftest.py."""

import pathlib
import signal
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parent
SMALL = HERE / "small.yaml"
TINY = "tiny:qwen3?num_hidden_layers=2&hidden_size=64&intermediate_size=128&head_dim=16"


def slime(*words: str, **kwargs) -> subprocess.CompletedProcess:
    """Runs `slime WORDS` to its end as a user would."""
    return subprocess.run(
        [sys.executable, "-m", "slime_cli", *map(str, words)], capture_output=True, text=True, timeout=420, **kwargs
    )


def start(*words: str, log: pathlib.Path, **kwargs) -> subprocess.Popen:
    def as_in_a_terminal():  # tests that run in the background inherit an ignored Ctrl-C
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    command = [sys.executable, "-m", "slime_cli", *map(str, words)]
    with open(log, "ab") as out:
        return subprocess.Popen(
            command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, preexec_fn=as_in_a_terminal, **kwargs
        )


@pytest.fixture(scope="session")
def trained(served, tmp_path_factory):
    """A finished small run, attached to the shared engines."""
    run = tmp_path_factory.mktemp("runs") / "trained"
    done = slime("train", "--profile", SMALL, "--run-dir", run, "--rollout-endpoint", served / "endpoint.json")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of this folder run commands on genuine engines."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.engine)
