"""Engines behind a router: started together, watched, stopped together. Both ``serve-rollout`` and ``train`` use it.

Every handle in :attr:`Fleet.engines` answers ``state()`` and ``stop()``: an :class:`Engine` of this process, or the
cluster's proxy of one elsewhere. A server that dies while it starts ends the start at once, with its last lines;
nothing is retried behind the user's back.
"""

import concurrent.futures
import contextlib
import importlib.metadata
import os
import pathlib
import time
from collections.abc import Callable

import httpx

from slime_cli import addresses, manifests
from slime_cli.errors import EngineError
from slime_cli.hardware import device as hardware
from slime_cli.manifests import layout
from slime_cli.options.groups import SlimeOptions
from slime_cli.options.resolve import Resolved
from slime_cli.serving.engine import EngineSpec, engine_argv, start_router

START_TIMEOUT = 1800.0
HEALTH = ["--health-check-interval-secs", "2", "--health-failure-threshold", "2"]


def _router_defaults(resolved: Resolved) -> list[str]:
    """Dead engines leave the router within seconds. One failed request must not: with few engines the circuit breaker
    would turn a single hiccup into refusals of everything, and the client asks again anyway."""
    wanted = any(dest.startswith("cb_") for dest in resolved.router)
    wanted |= resolved.taken_back("router", "disable_circuit_breaker")
    health = [] if "health_check_interval_secs" in resolved.router else HEALTH
    return health + ([] if wanted or "disable_circuit_breaker" in resolved.router else ["--disable-circuit-breaker"])


def listening(s: SlimeOptions) -> tuple[str, int]:
    """Host and port of the router. Raises UsageError where it cannot listen there."""
    host = addresses.checked(s.sglang_router_ip, "--sglang-router-ip")
    if s.sglang_router_port is None:
        return host, addresses.free_port(host)
    addresses.require_free(host, s.sglang_router_port, "--sglang-router-port")
    return host, s.sglang_router_port


def first_device(resolved: Resolved, place: int, device: hardware.Device) -> int:
    """Where the engine at ``place`` begins: behind the trainer's GPUs, or at 0 where no trainer is or both share
    theirs.

    Where one machine has too few GPUs for both, engines begin at 0 again and share those of the trainer.
    """
    s = resolved.slime
    wide = s.rollout_num_gpus_per_engine
    alone = resolved.command == "serve-rollout" or s.colocate or s.debug_rollout_only
    first = place * wide + (0 if alone else s.actor_num_gpus_per_node)
    if alone or first + wide <= device.count or os.environ.get("RAY_ADDRESS"):
        return first
    return first // wide % max(device.count // wide, 1) * wide


