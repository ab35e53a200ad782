"""What functions of a user's return, by the names that slime's own have. Torch-free."""

import dataclasses
from typing import Any

from slime_cli.buffer.types import Sample


@dataclasses.dataclass(frozen=True)
class DynamicFilterOutput:
    """Whether a group is kept. A plain True or False says as much."""

    keep: bool
    reason: str | None = None
    """Counted as ``filter_REASON`` where it is not kept."""


@dataclasses.dataclass(frozen=True)
class RolloutFnTrainOutput:
    """What a function for a whole rollout returns: the groups to train on, and numbers for the metrics."""

    samples: list[list[Sample]]
    metrics: dict[str, float] | None = None


@dataclasses.dataclass(frozen=True)
class RolloutFnEvalOutput:
    """What it returns of an evaluation: by set ``{"rewards": [...], "truncated": [...], "samples": [...]}``."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, float] | None = None
