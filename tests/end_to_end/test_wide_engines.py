"""Genuine engines of several devices on a CPU: one of four tensor-parallel ranks, and two of two behind one router.

1. Every way that weights go (files, deltas, shared memory, a group) brings each rank its part: the sums of all ranks
   are proven, weights that were spoilt in the engines are found, and the next sync restores them.
2. A run on two engines of two ranks: each version is proven in both, both are asked, and what they compute is what the
   trainer computes.
"""

import json
import re

import pytest
from safetensors.torch import load_file

from slime_cli import engine_api, manifests
from slime_cli.errors import EngineError
from slime_cli.weights.transports.delta import Delta
from slime_cli.weights.transports.disk import Disk
from slime_cli.weights.transports.memory import Memory
from tests.end_to_end.conftest import TINY, slime
from tests.end_to_end.test_memory_sync import TENSOR, _words, moved, serving
from tests.ranks import MemoryRank, Ranks

FOUR_HEADS = f"{TINY}&num_key_value_heads=4"
WIDE = {"one of four": "4", "two of two": "2"}
"""Fixture -> devices of an engine; there are four."""
WAYS = ("disk", "delta", "ipc", "nccl")


@pytest.fixture(scope="module", params=WIDE)
def wide(request, tmp_path_factory):
    """The endpoint of a `serve-rollout` on four devices, and its model's folder."""
    folder = tmp_path_factory.mktemp("wide")
    words = ("--rollout-num-gpus", "4", "--rollout-num-gpus-per-engine", WIDE[request.param])
    words += (
        "--router-policy",
        "round_robin",
    )  # by default it sends so few requests to the engine that has their prefix
    with serving(FOUR_HEADS, folder, *words):
        path = folder / "other" / "endpoint.json"
        yield manifests.read(path, manifests.Endpoint), path, folder / "other" / "model"


class Senders:
    """Each way as a run uses it, with the learner that writes or sends."""

    def __init__(self, model, weights, folder):
        self.of_files = Ranks(model, weights)
        self.disk = Disk(folder / "disk", 3)
        self.delta = Delta(folder / "delta", 3, encoding="xor", full_interval=9, say=print)
        self.ipc, self.nccl = Memory("ipc", buffer=TENSOR), Memory("nccl", buffer=TENSOR)

    def send(self, way, weights, step, urls):
        learner = MemoryRank(weights, step) if way in ("ipc", "nccl") else self.of_files
        learner.weights = weights
        transport = getattr(self, way)
        version = transport.write(learner, step)
        transport.send(version, urls, flush=True)
        return transport, version


# -- 1 -----------------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(900)
def test_every_way_brings_each_rank_its_part(wide, tmp_path):
    endpoint, _, model = wide
    urls = [engine.url for engine in endpoint.engines]
    weights = load_file(model / "model.safetensors")
    senders = Senders(model, weights, tmp_path)
    for step, way in enumerate((*WAYS, *WAYS), 1):  # twice: the second delta is one
        transport, version = senders.send(way, moved(weights, 0.01 * step), step, urls)
        proofs = transport.verify(version, urls)
        assert [proof.kind for proof in proofs] == ["checksum"] * len(urls), way
        assert all(proof.tensors == proofs[0].tensors > len(weights) for proof in proofs), "of several ranks"
        for url in urls:
            engine_api.require(url, "/weights_checker", {"action": "reset_tensors"}, 60)
            with pytest.raises(EngineError, match="holds other weights"):
                transport.verify(version, [url])
        transport.send(version, urls, flush=True)
        assert [proof.kind for proof in transport.verify(version, urls)] == ["checksum"] * len(urls), way
    assert (tmp_path / "delta" / "weights" / "v000006").exists()
    senders.ipc.close(), senders.nccl.close(), senders.delta.close()


# -- 2 -----------------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(900)
def test_a_run_on_engines_of_several_ranks(wide, tmp_path):
    endpoint, path, model = wide
    words = [model if word == TINY else word for word in _words("ipc")]
    words += ["--num-rollout", "3", "--run-dir", tmp_path / "run"]
    done = slime("train", *words, "--rollout-endpoint", path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["engines_verified"] is True
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert max(line["train/train_rollout_logprob_abs_diff_max"] for line in lines) <= 1e-4
    logs = [log.read_text() for log in sorted((path.parent / "logs").glob("engine*"))]
    assert len(logs) == len(endpoint.engines) and all(map(prompts_in, logs))


def prompts_in(log):
    """Whether an engine was asked for more than the token of a health check and the few of its warm-up."""
    batches = re.findall(r"Prefill batch, .*?#new-token: (\d+), #cached-token: (\d+)", log)
    return any(int(new) + int(cached) >= 10 for new, cached in batches)
