"""Columns in place of samples: read, compared, or refused by name."""

import types
from collections.abc import Callable

import pytest

from slime_cli.buffer.types import Sample, Status
from slime_cli.errors import UsageError
from slime_cli.hooks.columns import convert
from slime_cli.hooks.kinds import Hook

ARGS = types.SimpleNamespace()
Make = Callable[..., Hook]
ALL = """
def f(args, samples):
    data = {
        "tokens": [s.tokens for s in samples], "response_lengths": [s.response_length for s in samples],
        "rewards": [s.reward for s in samples], "raw_reward": [s.reward for s in samples],
        "truncated": [int(s.status.value == "truncated") for s in samples],
        "sample_indices": [s.index for s in samples], "loss_masks": [s.effective_mask() for s in samples],
        "rollout_ids": [10 + s.index for s in samples], "total_lengths": [len(s.tokens) for s in samples],
        "rollout_log_probs": [s.rollout_log_probs for s in samples], "source_names": ["x"] * len(samples),
    }
    MORE
    return data
"""


def samples() -> list[Sample]:
    made = [
        Sample(
            index,
            0,
            tokens=[1, 2, 3, 4],
            response_length=length,
            reward=float(index),
            loss_mask=[1] * length,
            rollout_log_probs=[-1.0] * length,
            status=Status.TRUNCATED if index else Status.COMPLETED,
            part=part,
        )
        for index, part, length in ((0, 0, 2), (5, 0, 3), (5, 1, 3))
    ]
    made[0].remove_sample = True
    return made


def test_slimes_columns_of_the_samples_are_the_samples(hook: Make):
    made = convert(hook("convert_samples", ALL.replace("MORE", "")), ARGS, samples())
    assert [(s.index, s.part, s.tokens, s.reward, s.status) for s in made] == [
        (s.index, s.part, s.tokens, s.reward, s.status) for s in samples()
    ]
    assert made[0].loss_mask == [0, 0] and not made[0].remove_sample
    assert made[1].metadata == {"raw_reward": 5.0, "source_name": "x"}


def test_rows_may_go_change_and_be_of_other_tokens(hook: Make):
    more = """
    data = {name: values[1:2] for name, values in data.items()}
    data["tokens"][0] = [1, 2, 3, 4, 5]
    data["total_lengths"] = [5]
    data["rewards"][0] = -0.5
"""
    (made,) = convert(hook("convert_samples", ALL.replace("    MORE", more)), ARGS, samples())
    assert (made.index, made.part, made.tokens, made.reward) == (5, 0, [1, 2, 3, 4, 5], -0.5)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("data['advantage'] = [0, 0, 0]", "returned 'advantage'"),
        ("del data['rewards']", "returned no 'rewards'"),
        ("data['rewards'].pop()", "returned 2 rows of 'rewards' for 3 of 'tokens'"),
        ("data['sample_indices'][0] = 8", "a row of sample 8, which it was not given"),
        ("data['total_lengths'][1] = 9", "total_lengths 9 in row 1, where 4 follows"),
        ("data['rollout_mask_sums'] = [0, 3, 3]", "rollout_mask_sums 3 in row 1, where 6 follows"),
        ("data['rollout_ids'] = [1, 1, 1]", "group samples otherwise"),
        ("data['rollout_ids'] = [1, 2, 3]", "group samples otherwise"),
        ("data['loss_masks'][1] = [1]", "unfit in row 1: .*loss_mask has 1 entries"),
        ("data['rewards'][2] = None", "unfit in row 2"),
        ("data['tokens'] = 3", "returned no list of 'tokens'"),
        ("return 3", "returned int"),
        ("del data['sample_indices']; data = {k: v[:2] for k, v in data.items()}", "2 rows of 3 samples"),
    ],
)
def test_what_is_not_understood_is_named(hook: Make, more: str, said: str):
    with pytest.raises(UsageError, match=said):
        convert(hook("convert_samples", ALL.replace("MORE", more)), ARGS, samples())
