"""Checks before a rollout is trained, and before its step is committed. Called by :mod:`slime_cli.loop.phase`."""

import math
from collections.abc import Mapping

from slime_cli.buffer.batch import Batch
from slime_cli.errors import DataError, EngineError
from slime_cli.training.batching import packing


def steps(batch: Batch, count: int) -> list[list[int]]:
    """Places of each optimizer step's samples in the batch. Raises DataError when a step would have none."""
    indices = batch.columns.sample_index_N.tolist()
    found = packing.split_steps(indices, count)
    if not all(found):
        raise DataError(
            f"{len(set(indices))} trajectories are left for --num-steps-per-rollout {len(found)}",
            f"slime trace ledger says why the others were dropped; with --drop-rollouts {batch.rollout_id} the same"
            " command makes another batch",
        )
    return found


def engines(rollout_id: int, found: Mapping[str, float], bound: float | None) -> None:
    """Raises EngineError, before the step is committed, when the engines compute another model than the trainer.
    ``found``: metrics of the training; they have the difference for tokens that the trainer's own weights wrote."""
    mean = found.get("train_rollout_logprob_abs_diff")
    if bound is not None and mean is not None and not mean <= bound and not math.isinf(bound):
        most = found.get("train_rollout_logprob_abs_diff_max", math.nan)
        raise EngineError(
            f"rollout {rollout_id}: log-probabilities of engine and trainer differ by {mean:.2f} nats a token on"
            f" average (--max-logprob-diff {bound:g}) and by {most:.2f} at most, so they compute different models;"
            " the step is not committed",
            "look for what only one of them was given: Megatron or --sglang- options by hand, quantisation; "
            '"Numbers that differ" in docs/troubleshooting.md has a list. --max-logprob-diff NUMBER moves the'
            " bound, inf takes it away",
        )
