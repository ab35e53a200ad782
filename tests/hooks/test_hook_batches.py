"""Functions that see a batch: what they may change is carried over, and anything else is named.

1. A function gets copies. 2. What it may not change is a UsageError with its place. 3. What is unfit is one too.
"""

import types
from collections.abc import Callable

import pytest

from slime_cli.buffer.types import Sample, Status
from slime_cli.errors import UsageError
from slime_cli.hooks import batches
from slime_cli.hooks.kinds import Hook

ARGS = types.SimpleNamespace(reward_key=None, eval_reward_key=None)
Make = Callable[..., Hook]


def sample(index: int, group: int = 0, reward: float = 1.0, part: int = 0) -> Sample:
    return Sample(
        index,
        group,
        tokens=[1, 2, 3],
        response_length=2,
        reward=reward,
        loss_mask=[1, 1],
        rollout_log_probs=[-1.0, -2.0],
        metadata={"deep": {"n": index}},
        status=Status.COMPLETED,
        part=part,
    )


def test_a_filter_of_samples_masks_and_removes(hook: Make):
    groups = [[sample(0), sample(1)], [sample(2, 1)]]
    code = """
def f(args, data):
    data[0][1].remove_sample = True
    data[1][0].loss_mask = [True, False]
    data[1][0].metadata["deep"]["n"] = "changed"
"""
    batches.filter_samples(hook("rollout_sample_filter", code), ARGS, groups)
    assert [s.remove_sample for group in groups for s in group] == [False, True, False]
    assert groups[1][0].loss_mask == [1, 0] and groups[1][0].metadata == {"deep": {"n": "changed"}}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("data[0][0].tokens[0] = 9", "changed tokens of sample 0"),
        ("data[0][0].rollout_log_probs = None", "changed rollout_log_probs of sample 0"),
        ("data[0][0].index = 7", "changed index of sample 0"),
        ("data[0][0].loss_mask = [1]", "loss_mask has 1 entries for 2"),
        ("data[0][0].metadata['x'] = object()", "left something unfit in sample 0: .*metadata"),
        ("data[0].pop()", "took samples out"),
        ("data.pop()", "took samples out"),
    ],
)
def test_what_a_filter_of_samples_may_not_do_is_named(hook: Make, line: str, said: str):
    groups = [[sample(0)]]
    mine = hook("rollout_sample_filter", f"def f(args, data):\n    {line}\n")
    with pytest.raises(UsageError, match=said) as caught:
        batches.filter_samples(mine, ARGS, groups)
    assert "f (" in caught.value.message and ".py:1)" in caught.value.message
    assert groups == [[sample(0)]]


def test_rewards_are_processed_and_the_raw_ones_kept(hook: Make):
    samples = [sample(0, reward=1.0), sample(1, reward=3.0)]
    code = """
import numpy as np
def f(args, samples):
    raw = [s.reward for s in samples]
    return raw, np.array(raw) - 2
"""
    batches.post_process(hook("reward_post_process", code), ARGS, samples)
    assert [s.reward for s in samples] == [-1.0, 1.0]
    assert [batches.raw_reward(s, None) for s in samples] == [1.0, 3.0]
    assert batches.raw_reward(sample(5, reward=0.5), None) == 0.5


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("[1, 2]", "returned list"),
        ("([1], [2])", "returned 1 rewards for 2 samples"),
        ("([1, 2], [float('nan'), 2])", "returned nan as a reward"),
        ("([1, 2], ['a', 2])", "returned 'a' as a reward"),
        ("(None, None)", "returned NoneType for 2 samples"),
    ],
)
def test_rewards_that_are_none_are_named(hook: Make, value: str, said: str):
    mine = hook("reward_post_process", f"def f(args, samples): return {value}")
    with pytest.raises(UsageError, match=said):
        batches.post_process(mine, ARGS, [sample(0), sample(1)])


def test_all_groups_are_seen_and_nothing_is_dealt(hook: Make):
    code = "def f(args, all_samples, data_source): args.seen = [len(g) for g in all_samples]"
    args = types.SimpleNamespace()
    batches.look_at_all(hook("all_samples_process", code), args, [[sample(0)], [sample(1), sample(2)]])
    assert args.seen == [1, 2]
    asking = hook("all_samples_process", "def f(args, all_samples, data_source): data_source(4)")
    with pytest.raises(UsageError, match="asked for 4 more groups"):
        batches.look_at_all(asking, args, [[sample(0)]])


