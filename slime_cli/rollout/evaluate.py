"""Evaluation: every prompt of a held-out source, answered and graded, nothing journalled and nothing trained.

A trajectory counts once: where it fans out its reward is the mean over its siblings; where it fails, its reward is 0
and its reason is counted. An evaluation in which every one failed has no result: it ends the run with the reasons.
"""

import collections
import math
import statistics
import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from slime_cli.buffer.types import Group, PromptRow, Sample, Status, trajectories
from slime_cli.errors import DataError
from slime_cli.options.evaluations import EvaluationSet
from slime_cli.rollout.concurrent import side_by_side
from slime_cli.rollout.generate import Generator


async def evaluate(
    evaluated: EvaluationSet,
    source: Any,
    generator: Generator,
    render: Callable[[PromptRow], Any],
    progress: Callable[[int], None],
    judged: Callable[[list[Sample]], None] = lambda samples: None,
) -> dict[str, Any]:
    """Figures of one evaluation set: mean reward and pass@k with their standard errors over prompts, truncation,
    failures by reason. ``judged`` is told of the rewarded samples."""
    a = evaluated.options
    name = evaluated.name
    params = generator.sampling_params() | _sampling(evaluated)
    streak = generator.failures.streak(f"prompts of evaluation {name}")
    failures: collections.Counter[str] = collections.Counter()

    async def one(i: int) -> tuple[list[float], list[Sample]]:
        """The rewards of a prompt's trajectories, none when it is too long, and the samples of those that did not
        fail."""
        row = source[i]
        rendered = render(row)
        if rendered is None:
            return [], []
        leased = _leased(evaluated, i, row, rendered.text)
        answers = await generator.answered(Group(i, row, rendered, [], leased), params)
        samples, failed = answers.whole, answers.failed
        progress(1)
        lost = collections.Counter(failed.values())
        failures.update(lost)
        streak.settle(bool(samples), lost)
        values = dict.fromkeys(failed, 0.0)
        for index, siblings in trajectories(samples).items():
            values[index] = statistics.fmean(s.reward_value(a.eval_reward_key) for s in siblings)
        return [values[index] for index in sorted(values)], samples

    rows = await side_by_side(one(i) for i in range(len(source)))
    rewards_PN = [values for values, _ in rows if values]
    if not rewards_PN:
        fix = "--rollout-max-prompt-len leaves out longer prompts; what --on-bad-row skip leaves out is named above"
        raise DataError(f"evaluation {name}: none of its {len(source)} rows can be used", fix)
    samples = [sample for _, made in rows for sample in made]
    if not samples:
        streak.end()
    judged(samples)
    truncated = [sample.status is Status.TRUNCATED for sample in samples]
    found = result_of(name, rewards_PN, truncated, failures, len(rows) - len(rewards_PN))
    return found | {"settings": evaluated.settings()}


def _sampling(evaluated: EvaluationSet) -> dict[str, Any]:
    """The set's own sampling, in the engine's words."""
    a = evaluated.options
    return {
        "temperature": a.eval_temperature,
        "top_p": a.eval_top_p,
        "top_k": a.eval_top_k,
        "min_new_tokens": a.eval_min_new_tokens,
        "max_new_tokens": a.eval_max_response_len,
    }


def _leased(evaluated: EvaluationSet, i: int, row: PromptRow, text: str) -> list[Sample]:
    """The samples of the i-th prompt, before they are generated."""
    n = evaluated.options.n_samples_per_eval_prompt
    return [
        Sample(
            index=i * n + k,
            group_index=i,
            prompt=text,
            label=row.label,
            metadata=evaluated.metadata_of(row.metadata),
        )
        for k in range(n)
    ]


def result_of(
    name: str,
    rewards_PN: list[list[float]],
    truncated: list[bool],
    failures: Mapping[str, int] = types.MappingProxyType({}),
    left_out: int = 0,
) -> dict[str, Any]:
    """Figures of a set: rewards by prompt, whether each sample was cut off."""
    mean, error = mean_over_prompts(rewards_PN)
    passes = pass_at(rewards_PN)
    return {
        "dataset": name,
        "prompts": len(rewards_PN),
        "samples": len(truncated),
        "trajectories": sum(map(len, rewards_PN)),
        "reward_mean": mean,
        "reward_standard_error": error,
        "pass_at": {str(k): rate for k, (rate, _) in passes.items()},
        "pass_at_standard_error": {str(k): spread for k, (_, spread) in passes.items()},
        "truncated_ratio": sum(truncated) / max(len(truncated), 1),
        "failures": dict(failures),
        "left_out": left_out,
    }


def mean_over_prompts(rewards_PN: list[list[float]]) -> tuple[float, float | None]:
    """Mean over all trajectories of P prompts, and its standard error; None for a single prompt.

    Answers to one prompt are not independent (at temperature 0 they are the same), prompts are: the error is the
    linearised one of a ratio of two sums over prompts, which is the spread of the prompts' means where each has as many
    answers.
    """
    sizes_P = np.array([len(values) for values in rewards_PN], np.float64)
    sums_P = np.array([sum(values) for values in rewards_PN], np.float64)
    count = len(sizes_P)
    mean = sums_P.sum() / sizes_P.sum()
    if count < 2:
        return float(mean), None
    return float(mean), float(np.sqrt(count / (count - 1) * np.square(sums_P - mean * sizes_P).sum()) / sizes_P.sum())


def pass_at(rewards_PN: list[list[float]]) -> dict[int, tuple[float, float | None]]:
    """The chance that one of k answers to a prompt is right (a reward of 1), for each power of two up to the number of
    answers that every prompt has; and its standard error over prompts.

    Unbiased, from n answers of which c are right: 1 - C(n - c, k) / C(n, k) (Chen et al. 2021), n each prompt's own.
    """
    counts_P = [(len(values), sum(value == 1 for value in values)) for values in rewards_PN]
    most = min(n for n, _ in counts_P)
    found = {}
    for k in (2**power for power in range(most.bit_length())):
        rates_P = [[1 - math.comb(n - c, k) / math.comb(n, k)] for n, c in counts_P]
        found[k] = mean_over_prompts(rates_P)
    return found
