"""Whole weights into a genuine engine: through files, shared memory and a group. Seconds until it has them.

What they have in common, flushing the cache and proving, is not counted.
"""

import contextlib
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from slime_cli.hardware.device import gpu_name
from slime_cli.weights import publish, sums, tensor_sums
from slime_cli.weights.folder import opened
from slime_cli.weights.sending import Sender
from slime_cli.weights.transport import Asked, Sending
from slime_cli.weights.transports import disk
from slime_cli.weights.transports.memory import Memory

MODEL = (
    "tiny:qwen3?num_hidden_layers=12&hidden_size=512&intermediate_size=2048&num_attention_heads=8"
    "&num_key_value_heads=4&head_dim=64"
)
"""Some 50 million parameters in float32."""
TIMES = 5
"""Syncs of each way; the first two warm up."""


class Learner:
    """One rank whose policy is ``weights``, as far as sending asks for it."""

    def __init__(self, weights: dict[str, torch.Tensor], device: torch.device) -> None:
        self.weights = weights
        self.device = device
        self.size = sum(tensor.nbytes for tensor in weights.values())
        self.sender = Sender(0, device)
        self.how: Sending | None = None
        """The last sync."""

    def send(self, how: Sending) -> dict[str, str]:
        self.how = how
        return self.sender.send(iter(self.weights.items()), how, self.size + 16 * len(self.weights))

    def sums(self, asked: Asked) -> dict[str, list[frozenset[str]]]:
        function = sums.NAMES[asked.function]
        return tensor_sums.of(self.weights.items(), asked.names, asked.dtype, function, asked.ranks)

    def devices(self) -> list[str]:
        gpu = gpu_name(str(torch.cuda.get_device_properties(self.device).uuid)) if self.device.type == "cuda" else ""
        return [f"{os.uname().nodename}/{gpu}"]

    def part(self) -> None:
        self.sender.part()

    def publish(self, folder: str, version: str, how: object = None) -> int:
        raise NotImplementedError

    def load_published(self, folder: str) -> None:
        raise NotImplementedError

    def keep(self, name: str, path: str | None = None) -> None:
        raise NotImplementedError


@contextlib.contextmanager
def serving(folder: pathlib.Path, model: str, words: Sequence[str] = ()) -> Iterator[tuple[str, pathlib.Path]]:
    """``slime serve-rollout`` while the block runs: its engine's URL, and the model's folder."""
    run = folder / "serve"
    command = [sys.executable, "-m", "slime_cli", "serve-rollout", "--hf-checkpoint", model, "--run-dir", str(run)]
    with open(folder / "serve.log", "wb") as log:
        process = subprocess.Popen([*command, *words], stdout=log, stderr=log)
    try:
        while not (run / "endpoint.json").exists():
            if process.poll() is not None:
                raise RuntimeError((folder / "serve.log").read_text()[-3000:])
            time.sleep(0.2)
        yield json.loads((run / "endpoint.json").read_text())["engines"][0]["url"], run / "model"
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def weights(model: pathlib.Path, device: torch.device) -> dict[str, torch.Tensor]:
    """The model's, on the device, in what engines compute in there."""
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for file in sorted(model.glob("*.safetensors")):
        found |= load_file(file)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return {name: tensor.to(device, dtype) for name, tensor in found.items()}


def by_way(folder: pathlib.Path, model: str = MODEL) -> dict[str, float]:
    """MB of model a second by disk, ipc and gloo, on a CPU."""
    folder.mkdir(parents=True, exist_ok=True)
    with serving(folder, model) as (url, served):
        learner = Learner(weights(served, torch.device("cpu")), torch.device("cpu"))

        def by_disk() -> None:
            target = folder / "version"
            publish.write(
                iter(learner.weights.items()), target, hf_checkpoint=str(served), version="v", step=0, run="bench"
            )
            disk.load(opened(target), [url], flush=False)

        ways: dict[str, Callable[[], None]] = {"disk": by_disk}
        memory = {"ipc": Memory("ipc"), "gloo": Memory("nccl")}
        for name, transport in memory.items():
            version = transport.write(learner, 0)
            ways[name] = lambda transport=transport, version=version: transport.send(version, [url], flush=False)
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(TIMES):
            for name, work in ways.items():
                started = time.perf_counter()
                work()
                seconds[name].append(time.perf_counter() - started)
                if name in memory:
                    memory[name].verify(memory[name].write(learner, 0), [url])
        for transport in memory.values():
            transport.close()
    return {name: learner.size / statistics.median(taken[2:]) / 1e6 for name, taken in seconds.items()}


if __name__ == "__main__":
    print(json.dumps(by_way(pathlib.Path(sys.argv[1]))))
