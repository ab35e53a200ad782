"""Weights over a group into an engine on another GPU: slime's nccl transport, and the plain way beside it.

``python -m ci.gpu.group FOLDER [--small]`` (a new folder; two GPUs) starts ``slime serve-rollout`` with a random Qwen3
of the 0.6B shape on the first GPU, keeps the same weights on the second and prints JSON lines: ``broadcast`` (one
tensor of all bytes through NCCL alone, the ceiling), ``nccl`` for each bucket size (GB/s of both ways, in turn, and
their ratio), ``proof`` (the engine's own sums agree, find spoilt weights, and agree after the next sync), ``broken``
(seconds until an error: a process with a wrong setting of NCCL, and an engine that ends in the middle). It ends with
exit code 1 when a ratio is below the bound, a proof fails or an error takes longer than 30 s. ``--small`` is for trying
it out, on a CPU as well, over gloo.

The plain way: one bucket at a time, a request and a broadcast for each tensor of it, nothing overlapped.
"""

import argparse
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")  # as SGLang sets it in its processes

import httpx
import torch
from torch import distributed
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from bench.syncs import Learner, serving, weights
from ci.gpu import common, shapes, sync
from slime_cli import addresses
from slime_cli.errors import SlimeError
from slime_cli.weights.transports import memory

TIMES = 6
"""Syncs of each way in turn; the first two warm up."""
BOUND = 2.0
LIMIT = 30.0
"""Seconds until whatever is broken must be an error."""
WRONG = {"NCCL_SOCKET_IFNAME": "nothing0", "GLOO_SOCKET_IFNAME": "nothing0"}
"""A network interface that no machine has."""


def broadcast(rank: int, port: int, size: int, device: torch.device) -> float:
    """GB/s of one tensor of ``size`` bytes from rank 0 to rank 1: the median of some."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    store = TCPStore("127.0.0.1", port, 2, rank == 0)
    distributed.init_process_group(backend, store=store, rank=rank, world_size=2)
    flat = torch.zeros(size, dtype=torch.uint8, device=device)
    seconds = [sync.timed(lambda: distributed.broadcast(flat, 0)) for _ in range(TIMES)]
    distributed.destroy_process_group()
    return size / statistics.median(seconds[2:]) / 1e9


class Plain:
    """The plain way, over a group of its own."""

    def __init__(self, url: str, device: torch.device) -> None:
        from sglang.srt.utils.common import init_custom_process_group

        self.url = url
        self.http = httpx.Client(timeout=300, trust_env=False)
        backend = "nccl" if device.type == "cuda" else "gloo"
        port = addresses.free_port()
        body = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
        joins = self._posted("init_weights_update_group", body | {"group_name": "plain", "backend": backend})
        where = f"tcp://127.0.0.1:{port}"
        self.group: Any = init_custom_process_group(backend, where, world_size=2, rank=0, group_name="plain")
        joins.join()

    def send(self, named: sync.Named, limit: int) -> None:
        for group in sync.groups(named, limit):
            body = {
                "names": [name for name, _ in group],
                "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in group],
                "shapes": [list(tensor.shape) for _, tensor in group],
            }
            asked = self._posted(
                "update_weights_from_distributed", body | {"group_name": "plain", "flush_cache": False}
            )
            handles = [distributed.broadcast(t, 0, group=self.group, async_op=True) for _, t in group]
            for handle in handles:
                if handle is not None:
                    handle.wait()
            sync.synchronize()
            asked.join()

    def _posted(self, path: str, body: dict) -> threading.Thread:
        thread = threading.Thread(target=lambda: self.http.post(f"{self.url}/{path}", json=body).raise_for_status())
        thread.start()
        return thread


def compare(url: str, learner: Learner, plain: Plain, mib: int) -> float:
    """Both ways in turn with buckets of so many MiB: slime's speed ÷ the plain way's."""
    named = list(learner.weights.items())
    transport = memory.Memory("nccl", buffer=mib << 20)
    version = transport.write(learner, 0)
    ways: dict[str, Callable[[], object]] = {
        "plain": lambda: plain.send(named, mib << 20),
        "slime": lambda: transport.send(version, [url], flush=False),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(TIMES):
        for way, work in ways.items():
            seconds[way].append(sync.timed(work))
    median = {way: statistics.median(taken[2:]) for way, taken in seconds.items()}
    speed = {f"{way}_gb_s": learner.size / taken / 1e9 for way, taken in median.items()}
    ratio = median["plain"] / median["slime"]
    common.say("nccl", bucket_mib=mib, **speed, ratio=ratio, held=ratio >= BOUND)
    transport.close()
    return ratio


def broken(name: str, work: Callable[[], object]) -> bool:
    """True if ``work`` raises an error of slime within the limit."""
    started = time.monotonic()
    try:
        work()
        said = ""
    except SlimeError as error:
        said = error.message
    seconds = time.monotonic() - started
    held = bool(said) and seconds < LIMIT
    common.say("broken", case=name, seconds=seconds, said=said[:300], held=held)
    return held


def send(url: str, model: pathlib.Path, device: torch.device) -> None:
    """The model's weights into the engine, once."""
    learner = Learner(weights(model, device), device)
    transport = memory.Memory("nccl")
    transport.send(transport.write(learner, 0), [url], flush=True)


