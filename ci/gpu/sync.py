"""Weights from a trainer's memory into an engine on the same GPU: slime's ipc transport, and the plain way beside it.

``python -m ci.gpu.sync FOLDER [--small]`` (a new folder; about 3 minutes on an H200) starts ``slime serve-rollout``
with a random Qwen3 of the 0.6B shape, puts the same weights on the GPU here and prints JSON lines: ``copy`` (a copy on
the device, the ceiling), ``ipc`` for each bucket size (GB/s of both ways, some syncs of each in turn, and their
ratio; ``whole`` has the version's marks in it, ``by_parts`` is slime's first sync, before an engine's layout is
proven), ``parts`` (what slime's sync does besides sending, in ms) and ``proof`` (the engine's own sums agree; after its
weights were spoilt they do not; a sync restores them). It ends with exit code 1 when a ratio is below the bound or a
proof fails. ``--small`` is for trying it out, on a CPU as well.

The plain way: one bucket at a time, tensors put together, pickled and posted over a new connection, the answer waited
for; SGLang's own functions, nothing overlapped, nothing kept.
"""

import argparse
import dataclasses
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch

from bench.syncs import Learner, serving, weights
from ci.gpu import common, shapes
from slime_cli import engine_api
from slime_cli.errors import EngineError
from slime_cli.weights.transport import Sending
from slime_cli.weights.transports import memory

SMALL = "tiny:qwen3?num_hidden_layers=28&hidden_size=64&intermediate_size=128&head_dim=16"
MIB = (64, 512, 4096)
"""Bucket sizes; the last holds the whole model."""
BOUND = 2.0
"""The product's speed ÷ the plain way's, at every bucket size."""
TIMES = 6
"""Syncs of each way in a row; the first two warm up: what the way before has left behind slows them."""
ROUNDS = 2
"""All ways, one after the other."""
Named = Sequence[tuple[str, torch.Tensor]]


class Plain:
    """The plain way."""

    def __init__(self, url: str) -> None:
        from sglang.srt.utils.common import MultiprocessingSerializer
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        torch.multiprocessing.set_sharing_strategy("file_system")  # what is on a CPU crosses to another program so
        self.url = url
        self.serialize: Callable[..., Any] = MultiprocessingSerializer.serialize
        self.bucket: Callable[..., Any] = FlattenedTensorBucket

    def send(self, named: Named, limit: int) -> None:
        import requests

        for group in groups(named, limit):
            bucket = self.bucket(named_tensors=group)
            payload = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
            text = self.serialize(payload, output_str=True)
            synchronize()
            body = {"serialized_named_tensors": [text], "load_format": "flattened_bucket", "flush_cache": False}
            answer = requests.post(f"{self.url}/update_weights_from_tensor", json=body, timeout=300)
            assert answer.status_code == 200, answer.text[:300]


def groups(named: Named, limit: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """The plain way's buckets: ``limit`` bytes and what the last tensor has more than that; slime's have never more."""
    group: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in named:
        group.append((name, tensor))
        size += tensor.nbytes
        if size >= limit:
            yield group
            group, size = [], 0
    if group:
        yield group


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(work: Callable[[], object]) -> float:
    synchronize()
    started = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - started


def _copied(size: int, device: torch.device) -> float:
    """Seconds of a copy on the device."""
    one = torch.empty(size, dtype=torch.uint8, device=device)
    other = torch.empty_like(one)
    return min(timed(lambda: other.copy_(one)) for _ in range(TIMES))


def compare(url: str, learner: Learner, mib: int) -> float:
    """Both ways in turn with buckets of so many MiB: slime's speed ÷ the plain way's."""
    limit = mib << 20
    plain = Plain(url)
    named = list(learner.weights.items())
    transport = memory.Memory("ipc", buffer=limit)
    version = transport.write(learner, 0)

    def whole() -> None:
        transport.send(version, [url], flush=False)

    def looking() -> None:
        assert not learner.send(dataclasses.replace(_how(learner), tensors=()))

    def sending() -> None:
        assert not learner.send(how)

    whole()
    transport.verify(version, [url])
    whole()  # what was proven is used from here on
    how = _how(learner)
    ways = {"plain": lambda: plain.send(named, limit), "slime": sending, "whole": whole, "by_parts": looking}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    first: dict[str, float] = {}
    for _ in range(ROUNDS):
        for way, work in ways.items():
            taken = []
            for _ in range(TIMES):
                taken.append(timed(work))
                if way == "whole":
                    transport.verify(version, [url])
            first.setdefault(f"{way}_first_s", taken[0])
            seconds[way] += taken[2:]
    median = {way: statistics.median(taken) for way, taken in seconds.items()}
    speed = {f"{way}_gb_s": learner.size / taken / 1e9 for way, taken in median.items()}
    ratio = median["plain"] / median["slime"]
    buckets = sum(1 for _ in groups(named, limit))
    fastest = {f"{way}_least_ms": 1e3 * min(taken) for way, taken in seconds.items()}
    common.say("ipc", bucket_mib=mib, buckets=buckets, **speed, ratio=ratio, held=ratio >= BOUND, **first, **fastest)
    return ratio


def _how(learner: Learner) -> Sending:
    assert learner.how is not None
    return learner.how


def proof(url: str, learner: Learner, way: Literal["ipc", "nccl"]) -> bool:
    """The transport as a run uses it: proven, spoilt and found, restored."""
    transport = memory.Memory(way)
    version = transport.write(learner, 0)
    parts = {"send_flush_ms": 1e3 * timed(lambda: transport.send(version, [url], flush=True))}
    parts["send_ms"] = 1e3 * timed(lambda: transport.send(version, [url], flush=False))
    kinds = [proof.kind for proof in transport.verify(version, [url])]
    parts["verify_ms"] = 1e3 * timed(lambda: transport.verify(version, [url]))
    common.say("parts", **parts)
    engine_api.require(url, "/weights_checker", {"action": "reset_tensors"}, 60)
    try:
        transport.verify(version, [url])
        found = False
    except EngineError:
        found = True
    transport.send(version, [url], flush=True)
    kinds += [proof.kind for proof in transport.verify(version, [url])]
    common.say("proof", kinds=kinds, spoilt_weights_found=found)
    return found and set(kinds) == {"checksum"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--small", action="store_true", help="a small model and small buckets")
    args = parser.parse_args()
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    words = (
        ["--sglang-mem-fraction-static", "0.4", "--sglang-cuda-graph-backend-decode", "disabled"]
        if device.type == "cuda"
        else []
    )
    started = time.monotonic()
    with serving(folder, SMALL if args.small else shapes.tiny(shapes.QWEN3_06B), words) as (url, model):
        common.say("serve-rollout", seconds=time.monotonic() - started)
        learner = Learner(weights(model, device), device)
        machine = common.machine() if device.type == "cuda" else "cpu"
        size = {"gb": learner.size / 1e9, "tensors": len(learner.weights)}
        common.say("copy", machine=machine, **size, gb_s=learner.size / _copied(learner.size, device) / 1e9)
        ratios = [compare(url, learner, mib) for mib in ((1, 4096) if args.small else MIB)]
        proven = proof(url, learner, "ipc")
    held = proven and min(ratios) >= BOUND
    common.say("result", ratios=ratios, proven=proven, held=held)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
