"""Weights from the trainer's memory into genuine engines, by shared memory and by a group (gloo).

1. A run that is killed and resumed: every version is proven in the engine, before and after, and what it computes is
   what the trainer computes. Nothing of a version is on a disk.
2. Bit for bit, in buckets that are smaller than a tensor; weights that were spoilt in the engine are found by the proof
   and restored by the next sync. A tied model holds its embedding once.
3. Requests that no engine can follow are refused by it and leave it alive and provable.
4. An engine that dies in the middle of a sync is named, and soon; a setting that its group cannot have as well.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time

import httpx
import pytest
from safetensors.torch import load_file

from slime_cli import engine_api, manifests
from slime_cli.errors import EngineError
from slime_cli.serving import control
from slime_cli.weights import announcing, posting
from slime_cli.weights.transports.memory import SPOILT, Memory
from tests.end_to_end.conftest import slime, start
from tests.end_to_end.test_delta_sync import WORDS
from tests.end_to_end.test_resume import _kill_when, _lines
from tests.ranks import MemoryRank

WAYS = ("ipc", "nccl")
TENSOR = 4096
"""Bytes of a bucket: less than most of the model's tensors have."""


@pytest.fixture(scope="module")
def endpoint(served):
    return manifests.read(served / "endpoint.json", manifests.Endpoint)


@pytest.fixture(scope="module")
def weights(served):
    return load_file(served / "model" / "model.safetensors")


@pytest.fixture
def url(endpoint, weights):
    """The engine, which has the weights of its model again afterwards."""
    url = endpoint.engines[0].url
    before = engine_api.get(url, "/model_info")["weight_version"]
    yield url
    transport = Memory("ipc")
    transport.send(transport.write(MemoryRank(weights), 0), [url], flush=True)
    engine_api.post(url, "/update_weight_version", {"new_version": before, "abort_all_requests": False}, 60)


def _words(way):
    """Options of a short run with deltas, with another transport in their place."""
    words = [word for word in WORDS if "delta" not in word and word not in ("--update-weight-mode", "overwrite")]
    return [*words, "--update-weight-transport", way, "--update-weight-buffer-size", str(1 << 20)]


@contextlib.contextmanager
def serving(model, folder, *words):
    """An engine of its own while the block runs."""
    process = start(
        "serve-rollout", "--hf-checkpoint", model, "--run-dir", folder / "other", *words, log=folder / "log"
    )
    endpoint = folder / "other" / "endpoint.json"
    deadline = time.time() + 300
    while not endpoint.exists():
        assert process.poll() is None and time.time() < deadline, (folder / "log").read_text()[-3000:]
        time.sleep(0.2)
    yield manifests.read(endpoint, manifests.Endpoint).engines[0]
    process.send_signal(signal.SIGINT)
    process.wait(60)


def moved(weights, by):
    return {name: tensor + by for name, tensor in weights.items()}


# -- 1 -----------------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", WAYS)
def test_killed_and_resumed_every_version_is_proven(served, tmp_path, way):
    words = ("train", *_words(way), "--run-dir", tmp_path / "run", "--rollout-endpoint", served / "endpoint.json")
    _kill_when(start(*words, log=tmp_path / "out.log"), lambda: _lines(tmp_path / "run" / "metrics.jsonl") >= 3)
    done = slime(*words)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["engines_verified"] is True
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["rollout_id"] for line in lines] == list(range(6))
    assert max(line["train/train_rollout_logprob_abs_diff_max"] for line in lines) <= 1e-4
    assert not (tmp_path / "run" / "weights").exists()