class Fleet:
    """Owns the processes behind one endpoint."""

    def __init__(
        self,
        resolved: Resolved,
        model: str,
        run_dir: pathlib.Path,
        launch: Callable[[EngineSpec], object],
        say: Callable[[str], None],
    ):
        s = resolved.slime
        self.say = say
        self.model = model
        self.tensor_parallel = s.rollout_num_gpus_per_engine
        count = max(1, s.rollout_num_gpus // self.tensor_parallel)
        host, port = listening(s)
        self.router_url = addresses.url(addresses.reachable(host), port)
        argv = engine_argv(resolved, model)
        for words in hardware.engine_words(resolved.sglang):
            say(words)
        logs = run_dir / layout.LOGS
        self.engines: list = []
        self.dead: set[str] = set()
        argv_of_router = _router_defaults(resolved) + resolved.router_argv()
        self.router = start_router(host, port, argv_of_router, logs / "router.log")
        self.http = httpx.Client(trust_env=False, timeout=30)
        try:
            for i in range(count):
                first = first_device(resolved, i, hardware.find())
                log = str(logs / f"engine-{i}.log")
                seed = s.rollout_seed + i
                where = addresses.reachable(host)
                spec = EngineSpec(
                    model, tuple(argv), self.tensor_parallel, first, seed, log, where, rests=s.offload_rollout
                )
                self.engines.append(launch(spec))
        except BaseException:
            self.stop()
            raise
        self.started = time.time()

    def wait_healthy(self) -> manifests.Endpoint:
        """Blocks until the router serves every engine. Raises EngineError as soon as a process ends."""
        waiting = {e.state()["url"] for e in self.engines}
        noted = self.started
        while waiting or not self._answers(self.router_url + "/workers"):
            self._raise_if_ended()
            for url in sorted(waiting):
                if self._answers(url + "/health_generate") and self._answers(self.router_url + "/workers"):
                    self._settle(url)
                    self._register(url)
                    waiting.discard(url)
            now = time.time()
            if now - noted > 15:
                noted = now
                self.say(
                    f"waiting for {len(waiting)} of {len(self.engines)} engines, {now - self.started:.0f} s so far"
                )
            if now - self.started > START_TIMEOUT:
                raise EngineError(
                    f"engines were not healthy after {START_TIMEOUT:.0f} s",
                    "see logs/engine-*.log in the run directory",
                )
            time.sleep(0.25)
        while len(self._workers()) < len(self.engines):
            self._raise_if_ended()
            time.sleep(0.1)
        return self._endpoint()

    def _endpoint(self) -> manifests.Endpoint:
        states = [e.state() for e in self.engines]
        return manifests.Endpoint(
            router_url=self.router_url,
            engines=[
                manifests.Engine(url=s["url"], role="regular", devices=s["devices"], pid=s["pid"], host=s["host"])
                for s in states
            ],
            model=self.model,
            engine_name="sglang",
            engine_version=importlib.metadata.version("sglang"),
            owner_pid=os.getpid(),
            owner_host=os.uname().nodename,
            created=time.time(),
        )

    def _answers(self, url: str) -> bool:
        try:
            return self.http.get(url, timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def _workers(self) -> list:
        return [w for w in self.http.get(self.router_url + "/workers").json()["workers"] if w.get("is_healthy", True)]

    def _settle(self, url: str) -> None:
        """Puts the objects of the engine's start out of reach of Python's garbage collector: on a CPU, SGLang collects
        whenever its cache is flushed, which over those takes 0.3 s at each change of weights."""
        with contextlib.suppress(httpx.HTTPError):
            self.http.post(url + "/freeze_gc")

    def _register(self, url: str) -> None:
        answer = self.http.post(self.router_url + "/workers", json={"url": url, "worker_type": "regular"})
        if answer.status_code not in (200, 202):
            raise EngineError(f"the router refused {url}: {answer.status_code} {answer.text[:200]}")

    def ended(self) -> list[tuple[str, int, str]]:
        """(name, exit code, last lines) of each process that is no longer running."""
        out = []
        if self.router.exit_code() is not None:
            out.append(("router", self.router.exit_code(), self.router.last_lines()))
        for i, engine in enumerate(self.engines):
            state = engine.state()
            if state["exit_code"] is not None:
                out.append((f"engine {i} ({state['url']})", state["exit_code"], state["last_lines"]))
        return out

    def _raise_if_ended(self) -> None:
        for name, code, lines in self.ended():
            raise EngineError(
                f"{name} ended with code {code} while it started; its last lines:\n{lines}",
                "fix what they say and start again",
            )

    def check(self) -> None:
        """Called while serving: reports a death once; raises EngineError when nothing is left to serve with."""
        ended = self.ended()
        gone = any(name == "router" for name, *_ in ended) or len(ended) >= len(self.engines)
        for name, code, lines in ended[:-1] if gone else ended:
            if name not in self.dead:
                self.dead.add(name)
                self.say(f"{name} ended with code {code}; its last lines:\n{lines}")
        if gone:
            name, code, lines = ended[-1]
            raise EngineError(
                f"{name} ended with code {code}; its last lines:\n{lines}",
                "the same command resumes from the last commit",
            )

    def alive(self) -> list[str]:
        return [s["url"] for s in (e.state() for e in self.engines) if s["exit_code"] is None]

    def stop(self) -> None:
        """All at once: each may take a second to end."""
        processes = [self.router, *self.engines]
        with concurrent.futures.ThreadPoolExecutor(len(processes)) as pool:
            list(pool.map(lambda process: process.stop(), processes))
