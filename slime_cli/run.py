"""Owns what one ``slime train`` needs, and wires it: Ray, trainer ranks, engines, reward workers, one event loop.

The parts don't know who drives them: the phases of :mod:`slime_cli.loop.phase` get them as a value, and the schedules
of :mod:`slime_cli.loop.schedules` drive the phases. Whatever ends the run, everything that was started here is stopped
in reverse order, before the threads that still wait for it are joined.
"""

import asyncio
import contextlib
import dataclasses
import gc
import pathlib
from collections.abc import Callable
from typing import Any

import msgspec

from slime_cli import event_loop, manifests, processes
from slime_cli.cluster.cluster import Cluster
from slime_cli.cluster.learner import Learner
from slime_cli.errors import EngineError
from slime_cli.hardware import device as hardware
from slime_cli.hooks import blocking
from slime_cli.loop import attempts as folders
from slime_cli.loop import starting
from slime_cli.loop.phase import Phase
from slime_cli.loop.shared import Shared
from slime_cli.loop.trackers import Trackers
from slime_cli.loop.turns import Turns
from slime_cli.manifests import layout
from slime_cli.models import architecture, tiny
from slime_cli.options import resume
from slime_cli.options.resolve import Resolved, args_namespace
from slime_cli.rewards.rewards import RewardPool
from slime_cli.rollout.client import RouterClient
from slime_cli.rollout.watch import Watch
from slime_cli.screen import Screen
from slime_cli.serving import claim, control, occupation
from slime_cli.serving.attached import Attached
from slime_cli.serving.fleet import Fleet
from slime_cli.serving.occupation import Occupation
from slime_cli.tracing.report import PhaseResult
from slime_cli.tracing.spans import Tracer
from slime_cli.weights import matching


