"""How far generation may run ahead of training, and whether it can."""

from collections.abc import Iterator

from slime_cli.options.checks.common import Problem
from slime_cli.options.resolve import Resolved


def staleness(r: Resolved) -> Iterator[Problem]:
    s = r.slime
    bound = s.max_staleness
    if s.loss_type == "sft_loss" or bound is None:
        return
    if s.schedule == "one-step-off" and bound < 1:
        yield (
            f"--schedule one-step-off with --max-staleness {bound}: each rollout is generated while the one before is"
            " trained, so its weights are one rollout behind",
            "raise it to 1, or give --schedule sync",
        )
    if s.update_weights_interval > bound + 1:
        yield (
            f"--update-weights-interval {s.update_weights_interval} with --max-staleness {bound}: the engines' weights"
            f" grow older than that, and after {bound + 1} rollouts nothing could be generated",
            f"raise --max-staleness to {s.update_weights_interval - 1}, or send weights more often",
        )


TRAIN = (staleness,)
