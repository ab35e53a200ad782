"""One SGLang server, and the router in front of several. Stock programs, started by their own command lines."""

import dataclasses
import json
import os
import pathlib
import shutil
import tempfile

from slime_cli import addresses, engine_api, processes
from slime_cli.errors import UsageError
from slime_cli.hardware import device as hardware
from slime_cli.models import families
from slime_cli.options import adapters, drafts
from slime_cli.options.resolve import Resolved
from slime_cli.serving.process import Server


@dataclasses.dataclass(frozen=True)
class EngineSpec:
    """What to start. Sent to the machine that runs it."""

    model: str
    argv: tuple[str, ...]
    """Native SGLang options, device defaults included."""
    tensor_parallel: int
    first_device: int
    seed: int
    log: str
    host: str = addresses.LOOPBACK
    """Where it listens; empty for the address at which other machines reach the one that runs it."""
    rests: bool = False
    """It is asked to give its memory back (``--offload-rollout``)."""


class Engine:
    """A running server. Local; the cluster wraps it in an actor for other machines."""

    def __init__(self, spec: EngineSpec):
        self.spec = spec
        if hardware.find().kind == "cpu" and "--speculative-algorithm" in spec.argv:
            raise UsageError(
                "--sglang-speculative-algorithm: SGLang's speculative decoding has kernels for GPUs alone, and this "
                "machine has none",
                "leave it out here; the layers that draft (--enable-mtp-training) are trained anyway",
            )
        host = spec.host or addresses.reachable()
        port = addresses.free_port(host)
        self.url = addresses.url(host, port)
        argv = processes.python(
            "sglang.launch_server",
            "--model-path",
            spec.model,
            "--host",
            host,
            "--port",
            str(port),
            "--tp-size",
            str(spec.tensor_parallel),
            "--random-seed",
            str(spec.seed),
            "--skip-server-warmup",
            *spec.argv,
        )
        if hardware.find().kind == "cuda":
            argv += ["--base-gpu-id", str(spec.first_device)]
        self._meeting = tempfile.mkdtemp(prefix="slime-engine-")
        environment = hardware.engine_environment(processes.environment(), rests=spec.rests)
        environment |= rendezvous(spec.argv, self._meeting)
        if hardware.find().kind == "cpu" and spec.tensor_parallel > 1:
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(i) for i in range(spec.tensor_parallel))
            environment["SGLANG_NCCL_SO_PATH"] = "/nonexistent/libnccl.so"
        self._server = Server("engine", argv, environment, pathlib.Path(spec.log))

    def state(self) -> dict[str, object]:
        """``pid``, ``url``, ``exit_code`` (None while running), and the last lines when it ended."""
        code = self._server.exit_code()
        return {
            "pid": self._server.pid,
            "url": self.url,
            "host": os.uname().nodename,
            "exit_code": code,
            "devices": list(range(self.spec.first_device, self.spec.first_device + self.spec.tensor_parallel)),
            "last_lines": "" if code is None else self._server.last_lines(),
        }

    def stop(self) -> None:
        """At once. SGLang answers a SIGTERM within 5 to 8 s, most of it asleep, and has nothing to bring in order."""
        self._server.stop(patience=0)
        shutil.rmtree(self._meeting, ignore_errors=True)


def rendezvous(argv: tuple[str, ...], folder: str) -> dict[str, str]:
    """Environment by which an engine's ranks, all on one machine, find each other without listening to other
    machines.

    torch's own meeting point is a server on all interfaces, so they meet at a file; the rest goes over loopback.
    Copies of the model (``--sglang-dp-size``) are groups of their own, for which SGLang 0.5.16 has only ports.
    """
    out = {name: os.environ.get(name, "lo") for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
    if "--dp-size" not in argv:
        out["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = f"file://{folder}/ranks"
    return out


def start_router(host: str, port: int, argv: list[str], log: pathlib.Path) -> Server:
    """The stock router with no workers yet; they are added as they become healthy. Its metrics are for this machine."""
    command = processes.python(
        "slime_cli.serving.router_main",
        "--host",
        addresses.numeric(host),
        "--port",
        str(port),
        "--prometheus-host",
        addresses.LOOPBACK,
        "--prometheus-port",
        str(addresses.free_port()),
        *argv,
    )
    return Server("router", command, processes.without_proxies(processes.environment()), log)


def engine_argv(resolved: Resolved, model: str) -> list[str]:
    """The user's ``--sglang-*`` options over what the device needs and what the trainer computes in."""
    config = json.loads((pathlib.Path(model) / "config.json").read_text())
    dtype = hardware.engine_dtype(hardware.find().kind, resolved.megatron, config)
    needed = hardware.engine_defaults() | {"dtype": dtype}
    if resolved.slime.in_flight == "pause":
        # Answers come chunk by chunk, each with its own tokens alone; and no prefix cache: it would serve keys and
        # values
        # that older weights computed.
        needed |= {"incremental_streaming_output": True, "disable_radix_cache": True}
    needed |= adapters.served(resolved.slime) | drafts.options(resolved.sglang, families.text(config), model)
    if resolved.slime.offload_rollout:
        needed |= hardware.gives_memory_back()
    merged = {k: v for k, v in needed.items() if not resolved.taken_back("sglang", k)} | resolved.sglang
    loaders = resolved.sglang.get("custom_weight_loader") or ()
    merged["custom_weight_loader"] = [*loaders, engine_api.LOADER, engine_api.RELOADER]
    return dataclasses.replace(resolved, sglang=merged).sglang_argv()