# -- 2 -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("buffer", [TENSOR, 1 << 30])
def test_bit_for_bit_and_spoilt_weights_are_restored(url, weights, way, buffer):
    assert max(tensor.nbytes for tensor in weights.values()) > TENSOR
    assert "lm_head.weight" not in weights, "the embedding is the head as well"
    learner = MemoryRank(moved(weights, 0.01), step=7)
    transport = Memory(way, buffer=buffer)
    version = transport.write(learner, 7)
    transport.send(version, [url], flush=True)
    (proof,) = transport.verify(version, [url])
    assert (proof.kind, proof.version) == ("checksum", "v000007")
    assert engine_api.require(url, "/weights_checker", {"action": "reset_tensors"}, 60)
    with pytest.raises(EngineError, match="holds other weights than v000007"):
        transport.verify(version, [url])
    transport.send(version, [url], flush=True)
    assert [proof.kind for proof in transport.verify(version, [url])] == ["checksum"]
    transport.close()
    answer = engine_api.post(url, "/generate", {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 1}}, 60)
    assert answer.json()["meta_info"]["weight_version"] == "v000007"


def test_a_paused_engine_continues_its_requests_with_the_new_weights(url, weights):
    learner = MemoryRank(moved(weights, 0.04), step=5)
    transport = Memory("ipc")
    sampling = {"max_new_tokens": 400, "ignore_eos": True}
    body = {"input_ids": [5, 6, 7], "sampling_params": sampling, "stream": True}
    chunks = []
    with (
        httpx.Client(trust_env=False, timeout=120) as client,
        client.stream("POST", url + "/generate", json=body) as answer,
    ):
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                meta = json.loads(line.removeprefix("data: "))["meta_info"]
                chunks.append((meta["completion_tokens"], meta["weight_version"]))
            if len(chunks) == 10:
                control.pause([url], "retract")
                version = transport.write(learner, 5)
                transport.send(version, [url], flush=False)
                assert [proof.kind for proof in transport.verify(version, [url])] == ["checksum"]
                control.resume([url])
    assert chunks[-1] == (400, "v000005") and chunks[0][1] != "v000005"
    assert not any(version.endswith(SPOILT) for _, version in chunks), "no token is of a part of a version"
    engine_api.flush(url)


@pytest.mark.timeout(600)
def test_two_trainer_ranks_send_what_they_have_together(served, tmp_path):
    words = [
        *_words("ipc"),
        "--num-rollout",
        "2",
        "--actor-num-gpus-per-node",
        "2",
        "--tensor-model-parallel-size",
        "2",
    ]
    words += ["--run-dir", tmp_path / "run", "--rollout-endpoint", served / "endpoint.json"]
    done = slime("train", *words)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["engines_verified"] is True


class Stopping(dict):
    """Weights of which the export fails in the middle."""

    def items(self):
        for number, item in enumerate(super().items()):
            if number == len(self) // 2:
                raise RuntimeError("no more of them")
            yield item


@pytest.mark.parametrize("buffer", [TENSOR, 1 << 30])
def test_an_engine_that_is_told_ahead_has_every_bit_and_lives_when_it_does_not_come(url, weights, buffer, monkeypatch):
    monkeypatch.setattr(announcing, "PART", TENSOR)
    learner = MemoryRank(weights)
    transport = Memory("ipc", buffer=buffer)

    def sync(step, named):
        learner.step, learner.weights = step, named
        version = transport.write(learner, step)
        transport.send(version, [url], flush=True)
        (proof,) = transport.verify(version, [url])
        assert (proof.kind, proof.version) == ("checksum", f"v{step:06d}")

    for step in (1, 2, 3, 4):  # the places are proven, then known, then announced
        sync(step, moved(weights, 0.01 * step))
    assert learner.sender._known.counts.loaded(0) > 1, "parts that the engine's loader counted"
    with pytest.raises(RuntimeError, match="no more of them"):
        sync(5, Stopping(moved(weights, 0.05)))
    assert engine_api.get(url, "/model_info")["weight_version"] == f"v000005{SPOILT}"
    for step in (6, 7, 8):
        sync(step, moved(weights, 0.01 * step))


