"""Users' functions that the loop calls, over a genuine Data Buffer: each trajectory is accounted for, whatever they
do."""

import functools
import pathlib
import types
from collections.abc import Iterator
from typing import Any

import pytest

from slime_cli.buffer.buffer import DataBuffer
from slime_cli.buffer.gate import Gate
from slime_cli.buffer.journal import Journal
from slime_cli.buffer.types import PromptRow, Sample, Status
from slime_cli.errors import UsageError
from slime_cli.hooks import rollouts
from slime_cli.hooks.batches import BatchHooks, raw_reward
from slime_cli.hooks.kinds import Hook
from slime_cli.loop.users import Users

ARGS = types.SimpleNamespace(rollout_batch_size=2, reward_key=None, eval_reward_key=None)
CLIENT = types.SimpleNamespace(generate=None)
MINE = """
import dataclasses
from slime_cli import hooks

def answered(s, reward=1.0):
    return dataclasses.replace(s, tokens=s.tokens + [5], response_length=1, reward=reward, rollout_log_probs=[-1.0])

def rollout(args, rollout_id, data_source, evaluation=False):
    groups = data_source.get_samples(4)
    data_source.add_samples(groups[3:])
    return [[answered(s) for s in groups[1]], [answered(groups[2][0])]]

def unfit(args, rollout_id, data_source, evaluation=False):
    return [[dataclasses.replace(answered(s), tokens=[1, 999]) for s in g] for g in data_source.get_samples(2)]

def evaluate(args, rollout_id, data_source, evaluation=True):
    samples = [hooks.Sample(i, i // 2, reward=i / 4) for i in range(4)]
    found = {"rewards": [0, 0.25, 0.5, 0.75], "samples": samples, "truncated": [1, 0, 0, 0]}
    return hooks.RolloutFnEvalOutput({"mine": found})

def log(rollout_id, args, samples, metrics, seconds):
    args.seen = rollout_id, len(samples), metrics, seconds
    return True

def written(args, version_dir, rollout_engines): args.written = version_dir, rollout_engines
def doubled(args, samples): return [s.reward for s in samples], [2 * s.reward for s in samples]
def seen(args, all_samples, data_source): args.groups = [[s.index for s in group] for group in all_samples]
def last_only(args, samples):
    s = samples[-1]
    told = {"rewards": [s.reward], "loss_masks": [[1]], "rollout_log_probs": [s.rollout_log_probs]}
    return told | {"tokens": [s.tokens], "response_lengths": [1], "sample_indices": [s.index]}
def newest(args, rollout_id, buffer, num_samples):
    del buffer[0]
    return buffer[-1:]
"""


class Rows(list):
    name = "rows"


@pytest.fixture
def hook(tmp_path: pathlib.Path) -> Any:
    (tmp_path / "mine.py").write_text(MINE)
    return lambda kind, name: Hook.load(f"{tmp_path / 'mine.py'}:{name}", kind)


@pytest.fixture
def buffer_of(tmp_path: pathlib.Path) -> Iterator[Any]:
    made = []

    def make(**more: Any) -> DataBuffer:
        rows = Rows([PromptRow("?", None, {}, "d.jsonl", 1)])
        render = lambda row: types.SimpleNamespace(text=row.prompt, tokens=[1])  # noqa: E731
        given = dict(samples_per_prompt=2, shuffle=False, seed=0, render=render, gate=Gate(2, None), rows=320)
        made.append(DataBuffer(Journal(tmp_path / "journal.sqlite"), rows, folder=tmp_path, **given, **more))
        return made[-1]

    yield make
    for buffer in made:
        buffer.close()


def fault(sample: Sample) -> str | None:
    try:
        sample.check(320)
    except ValueError as error:
        return str(error)
    return None


