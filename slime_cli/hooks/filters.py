"""Filters that ship with slime: for ``--dynamic-sampling-filter-path``, by their names here or in slime's package.

``slime.rollout.filter_hub.dynamic_sampling_filters.NAME`` of a launch script is ``slime_cli.hooks.filters.NAME``.
"""

import statistics
from typing import Any

from slime_cli.buffer.types import Sample
from slime_cli.hooks.outputs import DynamicFilterOutput
from slime_cli.hooks.protocols import Args

NO_SPREAD = 1e-6
"""Rewards of a group that differ by no more say nothing about which answer was better."""


def check_reward_nonzero_std(args: Args, samples: list[Sample], **more: Any) -> DynamicFilterOutput:
    """Keeps a group whose rewards differ: equal ones have no advantage, and no gradient (DAPO's dynamic sampling)."""
    rewards = [sample.reward_value(args.reward_key) for sample in samples]
    if statistics.pstdev(rewards) > NO_SPREAD:
        return DynamicFilterOutput(keep=True)
    return DynamicFilterOutput(keep=False, reason=f"zero_std_{rewards[0]:g}")
