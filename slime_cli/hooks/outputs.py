"""Return types of users' functions, with the names of slime's. Torch-free."""

import dataclasses
from typing import Any

from slime_cli.buffer.types import Sample


@dataclasses.dataclass(frozen=True)
class DynamicFilterOutput:
    """A filter's answer: ``keep`` says if the group stays. A plain True or False is enough."""

    keep: bool
    reason: str | None = None
    """Counted as ``filter_REASON`` where it is not kept."""


@dataclasses.dataclass(frozen=True)
class RolloutFnTrainOutput:
    """The result of a function for a whole rollout: the groups to train on, and numbers for the metrics."""

    samples: list[list[Sample]]
    metrics: dict[str, float] | None = None


@dataclasses.dataclass(frozen=True)
class RolloutFnEvalOutput:
    """The result of an evaluation function: by set ``{"rewards": [...], "truncated": [...], "samples": [...]}``."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, float] | None = None