def test_logs_see_samples_and_say_whether_slimes_own_line_stays(hook: Make):
    code = """
def f(rollout_id, args, samples, extra_metrics, rollout_time):
    args.seen = rollout_id, len(samples), extra_metrics, rollout_time
    return rollout_id == 3
"""
    args = types.SimpleNamespace(eval_reward_key=None)
    mine = hook("rollout_log", code)
    assert batches.log_rollout(mine, 3, args, [sample(0)], {"a": 1.0}, 2.5)
    assert args.seen == (3, 1, {"a": 1.0}, 2.5) and not batches.log_rollout(mine, 4, args, [sample(0)], {}, 0.0)
    code = """
def f(rollout_id, args, data, extra_metrics):
    args.seen = {name: (d["rewards"], d["truncated"], len(d["samples"])) for name, d in data.items()}
"""
    found = {"one": [sample(0), sample(1, reward=0.0)]}
    assert not batches.log_evaluation(hook("eval_log", code), 0, args, found, {})
    assert args.seen == {"one": ([1.0, 0.0], [False, False], 2)}
    changing = hook("rollout_log", "def f(rollout_id, args, samples, m, t): samples[0].reward = 0")
    with pytest.raises(UsageError, match="changed reward of sample 0"):
        batches.log_rollout(changing, 0, args, [sample(0)], {}, 0.0)


async def test_sample_hooks_change_a_sample_one_after_the_other(hook: Make):
    changing = hook(
        "sample_hook",
        "def f(args, sample, *, rollout_id=None, evaluation=False):\n"
        "    sample.metadata['seen'] = [rollout_id, evaluation]",
    )
    code = """
import dataclasses
async def f(args, sample, **more):
    return dataclasses.replace(sample, index=99, response=str(sample.metadata["seen"]))
"""
    made = await batches.prepared(
        [changing, hook("sample_hook", code)], ARGS, sample(4, 2, part=1), rollout_id=7, evaluation=False
    )
    assert (made.index, made.group_index, made.part, made.response) == (4, 2, 1, "[7, False]")
    wrong = hook("sample_hook", "def f(args, sample, **more): return 3")
    with pytest.raises(UsageError, match="returned int"):
        await batches.prepared([wrong], ARGS, sample(0), rollout_id=None, evaluation=True)


def test_all_four_in_one_call(hook: Make):
    mask = hook("rollout_sample_filter", "def f(args, data): data[0][0].remove_sample = True")
    double = hook("reward_post_process", "def f(args, s): return [x.reward for x in s], [2 * x.reward for x in s]")
    keep = """
def f(args, samples):
    kept = samples[1:]
    return {"tokens": [s.tokens for s in kept], "response_lengths": [s.response_length for s in kept],
            "rewards": [s.reward for s in kept], "loss_masks": [s.loss_mask for s in kept],
            "sample_indices": [s.index for s in kept]}
"""
    seen = hook("all_samples_process", "def f(args, all_samples, data_source): args.all = len(all_samples)")
    args = types.SimpleNamespace()
    applied = batches.BatchHooks(seen, mask, double, hook("convert_samples", keep))
    made = applied.apply(args, [[sample(0)], [sample(1, 1)]], [[sample(2, 2)]])
    assert args.all == 3 and [(s.index, s.reward, batches.raw_reward(s, None)) for s in made] == [(1, 2.0, 1.0)]
    assert batches.BatchHooks.of(types.SimpleNamespace()).apply(args, [[sample(0)]], []) == [sample(0)]


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("True", None),
        ("not samples.sort(key=lambda s: -s.index) and not samples.pop()", "filter_rejected"),
        ("0", "filter_rejected"),
        ("hooks.DynamicFilterOutput(keep=False, reason='too  easy')", "filter_too easy"),
        ("hooks.DynamicFilterOutput(True)", None),
    ],
)
async def test_a_filter_says_why(hook: Make, said: str, reason: str | None):
    mine = hook("dynamic_filter", f"from slime_cli import hooks\nasync def f(args, samples): return {said}")
    assert await batches.verdict(mine, ARGS, [sample(0)]) == reason


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return None", "returned None"),
        ("return 'yes'", "returned str 'yes'"),
        ("samples[0].reward = 0.0; return True", "changed reward of sample 0"),
        ("return samples[7]", "raised IndexError: list index out of range at .*py:2"),
    ],
)
async def test_a_filter_only_judges(hook: Make, body: str, said: str):
    mine = hook("dynamic_filter", f"def f(args, samples):\n    {body}")
    with pytest.raises(UsageError, match=said):
        await batches.verdict(mine, ARGS, [sample(0), sample(1)])


async def test_slimes_own_filter_by_the_name_in_its_scripts():
    named = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
    mine = Hook.load(named, "dynamic_filter")
    assert await batches.verdict(mine, ARGS, [sample(0), sample(1, reward=1.0 + 1e-9)]) == "filter_zero_std_1"
    assert await batches.verdict(mine, ARGS, [sample(0), sample(1, reward=0.0)]) is None
    keyed = types.SimpleNamespace(reward_key="score")
    assert await batches.verdict(mine, keyed, [sample(0, reward={"score": 1}), sample(1, reward={"score": 1})])