WRITER = """
import sys, time
from safetensors.torch import load_file
from slime_cli.weights import announcing
from slime_cli.weights.transports.memory import Memory
from tests.ranks import MemoryRank
announcing.PART = 4096
weights = load_file(sys.argv[2])
learner = MemoryRank(weights, 1)
transport = Memory("ipc")
for _ in range(2):
    version = transport.write(learner, 1)
    transport.send(version, [sys.argv[1]], flush=True)
    transport.verify(version, [sys.argv[1]])
class Stalled(dict):
    def items(self):
        for number, item in enumerate(super().items()):
            if number == len(self) // 2:
                print("stalled", flush=True)
                time.sleep(100)
            yield item
learner.step, learner.weights = 2, Stalled(weights)
transport.send(transport.write(learner, 2), [sys.argv[1]], flush=True)
"""


def test_an_engine_lives_when_the_trainer_is_killed_in_the_middle_of_a_bucket_that_it_was_told_of(served, url, weights):
    model = served / "model" / "model.safetensors"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, url, model], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None and writer.stdout.readline() == "stalled\n"
    writer.kill()
    writer.wait(20)
    begun = time.monotonic()
    learner = MemoryRank(moved(weights, 0.07), step=3)
    assert engine_api.get(url, "/model_info")["weight_version"] == f"v000002{SPOILT}"
    transport = Memory("ipc")
    version = transport.write(learner, 3)
    transport.send(version, [url], flush=True)
    assert [proof.kind for proof in transport.verify(version, [url])] == ["checksum"]
    assert time.monotonic() - begun < 30


# -- 3 -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/update_weights_from_tensor", "/update_weights_from_distributed"])
def test_a_request_that_makes_no_sense_is_refused_and_the_engine_lives(url, weights, path):
    group = {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]]}
    bodies = [
        {},
        {"serialized_named_tensors": 3},
        {"serialized_named_tensors": ["?"]},
        {"names": 3},
        group | {"names": 1},
    ]
    with httpx.Client(trust_env=False, timeout=60) as client:
        for body in bodies:
            assert client.post(url + path, json=body).status_code >= 400, body
    learner = MemoryRank(moved(weights, 0.02), step=8)
    transport = Memory("ipc")
    version = transport.write(learner, 8)
    transport.send(version, [url], flush=True)
    assert [proof.kind for proof in transport.verify(version, [url])] == ["checksum"]


# -- 4 -----------------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", WAYS)
def test_an_engine_that_is_killed_in_the_middle_is_named_soon(served, url, weights, tmp_path, way, monkeypatch):
    with serving(served / "model", tmp_path) as other:
        learner = MemoryRank(moved(weights, 0.03), step=9)
        transport = Memory(way, buffer=TENSOR)
        put = posting.Posting.put
        puts = []

        def killing(self, body):
            puts.append(self.path)
            if len([path for path in puts if "update_weights" in path]) == 4:
                os.kill(other.pid, signal.SIGKILL)
            put(self, body)

        monkeypatch.setattr(posting.Posting, "put", killing)
        begun = time.monotonic()
        with pytest.raises(EngineError) as caught:
            transport.send(transport.write(learner, 9), [url, other.url], flush=True)
        assert time.monotonic() - begun < 30 and other.url in caught.value.message
        monkeypatch.undo()
        held = engine_api.get(url, "/model_info")["weight_version"]
        assert held == ("v000009" if way == "ipc" else f"v000009{SPOILT}"), "a part of a version is no version"
        version = transport.write(learner, 9)
        transport.send(version, [url], flush=True)
        assert [proof.kind for proof in transport.verify(version, [url])] == ["checksum"]
        transport.close()


def test_two_syncs_at_once_leave_one_of_the_two_whole(url, weights):
    """Nothing but the endpoint's claim keeps two from one engine, so each proof tells whether its own is there."""
    learners = [MemoryRank(moved(weights, by), step=step) for step, by in ((11, 0.1), (12, 0.2))]
    proven: dict[int, bool] = {}

    def sync(learner):
        transport = Memory("ipc", buffer=TENSOR)
        version = transport.write(learner, learner.step)
        transport.send(version, [url], flush=True)
        try:
            proven[learner.step] = transport.verify(version, [url])[0].kind == "checksum"
        except EngineError:
            proven[learner.step] = False

    threads = [threading.Thread(target=sync, args=(learner,)) for learner in learners]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(proven.values()) <= 1
    sync(learners[0])
    assert proven[11]