async def test_a_rollout_of_a_users_own_is_a_batch_and_what_it_left_out_is_dropped(hook: Any, buffer_of: Any):
    buffer = buffer_of()
    batch = await Users(ARGS, CLIENT, rollout=hook("rollout", "rollout")).generated(buffer, 0, 0, fault)
    assert [(s.group_index, s.index) for s in batch.samples] == [(1, 2), (1, 3), (2, 4)]
    assert batch.dropped == {"rollout_function": 3} and buffer.ledger().balanced
    assert [group.index for group in buffer.lease(1, version=0)] == [3], "given back, and dealt again"
    with pytest.raises(UsageError, match="returned something unfit: sample 6: token 999"):
        await Users(ARGS, CLIENT, rollout=hook("rollout", "unfit")).generated(buffer_of(), 1, 0, fault)


async def test_an_evaluation_of_a_users_own(hook: Any):
    ((result, samples),) = await Users(ARGS, CLIENT, eval_rollout=hook("eval_rollout", "evaluate")).evaluated(3)
    assert (result["dataset"], result["prompts"], result["trajectories"], len(samples)) == ("mine", 2, 4, 4)
    assert result["reward_mean"] == 0.375 and result["truncated_ratio"] == 0.25


async def test_logs_and_a_versions_files(hook: Any, tmp_path: pathlib.Path):
    args = types.SimpleNamespace(eval_reward_key=None)
    logs = {"rollout_log": hook("rollout_log", "log"), "weight_post_write": hook("weight_post_write", "written")}
    users = Users(args, CLIENT, **logs)
    batch = types.SimpleNamespace(rollout_id=4, samples=[Sample(0, 0)], dropped={"filter_rejected": 2})
    assert await users.log_rollout(batch, {"seconds": 2.5})
    assert args.seen == (4, 1, {"rollout/dynamic_filter/drop_filter_rejected": 2.0}, 2.5)
    users.written(tmp_path / "v000001", ["http://a"])
    assert args.written == (str(tmp_path / "v000001"), ["http://a"])
    assert not await Users(args).log_rollout(batch, {}) and not await Users(args).log_evaluation(0, {})


def finished(buffer: DataBuffer, count: int) -> list[Any]:
    groups = buffer.lease(count, version=0)
    for group in groups:
        made = [
            Sample(
                s.index,
                group.index,
                tokens=[1, 5],
                response_length=1,
                reward=1.0,
                rollout_log_probs=[-1.0],
                status=Status.COMPLETED,
            )
            for s in group.pending
        ]
        buffer.finish(group, made, {})
    return groups


def test_functions_of_a_batch_shape_it_and_what_they_leave_out_is_dropped(hook: Any, buffer_of: Any):
    args = types.SimpleNamespace()
    shaping = BatchHooks(
        hook("all_samples_process", "seen"),
        None,
        hook("reward_post_process", "doubled"),
        hook("convert_samples", "last_only"),
    )
    buffer = buffer_of(shape=functools.partial(shaping.apply, args))
    first, *others = finished(buffer, 3)
    buffer.reject(first, "filter_rejected")
    for group in others:
        buffer.accept(group)
    batch = buffer.make(buffer.choose(0))
    assert args.groups == [[2, 3], [4, 5], [0, 1]], "those of the batch, then the rejected ones"
    assert [(s.index, s.reward, raw_reward(s, None)) for s in batch.samples] == [(5, 2.0, 1.0)]
    assert batch.dropped == {"filter_rejected": 2, "convert_samples": 3} and buffer.ledger().balanced
    assert batch.columns.rewards_N.tolist() == [2.0]


def test_a_filter_of_the_buffer_chooses_what_is_dealt_again(hook: Any, buffer_of: Any):
    buffer = buffer_of(select=functools.partial(rollouts.choose, hook("buffer_filter", "newest"), ARGS))
    for group in buffer.lease(3, version=0):
        buffer.release(group, keep=False)
    assert [group.index for group in buffer.lease(2, version=0)] == [2, 3], "the newest, and a new one"
    assert buffer.ledger().dropped == {"buffer_filter": 2} and buffer.ledger().balanced
