"""The conductor: runs the stages of a run over the cluster, one rollout after the other, and commits what was trained.

Synchronous schedule: generate -> batch -> train -> (save, commit) -> (publish -> sync -> verify) -> (evaluate). Killed
at any
point, the same call resumes: batches made but not committed are trained again from their files on the committed
weights,
finished generations are kept, unfinished ones are generated again.
"""

import asyncio
import contextlib
import pathlib
from collections.abc import Callable
from typing import Any

import msgspec

from slime_cli import manifests
from slime_cli.cluster.cluster import Cluster
from slime_cli.errors import EngineError
from slime_cli.hardware import device as hardware
from slime_cli.loop import attempts as folders
from slime_cli.loop.phase import Stage
from slime_cli.manifests import layout
from slime_cli.models import architecture, tiny
from slime_cli.options.resolve import args_namespace
from slime_cli.rewards.rewards import RewardPool
from slime_cli.rollout.client import RouterClient
from slime_cli.screen import Screen
from slime_cli.serving import claim
from slime_cli.serving.attached import Attached
from slime_cli.serving.fleet import Fleet
from slime_cli.tracing.report import PhaseResult
from slime_cli.tracing.spans import Tracer
from slime_cli.weights import matching


class Conductor:
    """Owns the cluster, the engines and the reward workers of one ``slime train``."""

    def __init__(self, resolved, run_dir: pathlib.Path, screen: Screen, rollouts: dict[str, int] | None = None):
        """``rollouts``: of each stage that runs for a number of epochs."""
        self.resolved = resolved
        self.run_dir = run_dir
        self.screen = screen
        self.rollouts = rollouts or {}
        self.tracer = Tracer(run_dir, "conductor", enabled=resolved.slime.trace == "on")
        self.events = asyncio.new_event_loop()
        self.fleet = None
        self.client: RouterClient | None = None
        self.endpoint: manifests.Endpoint | None = None
        self.model = ""
        self.described: dict[str, Any] = {}
        """What this run adds to the manifest of engines of its own."""

    def run(self, conclude: Callable[[list[PhaseResult]], dict]) -> dict:
        """Every stage to its end; what ``conclude`` makes of their results, before anything is stopped."""
        stages = folders.stages(self.resolved, self.run_dir)
        finished = []
        with contextlib.ExitStack() as stack:
            stack.callback(self.tracer.close)
            source = self.resolved.slime.hf_checkpoint
            self.model = (
                str(tiny.make(source, self.run_dir / layout.MODEL)) if source.startswith(tiny.PREFIX) else source
            )
            engines_for = next((options for _, options, _ in stages if options.slime.loss_type != "sft_loss"), None)
            if engines_for is not None and engines_for.slime.rollout_endpoint:
                self._attach(engines_for, stack)
            self.screen.say("starting Ray")
            cluster = stack.enter_context(Cluster(self._placement(stages), self.run_dir))
            trainers = cluster.start_trainers()
            if engines_for is not None:
                self._start_serving(engines_for, cluster, stack)
            previous = None
            for name, options, folder in stages:
                stage = Stage(name, options, folder, self, trainers, previous)
                stack.callback(stage.close)
                stage.run()
                finished.append(stage.result())
                previous = stage.final_checkpoint()
            return conclude(finished)

    def _placement(self, stages):
        """The cluster is laid out for the stage that needs most of it."""
        return max((options for _, options, _ in stages), key=lambda o: o.slime.rollout_num_gpus)

    def _attach(self, options, stack: contextlib.ExitStack) -> None:
        """Engines that somebody else owns: claimed and asked whether they can take this model, before all else."""
        self.fleet = attached = Attached(options.slime.rollout_endpoint)
        attached.check()
        stack.callback(attached.claim(self._name(), self.screen.say).close)
        dtype = hardware.trainer_dtype(hardware.find().kind, options.megatron)
        matching.require(self.model, attached.endpoint, attached.alive(), dtype, self.screen.say)

    def _name(self) -> str:
        """What others are told of this run."""
        return f"slime train --run-dir {self.run_dir}"

    def _start_serving(self, options, cluster: Cluster, stack: contextlib.ExitStack) -> None:
        """Engines begin to start now and are waited for when the first stage needs them."""
        s = options.slime
        if not s.rollout_endpoint:
            hardware.check_engine(architecture.read_config(self.model))
            count = s.rollout_num_gpus // s.rollout_num_gpus_per_engine
            self.screen.say(f"starting {count} SGLang engine{'s' * (count != 1)} and the router")
            self.fleet = Fleet(options, self.model, self.run_dir, cluster.launch_engine, self.screen.say)
            stack.callback(self.fleet.stop)
            path = claim.beside(self.run_dir / layout.ENDPOINT)
            stack.callback(claim.Claim(path, self._name(), self.screen.say).close)
            self.described = {"claim": str(path), **matching.identity(self.model)}
        args = args_namespace(options)
        self.rewards = RewardPool.from_args(args)
        stack.callback(lambda: self.wait(self._close()))

    async def _close(self) -> None:
        await self.rewards.close()
        if self.client is not None:
            await self.client.close()

    def serving(self) -> RouterClient:
        """The endpoint's client; blocks until the engines are healthy."""
        if self.endpoint is None:
            with self.tracer.span("wait_for_engines"):
                self.endpoint = msgspec.structs.replace(self.fleet.wait_healthy(), **self.described)
            manifests.write(self.run_dir / layout.ENDPOINT, self.endpoint)
            self.screen.say(f"{len(self.endpoint.engines)} engine(s) healthy behind {self.endpoint.router_url}")
            in_flight = self.resolved.slime.sglang_server_concurrency * len(self.endpoint.engines)
            self.client = RouterClient(self.endpoint.router_url, in_flight, self.fleet.check)
        return self.client

    def wait(self, coroutine):
        """Runs a coroutine of the rollout stage to its end."""
        return self.events.run_until_complete(coroutine)

    def engine_urls(self) -> list[str]:
        """Engines that are still there. Raises EngineError when none is."""
        urls = self.fleet.alive()
        if not urls:
            raise EngineError("no engine is left", "the same command resumes from the last commit")
        return urls
