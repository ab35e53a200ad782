"""How far generation may run ahead of training, and whether it can."""

from collections.abc import Iterator

from slime_cli.options.checks.common import Problem, no_effect
from slime_cli.options.resolve import Resolved


def staleness(r: Resolved) -> Iterator[Problem | str]:
    s = r.slime
    bound = s.max_staleness
    if s.loss_type == "sft_loss" or bound is None:
        return
    if s.schedule == "async" and s.partial_rollout and not s.mask_offpolicy_in_partial_rollout:
        yield no_effect(["--partial-rollout"], "with --schedule async: no rollout ends what another one needs")
    if s.schedule == "one-step-off" and bound < 1:
        yield (
            f"--schedule one-step-off with --max-staleness {bound}: each rollout is generated while the one before is"
            " trained, so its weights are one rollout behind",
            "raise it to 1, or give --schedule sync",
        )
    yield from _surplus(r, bound)
    if s.update_weights_interval > bound + 1:
        yield (
            f"--update-weights-interval {s.update_weights_interval} with --max-staleness {bound}: the engines' weights"
            f" grow older than that, and after {bound + 1} rollouts nothing could be generated",
            f"raise --max-staleness to {s.update_weights_interval - 1}, or send weights more often",
        )


def _surplus(r: Resolved, bound: int) -> Iterator[str]:
    """Groups beyond a batch are begun only where their last rollout is a later one."""
    s = r.slime
    over = s.over_sampling_batch_size
    if over is None or s.rollout_batch_size is None or over <= s.rollout_batch_size:
        return
    if s.schedule == "async":
        yield no_effect([f"--over-sampling-batch-size {over}"], "with --schedule async, which generates all the time")
        return
    ahead = bound + 1 - (s.schedule == "one-step-off")
    if over > ahead * s.rollout_batch_size:
        yield (
            f"--over-sampling-batch-size {over} with --max-staleness {bound} and --schedule {s.schedule}: no more than"
            f" {ahead * s.rollout_batch_size} groups can be under way, for each must be trained in time"
        )


TRAIN = (staleness,)
