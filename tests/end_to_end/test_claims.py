"""One endpoint and several runs: one at a time updates it, and none with weights that its engines cannot take."""

import os
import signal
import time

import httpx

from slime_cli import manifests
from slime_cli.serving import claim
from tests.end_to_end.conftest import SMALL, slime, start


def test_a_second_run_is_refused_a_killed_one_is_taken_over_and_another_model_never_reaches_the_engines(
    served, tmp_path
):
    path = served / "endpoint.json"
    lock = claim.beside(served / "endpoint.json")
    words = ("train", "--profile", SMALL, "--rollout-endpoint", path)
    first = start(*words, "--run-dir", tmp_path / "a", log=tmp_path / "out.log")
    deadline = time.time() + 240
    while (held := claim.holder_of(lock)) is None or str(tmp_path / "a") not in held.holder:
        assert first.poll() is None and time.time() < deadline, (tmp_path / "out.log").read_text()[-3000:]
        time.sleep(0.1)
    for other in (
        (*words, "--run-dir", tmp_path / "b"),
        ("sync", "--load", served / "model", "--rollout-endpoint", path),
    ):
        refused = slime(*other)
        assert (
            refused.returncode == 2
            and f"updated by slime train --run-dir {tmp_path / 'a'} (pid {first.pid} on " in refused.stderr
        )
    assert first.poll() is None
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    wide = "tiny:qwen3?num_hidden_layers=2&hidden_size=32&intermediate_size=128&head_dim=16"
    other = slime(*words, "--run-dir", tmp_path / "c", "--hf-checkpoint", wide)
    assert other.returncode == 3, other.stdout + other.stderr
    assert f"took the endpoint over from slime train --run-dir {tmp_path / 'a'}" in other.stdout
    assert (
        f"{tmp_path / 'c' / 'model'} does not fit what" in other.stderr
        and "model.embed_tokens.weight is 320 x 32, not 320 x 64" in other.stderr
    )
    assert claim.holder_of(lock) is None and "starting Ray" not in other.stdout
    endpoint = manifests.read(path, manifests.Endpoint)
    body = {"input_ids": [10, 11], "sampling_params": {"max_new_tokens": 1}}
    assert (
        httpx.Client(trust_env=False, timeout=60).post(endpoint.router_url + "/generate", json=body).status_code == 200
    )
