"""The parts of a run that :mod:`slime_cli.run` makes once and gives to one phase after the other."""

import dataclasses
import pathlib
from collections.abc import Awaitable, Callable

from slime_cli.cluster.learner import Learner
from slime_cli.loop.trackers import NONE, Trackers
from slime_cli.loop.turns import Turns
from slime_cli.rollout.client import RouterClient
from slime_cli.rollout.generate import Rewards
from slime_cli.rollout.watch import Watch
from slime_cli.screen import Screen
from slime_cli.tracing.spans import Tracer


@dataclasses.dataclass
class Shared:
    """The parts that the phases of a run share. :class:`slime_cli.run.Run` owns it."""

    run_dir: pathlib.Path
    model: str
    """The HF checkpoint's folder."""
    screen: Screen
    tracer: Tracer
    learner: Learner
    rewards: Rewards | None
    serving: Callable[[], Awaitable[RouterClient]]
    """The client of engines that are healthy."""
    engine_urls: Callable[[], list[str]]
    """Engines that are still there. Raises EngineError when none is."""
    rollouts: dict[str, int]
    """By phase, where it runs for a number of epochs."""
    turns: Turns = dataclasses.field(default_factory=lambda: Turns(None, None))
    trackers: Trackers = NONE
    watch: Watch = dataclasses.field(default_factory=Watch)
