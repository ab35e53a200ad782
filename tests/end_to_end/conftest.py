"""Genuine engines, started once for all end-to-end tests: `slime serve-rollout` in a process of its own."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

HERE = pathlib.Path(__file__).parent
SMALL = HERE / "small.yaml"
HOSTILE = (
    "h2",
    "json",
    "torch",
    "typing_extensions",
    "random",
    "socket",
    "numpy",
    "httpx",
    "ray",
    "sglang",
    "megatron",
    "sgl_kernel",
    "zmq",
)
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
def hostile(tmp_path_factory):
    """A working directory with a user's scripts named like libraries: each ends the process that imports it."""
    folder = tmp_path_factory.mktemp("scripts")
    for name in HOSTILE:
        (folder / f"{name}.py").write_text(f"raise SystemExit('{name}.py of the working directory was imported')\n")
    return folder


@pytest.fixture(scope="session")
def served(tmp_path_factory, hostile):
    """The folder of a running `serve-rollout`, started among hostile scripts: endpoint.json, model/, logs/."""
    folder = tmp_path_factory.mktemp("served")
    environment = dict(
        os.environ, http_proxy="http://127.0.0.1:9", HTTPS_PROXY="http://127.0.0.1:9"
    )  # must never be used
    process = start(
        "serve-rollout",
        "--hf-checkpoint",
        TINY,
        "--run-dir",
        folder,
        log=folder / "out.log",
        env=environment,
        cwd=hostile,
    )
    deadline = time.time() + 300
    while not (folder / "endpoint.json").exists():
        assert process.poll() is None and time.time() < deadline, (folder / "out.log").read_text()[-3000:]
        time.sleep(0.2)
    yield folder
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    assert not (folder / "endpoint.json").exists()


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