class Run:
    """``rollouts``: of each phase that runs for a number of epochs."""

    def __init__(
        self, resolved: Resolved, run_dir: pathlib.Path, screen: Screen, rollouts: dict[str, int] | None = None
    ) -> None:
        self.resolved = resolved
        self.run_dir = run_dir
        self.screen = screen
        self.rollouts = rollouts or {}
        self.tracer = Tracer(run_dir, "conductor", enabled=resolved.slime.trace == "on")
        self.fleet: Fleet | Attached | None = None
        self.client: RouterClient | None = None
        self.watch = Watch()
        self.endpoint: manifests.Endpoint | None = None
        self.model = ""
        self.described: dict[str, Any] = {}
        """Fields that this run adds to the manifest of engines of its own."""

    def run(self, conclude: Callable[[list[PhaseResult]], dict[str, Any]]) -> dict[str, Any]:
        """Every phase to its end; what ``conclude`` makes of their results, before anything is stopped."""
        with contextlib.closing(self.tracer):
            return event_loop.run(self._run(conclude))

    async def _run(self, conclude: Callable[[list[PhaseResult]], dict[str, Any]]) -> dict[str, Any]:
        phases = folders.phases(self.resolved, self.run_dir)
        finished: list[PhaseResult] = []
        async with contextlib.AsyncExitStack() as stack:
            limit = self.resolved.slime.max_seconds_without_progress
            stack.enter_context(blocking.named(self.screen.say, limit=limit))
            shared = await self._start(phases, stack)
            processes.spare_libraries()
            gc.set_threshold(50_000)  # a rollout's samples live until it is trained: they need no looking after
            previous = None
            for name, options, folder in phases:
                phase = Phase(name, options, folder, shared, previous)
                stack.push_async_callback(phase.close)
                with self.tracer.about(phase=name):
                    await phase.run()
                finished.append(phase.result())
                previous = phase.final_checkpoint()
            return conclude(finished)

    async def _start(self, phases: list[folders.PhaseOf], stack: contextlib.AsyncExitStack) -> Shared:
        """Engines begin to start now and are waited for when the first phase needs them."""
        source = self.resolved.slime.hf_checkpoint
        self.model = str(tiny.make(source, self.run_dir / layout.MODEL)) if source.startswith(tiny.PREFIX) else source
        engines_for = next((options for _, options, _ in phases if options.slime.generates), None)
        trains = any(starting.needed(options.slime, folder) for _, options, folder in phases)
        if engines_for is not None and engines_for.slime.rollout_endpoint:
            self._attach(engines_for, stack)
        trackers = await asyncio.to_thread(self._trackers, phases[0][1])
        stack.callback(trackers.close)
        if words := hardware.dtype_words(self.resolved.megatron, architecture.read_config(self.model)):
            self.screen.say(words)
        self.screen.say("starting Ray")
        placed_for = max((options for _, options, _ in phases), key=lambda o: o.slime.rollout_num_gpus)
        cluster = stack.enter_context(Cluster(placed_for, self.run_dir, trains=trains))
        learner = cluster.start_learner()
        rewards = None
        if engines_for is not None:
            if not engines_for.slime.rollout_endpoint:
                self._start_engines(engines_for if trains else _named(engines_for), cluster, stack)
            rewards = await stack.enter_async_context(RewardPool.from_args(args_namespace(engines_for)))
            stack.push_async_callback(self._close_client)
        return Shared(
            run_dir=self.run_dir,
            model=self.model,
            screen=self.screen,
            tracer=self.tracer,
            learner=learner,
            rewards=rewards,
            serving=self.serving,
            engine_urls=self.engine_urls,
            watch=self.watch,
            rollouts=self.rollouts,
            trackers=trackers,
            turns=self._turns(engines_for, learner),
        )

    def _turns(self, options: Resolved | None, learner: Learner) -> Turns:
        """``options``: of the first phase that generates. Its engines serve every phase, supervised ones too."""
        if options is None:
            return Turns(None, None)
        s = options.slime
        if (s.offload_train or s.offload_rollout) and hardware.find().kind == "cpu":
            self.screen.say("offload: engines and trainer take turns; on a CPU no memory changes hands, only cores do")
        engines = Occupation(self.engine_urls) if s.offload_rollout else None
        return Turns(learner if s.offload_train else None, engines, self.tracer.span)

    def _trackers(self, options: Resolved) -> Trackers:
        return Trackers.open(options.slime, self.run_dir, resume.recorded(self.resolved), self.screen.say)

    async def _close_client(self) -> None:
        if self.client is not None:
            await self.client.close()

    def _attach(self, options: Resolved, stack: contextlib.AsyncExitStack) -> None:
        """Engines that somebody else owns: claimed and asked whether they can take this model, before all else."""
        assert options.slime.rollout_endpoint is not None
        self.fleet = attached = Attached(options.slime.rollout_endpoint)
        attached.check()
        stack.callback(attached.claim(self._name(), self.screen.say).close)
        dtype = hardware.trainer_dtype(hardware.find().kind, options.megatron)
        matching.require(self.model, attached.endpoint, attached.alive(), dtype, self.screen.say)
        if options.slime.in_flight == "pause":
            matching.require_no_prefix_cache(attached.alive())

    def _name(self) -> str:
        """The name of this run in messages to others."""
        return f"slime train --run-dir {self.run_dir}"

    def _start_engines(self, options: Resolved, cluster: Cluster, stack: contextlib.AsyncExitStack) -> None:
        s = options.slime
        hardware.check_engine(architecture.read_config(self.model))
        count = s.rollout_num_gpus // s.rollout_num_gpus_per_engine
        self.screen.say(f"starting {count} SGLang engine{'s' * (count != 1)} and the router")
        self.fleet = Fleet(options, self.model, self.run_dir, cluster.launch_engine, self.screen.say)
        stack.callback(self.fleet.stop)
        path = claim.beside(self.run_dir / layout.ENDPOINT)
        stack.callback(claim.Claim(path, self._name(), self.screen.say).close)
        self.described = {"claim": str(path), **matching.identity(self.model)}

    async def serving(self) -> RouterClient:
        """The endpoint's client, as soon as the engines are healthy."""
        assert self.fleet is not None
        if self.client is None:
            with self.tracer.span("wait_for_engines") as about:
                found = await asyncio.to_thread(self.fleet.wait_healthy)
                about["engines"] = await asyncio.to_thread(occupation.occupied, [e.url for e in found.engines])
            self.endpoint = msgspec.structs.replace(found, **self.described)
            manifests.write(self.run_dir / layout.ENDPOINT, self.endpoint)
            self.screen.say(f"{len(self.endpoint.engines)} engine(s) healthy behind {self.endpoint.router_url}")
            s = self.resolved.slime
            in_flight = s.sglang_server_concurrency * len(self.endpoint.engines)
            streams = any(
                phase.slime.in_flight == "pause" for _, phase, _ in folders.phases(self.resolved, self.run_dir)
            )
            self.client = RouterClient(
                self.endpoint.router_url,
                in_flight,
                self.fleet.check,
                abort=lambda: control.abort_all(self.engine_urls()),
                streams=streams,
                watch=self.watch,
            )
        return self.client

    def engine_urls(self) -> list[str]:
        """Engines that are still there. Raises EngineError when none is."""
        assert self.fleet is not None
        urls = self.fleet.alive()
        if not urls:
            self.fleet.check()  # says of what it died
            raise EngineError("no engine is left", "the same command resumes from the last commit")
        return urls


def _named(options: Resolved) -> Resolved:
    """For engines that are sent no weights: those that they start with are the first version."""
    return dataclasses.replace(options, sglang=options.sglang | {"weight_version": layout.version_name(0)})
