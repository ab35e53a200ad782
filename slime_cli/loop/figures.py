"""The line of ``metrics.jsonl`` that a rollout gets. Called by :mod:`slime_cli.loop.phase`."""

from typing import Any

import numpy as np

from slime_cli.buffer.batch import Batch
from slime_cli.hooks.client import DRAFTS
from slime_cli.hooks.columns import RAW_REWARD
from slime_cli.training.algorithm.advantages import groups_without_spread, trajectory_rewards


def rewards_of(batch: Batch) -> list[float]:
    """One for each trajectory: the mean over its siblings, before a user's function processed them."""
    pairs = zip(batch.samples, batch.columns.rewards_N.tolist(), strict=True)
    raw_N = np.array([sample.metadata.get(RAW_REWARD, reward) for sample, reward in pairs], np.float64)
    reward_N, first_N = trajectory_rewards(raw_N, batch.columns.sample_index_N)
    return reward_N[first_N].tolist()


def of_batch(batch: Batch) -> dict[str, Any]:
    """The figures that a supervised batch and a policy's both have."""
    return {
        "seconds": 0.0,
        "samples": len(batch.samples),
        "trajectories": len({sample.index for sample in batch.samples}),
        "dropped": dict(batch.dropped),
    }


def of_policy(batch: Batch, step: int, steps_per_rollout: int) -> dict[str, Any]:
    """``step``: whose weights the batch's first optimizer step begins with."""
    columns = batch.columns
    rewards = rewards_of(batch)
    staleness_N = batch.staleness(step, steps_per_rollout)
    return {
        "reward_mean": sum(rewards) / len(rewards),
        "response_length_mean": sum(s.response_length for s in batch.samples) / len(batch.samples),
        "truncated_ratio": sum(s.status.value == "truncated" for s in batch.samples) / len(batch.samples),
        "groups_without_spread": groups_without_spread(
            columns.rewards_N, columns.group_index_N, columns.sample_index_N
        ),
        "staleness_mean": float(staleness_N.mean()),
        "staleness_max": int(staleness_N.max(initial=0)),
        "samples_without_version": batch.untold,
        "versions": len({span.version for s in batch.samples for span in s.spans} - {None}),
        **_drafts([s.metadata[DRAFTS] for s in batch.samples if DRAFTS in s.metadata]),
    }


def _drafts(told: list[dict[str, int]]) -> dict[str, float]:
    """How speculative decoding went: the share of drafted tokens that were accepted, and tokens for each pass of the
    model. Nothing where engines do not draft."""
    sums = {key: sum(one[key] for one in told) for key in ("accepted", "proposed", "passes", "tokens")}
    rate = {"spec_accept_rate": sums["accepted"] / sums["proposed"]} if sums["proposed"] else {}
    return rate | ({"spec_accept_length": sums["tokens"] / sums["passes"]} if sums["passes"] else {})
