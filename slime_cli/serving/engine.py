"""One SGLang server, and the router in front of several. Stock programs, started by their own command lines."""

import dataclasses
import os
import pathlib
import sys

from slime_cli.hardware import device as hardware
from slime_cli.serving.process import Server, free_port, local_environment


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
    host: str = "127.0.0.1"


class Engine:
    """A running server. Local; the cluster wraps it in an actor for other machines."""

    def __init__(self, spec: EngineSpec):
        self.spec = spec
        self.url = f"http://{spec.host}:{free_port(spec.host)}"
        argv = [
            sys.executable, "-m", "sglang.launch_server", "--model-path", spec.model, "--host", spec.host,
            "--port", self.url.rsplit(":", 1)[1], "--tp-size", str(spec.tensor_parallel), "--random-seed", str(spec.seed),
            "--skip-server-warmup", *spec.argv,
        ]  # fmt: skip
        if hardware.find().kind == "cuda":
            argv += ["--base-gpu-id", str(spec.first_device)]
        environment = hardware.engine_environment(local_environment())
        if hardware.find().kind == "cpu" and spec.tensor_parallel > 1:
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(i) for i in range(spec.tensor_parallel))
            environment["SGLANG_NCCL_SO_PATH"] = "/nonexistent/libnccl.so"
        self._server = Server("engine", argv, environment, pathlib.Path(spec.log))

    def state(self) -> dict[str, object]:
        """``pid``, ``url``, ``exit_code`` (None while running), and the last lines when it ended."""
        code = self._server.exit_code()
        return {
            "pid": self._server.pid, "url": self.url, "host": os.uname().nodename, "exit_code": code,
            "last_lines": "" if code is None else self._server.last_lines(),
        }  # fmt: skip

    def stop(self) -> None:
        self._server.stop()


def start_router(host: str, port: int, argv: list[str], log: pathlib.Path) -> Server:
    """The stock router with no workers yet; they are added as they become healthy."""
    command = [
        sys.executable, "-m", "slime_cli.serving.router_main", "--host", host, "--port", str(port),
        "--prometheus-port", str(free_port(host)), *argv,
    ]  # fmt: skip
    return Server("router", command, local_environment(), log)


def engine_argv(resolved) -> list[str]:
    """The user's ``--sglang-*`` options over what the device needs."""
    merged = {k: v for k, v in hardware.engine_defaults().items() if k not in resolved.sglang} | resolved.sglang
    return dataclasses.replace(resolved, sglang=merged).sglang_argv()
