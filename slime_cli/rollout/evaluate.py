"""Evaluation: every prompt of a held-out source, answered and graded, nothing journalled and nothing trained."""

import asyncio
import types
from collections.abc import Callable

import numpy as np

from slime_cli.buffer.buffer import Group
from slime_cli.buffer.types import Sample, Status
from slime_cli.rollout.generate import Generator
from slime_cli.rollout.pool import RewardFailure


async def evaluate(name: str, source, generator: Generator, render: Callable, progress: Callable[[int], None]) -> dict[str, float]:
    """Figures of one evaluation set: mean reward, its standard error, truncation, failures (a failed sample scores 0)."""
    a: types.SimpleNamespace = generator.args
    params = generator.sampling_params() | {
        "temperature": a.eval_temperature, "top_p": a.eval_top_p, "max_new_tokens": a.eval_max_response_len,
    }  # fmt: skip
    n = a.n_samples_per_eval_prompt

    async def one(i: int) -> tuple[list[float], int, int, int]:
        row = source[i]
        rendered = render(row)
        if rendered is None:
            return [], 0, 0, 1
        samples = [Sample(index=i * n + k, group_index=i, prompt=rendered.text, label=row.label, metadata=dict(row.metadata)) for k in range(n)]
        await generator.generate(Group(i, row, rendered, [], samples), params)
        rewards = await generator.rewards.score_group(samples, a)
        for sample, reward in zip(samples, rewards):
            sample.reward = 0.0 if isinstance(reward, RewardFailure) else reward
        progress(1)
        values = [s.reward_value(a.eval_reward_key) for s in samples]
        cut = sum(s.status is Status.TRUNCATED for s in samples)
        return values, cut, sum(isinstance(r, RewardFailure) for r in rewards), 0

    rows = await asyncio.gather(*(one(i) for i in range(len(source))))
    rewards = np.array([value for values, *_ in rows for value in values])
    return {
        "dataset": name, "prompts": int(sum(bool(values) for values, *_ in rows)), "samples": len(rewards),
        "reward_mean": float(rewards.mean()), "reward_standard_error": float(rewards.std() / max(len(rewards), 1) ** 0.5),
        "truncated_ratio": sum(r[1] for r in rows) / len(rewards), "reward_failures": sum(r[2] for r in rows),
        "too_long": sum(r[3] for r in rows),
    }  # fmt: skip
