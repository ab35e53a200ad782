"""For all tests: hypothesis has no deadline, so that a busy machine does not fail a property; torch's threads sleep
while they wait, as the trainer's do, since tests share the cores with engines and with each other; and genuine engines,
started once a session (by each process of `pytest -n`): `slime serve-rollout` in a process of its own."""

import os
import signal
import time

import hypothesis
import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is loaded
hypothesis.settings.register_profile("slime", deadline=None)
hypothesis.settings.load_profile("slime")

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
    from tests.end_to_end.conftest import TINY, start

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
