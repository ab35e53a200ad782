"""Ray: where trainer ranks and engines run. One placement group holds a bundle for each rank and each engine device.

With ``--colocate`` a trainer rank and an engine share a bundle (the same GPU, or the same cores on a CPU); without it
they get bundles of their own. ``RAY_ADDRESS`` joins a running cluster; otherwise a local one lives and dies with this
process.
"""

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from slime_cli import interrupts, processes
from slime_cli.cluster import join
from slime_cli.cluster.learner import Learner
from slime_cli.cluster.trainer_actor import TrainerRank
from slime_cli.errors import EngineError
from slime_cli.hardware import device as hardware
from slime_cli.manifests import layout
from slime_cli.options.resolve import Resolved
from slime_cli.serving.engine import Engine, EngineSpec


class PlacedEngine(Engine):
    """An engine in a Ray worker, which starts in a folder of Ray's."""

    def __init__(self, spec: EngineSpec, working_directory: str) -> None:
        processes.enter(working_directory)
        super().__init__(spec)


class EngineProxy:
    """An engine in an actor, with the methods of :class:`slime_cli.serving.engine.Engine`."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def _call(self, method: str) -> Any:
        import ray
        from ray.exceptions import RayError

        try:
            return ray.get(getattr(self.actor, method).remote())
        except RayError as error:
            last = "\n".join(["its Ray actor died", *str(error).splitlines()[-12:]])
            return {"pid": 0, "url": "?", "host": "?", "devices": [], "exit_code": -1, "last_lines": last}

    def state(self) -> dict[str, object]:
        return self._call("state")

    def stop(self) -> None:
        self._call("stop")


class Cluster:
    """Ray for one run. Use as a context manager."""

    def __init__(self, resolved: Resolved, run_dir: pathlib.Path, *, trains: bool = True) -> None:
        """``trains``: there are trainer ranks."""
        s = resolved.slime
        self.run_dir = run_dir
        self.trace = s.trace == "on"
        self.device = hardware.find()
        self.ranks = s.actor_num_nodes * s.actor_num_gpus_per_node if trains else 0
        self.engine_devices = s.rollout_num_gpus
        self.per_engine = s.rollout_num_gpus_per_engine
        self.colocate = s.colocate
        self.broadcasts = s.update_weight_transport == "nccl"
        bundles = max(self.ranks, self.engine_devices) if self.colocate else self.ranks + self.engine_devices
        self.working_directory = os.getcwd()
        self.ray = ray = join.start(run_dir / layout.LOGS, max(os.cpu_count() or 1, bundles))
        resource = {"GPU": 1, "CPU": 1} if self.device.kind == "cuda" and not self._shared_gpu(bundles) else {"CPU": 1}
        self.group: Any = None
        if bundles:  # none without a trainer, where the engines are somebody else's
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

    def __exit__(self, *exception: object) -> None:
        with interrupts.kept():
            self.ray.shutdown()

    def _strategy(self, bundle: int) -> Any:
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

    def start_learner(self) -> Learner:
        return Learner(self.ray, self._start_ranks())

    def _start_ranks(self) -> list[Any]:
        remote = self.ray.remote(num_cpus=0.5, max_restarts=0)(TrainerRank)
        environment = hardware.group_environment() if self.broadcasts else {}
        return [
            remote.options(scheduling_strategy=self._strategy(i)).remote(
                i, self.ranks, str(self.run_dir), self.trace, self.working_directory, environment
            )
            for i in range(self.ranks)
        ]


@contextlib.contextmanager
def _explained(message: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise EngineError(f"{message}: {error}", "ask for fewer ranks or engines") from None
