"""Ray: where trainer ranks and engines run. One placement group holds a bundle for each rank and each engine device.

With ``--colocate`` a trainer rank and an engine share a bundle (the same GPU, or the same cores on a CPU); without it
they
get bundles of their own. ``RAY_ADDRESS`` joins a running cluster; otherwise a local one lives and dies with this
process.
"""

import contextlib
import dataclasses
import os
import pathlib
from typing import Any

from slime_cli import disk, processes
from slime_cli.cluster import join
from slime_cli.cluster.trainer_actor import TrainerRank
from slime_cli.errors import EngineError, SlimeError
from slime_cli.hardware import device as hardware
from slime_cli.manifests import layout
from slime_cli.serving.engine import Engine, EngineSpec


class PlacedEngine(Engine):
    """An engine in a Ray worker, which starts in a folder of Ray's."""

    def __init__(self, spec: EngineSpec, working_directory: str):
        processes.enter(working_directory)
        super().__init__(spec)


class EngineProxy:
    """An engine in an actor, with the methods of :class:`slime_cli.serving.engine.Engine`."""

    def __init__(self, actor):
        self.actor = actor

    def _call(self, method: str) -> Any:
        import ray

        try:
            return ray.get(getattr(self.actor, method).remote())
        except ray.exceptions.RayError as error:
            last = "\n".join(["its Ray actor died", *str(error).splitlines()[-12:]])
            return {"pid": 0, "url": "?", "host": "?", "devices": [], "exit_code": -1, "last_lines": last}

    def state(self) -> dict[str, object]:
        return self._call("state")

    def stop(self) -> None:
        self._call("stop")


class Cluster:
    """Ray for one run. Use as a context manager."""

    def __init__(self, resolved, run_dir: pathlib.Path):
        s = resolved.slime
        self.run_dir = run_dir
        self.trace = s.trace == "on"
        self.device = hardware.find()
        self.ranks = s.actor_num_nodes * s.actor_num_gpus_per_node
        self.engine_devices = s.rollout_num_gpus
        self.per_engine = s.rollout_num_gpus_per_engine
        self.colocate = s.colocate
        bundles = max(self.ranks, self.engine_devices) if self.colocate else self.ranks + self.engine_devices
        self.working_directory = os.getcwd()
        self.ray = ray = join.start(run_dir / layout.LOGS, max(os.cpu_count() or 1, bundles))
        resource = {"GPU": 1, "CPU": 1} if self.device.kind == "cuda" and not self._shared_gpu(bundles) else {"CPU": 1}
        with _explained(f"{bundles} bundles of {resource} do not fit this cluster"):
            self.group = ray.util.placement_group([resource] * bundles, strategy="PACK")
            ray.get(self.group.ready(), timeout=120)
        self.actors: list = []

    def _shared_gpu(self, bundles: int) -> bool:
        """Fewer GPUs than bundles on one machine: ranks and engines share them, and their memory is the user's to
        divide."""
        return not os.environ.get("RAY_ADDRESS") and bundles > self.device.count

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *exception) -> None:
        self.ray.shutdown()

    def _strategy(self, bundle: int):
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=bundle)

    def launch_engine(self, spec: EngineSpec) -> EngineProxy:
        """Called by the fleet for each engine in turn."""
        i = sum(isinstance(a, EngineProxy) for a in self.actors)
        bundle = i * self.per_engine + (0 if self.colocate else self.ranks)
        if os.environ.get("RAY_ADDRESS"):  # it may be on another machine than the router
            spec = dataclasses.replace(spec, host="")
        remote = self.ray.remote(num_cpus=0.5, max_restarts=0)(PlacedEngine)
        placed = remote.options(scheduling_strategy=self._strategy(bundle))
        proxy = EngineProxy(placed.remote(spec, self.working_directory))
        self.actors.append(proxy)
        return proxy

    def start_trainers(self) -> "Trainers":
        remote = self.ray.remote(num_cpus=0.5, max_restarts=0)(TrainerRank)
        ranks = [
            remote.options(scheduling_strategy=self._strategy(i)).remote(
                i, self.ranks, str(self.run_dir), self.trace, self.working_directory
            )
            for i in range(self.ranks)
        ]
        return Trainers(self.ray, ranks)


class Trainers:
    """All ranks as one: a call goes to every rank, and the one answer that is not None comes back."""

    def __init__(self, ray, ranks: list):
        self.ray = ray
        self.ranks = ranks
        self.master = None

    def begin_stage(self, argv, settings, hf_checkpoint: str, critic_argv=None) -> dict[str, Any]:
        if self.master is None:
            self.master = self._get([self.ranks[0].address.remote()])[0]
        return self.call("begin_stage", argv, settings, hf_checkpoint, critic_argv, self.master)

    def call(self, method: str, *arguments) -> Any:
        answers = self._get([getattr(rank, method).remote(*arguments) for rank in self.ranks])
        return next((a for a in answers if a is not None), None)

    def train(self, batch, fresh: bool = True) -> dict[str, float]:
        return self.call("train", self.ray.put(batch), fresh)

    def _get(self, references: list) -> list:
        try:
            return self.ray.get(references)
        except self.ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, SlimeError):
                raise error.cause from None
            if said := disk.cause(error.cause) or disk.cause(error):
                raise EngineError(f"the trainer failed: {said}", disk.FIX) from None
            raise EngineError(f"the trainer failed: {error}", "the same command resumes from the last commit") from None
        except self.ray.exceptions.RayActorError as error:
            raise EngineError(
                f"a trainer rank died: {error}", "the same command resumes from the last commit"
            ) from None
        except self.ray.exceptions.RayError as error:  # no environment could be made, a node is gone, an object lost
            message = f"Ray: {type(error).__name__}: {error}"
            raise EngineError(message, "the same command resumes from the last commit") from None


@contextlib.contextmanager
def _explained(message: str):
    try:
        yield
    except Exception as error:
        raise EngineError(f"{message}: {error}", "ask for fewer ranks or engines") from None
