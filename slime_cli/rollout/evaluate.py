"""Evaluation: every prompt of a held-out source, answered and graded, nothing journalled and nothing trained.

An execution counts once: where it fans out its reward is the mean over its siblings.
"""

import asyncio
import statistics
import types
from collections.abc import Callable

import numpy as np

from slime_cli.buffer.buffer import Group
from slime_cli.buffer.types import Sample, Status
from slime_cli.rollout.generate import Generator
from slime_cli.rollout.pool import RewardFailure


async def evaluate(name: str, source, generator: Generator, render: Callable, progress: Callable[[int], None]) -> dict[str, float]:
    """Figures of one evaluation set: mean reward, its standard error, truncation, failures (what failed scores 0)."""
    a: types.SimpleNamespace = generator.args
    params = generator.sampling_params() | {
        "temperature": a.eval_temperature, "top_p": a.eval_top_p, "max_new_tokens": a.eval_max_response_len,
    }  # fmt: skip
    n = a.n_samples_per_eval_prompt

    async def one(i: int) -> tuple[list[float], int, int, int, int]:
        """Of a prompt: its executions' rewards; counts of samples, cut ones, failures; 1 when it is too long."""
        row = source[i]
        rendered = render(row)
        if rendered is None:
            return [], 0, 0, 0, 1
        leased = [Sample(index=i * n + k, group_index=i, prompt=rendered.text, label=row.label, metadata=dict(row.metadata)) for k in range(n)]
        made = await generator.generate(Group(i, row, rendered, [], leased), params)
        samples = [s for siblings in made for s in siblings]
        rewards = await generator.rewards.score_group(samples, a)
        for sample, reward in zip(samples, rewards):
            sample.reward = 0.0 if isinstance(reward, RewardFailure) else reward
        progress(1)
        values = [statistics.fmean(s.reward_value(a.eval_reward_key) for s in siblings) if siblings else 0.0 for siblings in made]
        cut = sum(s.status is Status.TRUNCATED for s in samples)
        failures = sum(isinstance(r, RewardFailure) for r in rewards) + sum(not siblings for siblings in made)
        return values, len(samples), cut, failures, 0

    rows = await asyncio.gather(*(one(i) for i in range(len(source))))
    rewards = np.array([value for values, *_ in rows for value in values])
    samples, cut, failures, too_long = (sum(counts) for counts in zip(*(row[1:] for row in rows)))
    return {
        "dataset": name, "prompts": int(sum(bool(values) for values, *_ in rows)), "samples": samples,
        "executions": len(rewards), "reward_mean": float(rewards.mean()), "reward_standard_error": float(rewards.std() / max(len(rewards), 1) ** 0.5),
        "truncated_ratio": cut / max(samples, 1), "reward_failures": failures, "too_long": too_long,
    }  # fmt: skip