def killed(url: str, learner: Learner) -> None:
    """The engine is ended while weights go to it, again and again until one sync has met that."""
    transport = memory.Memory("nccl", buffer=16 << 20)
    version = transport.write(learner, 0)
    transport.send(version, [url], flush=False)
    threading.Timer(0.01, os.kill, (_listening(url), signal.SIGKILL)).start()
    for _ in range(1000):
        transport.send(version, [url], flush=False)


def _listening(url: str) -> int:
    """The process that listens at the port of ``url``."""
    import psutil

    port = int(url.rpartition(":")[2])
    listening = (c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.pid)
    return next(c.pid for c in listening if c.pid and c.laddr and c.laddr[1] == port)


def child(words: Sequence[str], **environment: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "ci.gpu.group", *words]
    return subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.PIPE, text=True)


def ceiling(size: int, device: torch.device) -> None:
    port = addresses.free_port()
    other = child(["--rank", "1", "--port", str(port), "--size", str(size), str(device)])
    speed = broadcast(0, port, size, device)
    other.wait(60)
    common.say("broadcast", gb=size / 1e9, gb_s=speed)


def wrong_setting(url: str, model: pathlib.Path, device: torch.device) -> bool:
    """A process of its own, for NCCL reads its settings once."""
    process = child(["--send", url, "--model", str(model), str(device)], **WRONG)
    out, _ = process.communicate(timeout=120)
    print(out, end="", flush=True)
    return process.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="or a child's device")
    parser.add_argument("--small", action="store_true", help="a small model and small buckets")
    for name in ("rank", "port", "size"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--send", help="a child's: the engine")
    parser.add_argument("--model", type=pathlib.Path)
    args = parser.parse_args()
    if args.rank is not None:
        first = torch.device("cuda", 0) if args.folder.startswith("cuda") else torch.device(args.folder)
        broadcast(args.rank, args.port, args.size, first)
        return 0
    if args.send:
        device = torch.device(args.folder)
        return 0 if broken("wrong setting", lambda: send(args.send, args.model, device)) else 1
    return checks(pathlib.Path(args.folder).resolve(), args.small)


def checks(folder: pathlib.Path, small: bool) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    on_gpus = common.gpus() > 1
    device = torch.device("cuda", 1) if on_gpus else torch.device("cpu")
    words = ["--sglang-mem-fraction-static", "0.4"] if on_gpus else []
    with serving(folder, sync.SMALL if small else shapes.tiny(shapes.QWEN3_06B), words) as (url, model):
        learner = Learner(weights(model, device), device)
        ceiling(learner.size, device)
        plain = Plain(url, device)
        ratios = [compare(url, learner, plain, mib) for mib in ((1, 4096) if small else sync.MIB)]
        held = [sync.proof(url, learner, "nccl"), wrong_setting(url, model, device)]
        held.append(broken("engine ended", lambda: killed(url, learner)))
    common.say("result", ratios=ratios, held=all(held) and min(ratios) >= BOUND)
    return 0 if all(held) and min(ratios) >= BOUND else 1


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    code = main()
    sys.stdout.flush()
    os._exit(code)  # a group that broke leaves threads of NCCL's behind
