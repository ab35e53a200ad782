"""Rewards of pure on-policy distillation: for ``--custom-rm-path`` and ``--custom-reward-post-process-path``.

``slime.rollout.on_policy_distillation.NAME`` of a launch script is ``slime_cli.hooks.distillation.NAME``. There these
functions ask the teacher; here ``--use-opd`` does, before the reward, so that they only say that there is no other one.
"""

from typing import Any

from slime_cli.buffer.types import Sample
from slime_cli.hooks.protocols import Args


async def reward_func(args: Args, sample: Sample, **more: Any) -> float:
    """0: nothing is learnt but what the teacher says."""
    return 0.0


def post_process_rewards(args: Args, samples: list[Sample]) -> tuple[list[float], list[float]]:
    """The reward that each sample was given, for the record, and 0 to train on."""
    return [sample.reward_value(args.reward_key) for sample in samples], [0.0] * len(samples)
