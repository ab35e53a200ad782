"""Rollout and evaluation with a scripted generate function: executions that fan out, fail, and are told what they may return."""

import dataclasses
import types

import pytest

from slime_cli.buffer.buffer import DataBuffer
from slime_cli.buffer.journal import Journal
from slime_cli.buffer.types import PromptRow, Sample, Status, executions
from slime_cli.errors import UsageError
from slime_cli.rollout.evaluate import evaluate
from slime_cli.rollout.generate import Generator
from slime_cli.rollout.rewards import RewardPool
from slime_cli.training import packing

FUNCTIONS = """
import copy
from slime_cli.buffer.types import Sample, Status

def made(sample, response, reward=None, status=Status.PENDING):
    out = copy.deepcopy(sample)
    out.tokens, out.response, out.response_length = sample.tokens + [5], response, 1
    out.reward, out.status = reward, status
    return out

async def agent(args, sample, sampling_params):
    found = args.script[sample.index]
    return [made(sample, *one) for one in found] if isinstance(found, list) else made(sample, *found)

async def nested(args, sample, sampling_params): return [[sample]]
async def nothing(args, sample, sampling_params): pass

def exact(args, sample, **kw): return float(sample.response == sample.label)
def spoilt(args, sample, **kw): return float("nan") if sample.response == "bad" else 1.0
def of_group(args, samples, **kw): return [(s.reward or 0.0) + 10 * len(samples) for s in samples]
"""


class Source:
    """Two prompts, over and over."""

    name = "two prompts"
    rows = [PromptRow(f"{i}?", str(i), {}, "data.jsonl", i + 1) for i in range(2)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def render(row):
    return types.SimpleNamespace(text=row.prompt, tokens=[1, 2])


@pytest.fixture
def path(tmp_path):
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    return lambda name: f"{tmp_path / 'mine.py'}:{name}"


@pytest.fixture
def journal(tmp_path):
    with Journal(tmp_path / "journal.sqlite") as opened:
        yield opened


def options(path, script=None, *, generate="agent", reward="exact", **changes):
    names = (
        "rm_type rm_url reward_key dynamic_sampling_filter_path over_sampling_batch_size rollout_temperature rollout_top_p rollout_top_k "
        "rollout_max_response_len rollout_stop rollout_stop_token_ids rollout_skip_special_tokens eval_temperature eval_top_p "
        "eval_max_response_len eval_reward_key"
    )
    given = {"custom_generate_function_path": path(generate), "custom_rm_path": path(reward), "group_rm": False, "rollout_batch_size": 1}
    return types.SimpleNamespace(**{**dict.fromkeys(names.split()), **given, "script": script, **changes})


def buffer_of(journal, n=3):
    return DataBuffer(journal, Source(), samples_per_prompt=n, shuffle=False, seed=0, render=render)


async def rollout(journal, args, n=3):
    async with RewardPool(1, 10) as rewards:
        return await Generator(args, None, rewards).rollout(buffer_of(journal, n), 0, lambda count: None)


async def test_one_execution_fans_out_and_its_siblings_are_rewarded_and_kept_together(path, journal):
    script = {0: ("0",), 1: [("0",), ("wrong",), ("own", 0.25)], 2: [("0",)]}
    result = await rollout(journal, options(path, script))
    (group,) = result.groups
    assert [(s.index, s.part, s.group_index, s.reward) for s in group.finished] == [
        (0, 0, 0, 1.0), (1, 0, 0, 1.0), (1, 1, 0, 0.0), (1, 2, 0, 0.25), (2, 0, 0, 1.0)
    ]  # fmt: skip
    assert not result.dropped and journal.ledger().dispatched == 3 and journal.ledger().in_flight == {"REWARDED": 3}
    assert journal.record(1).reward == [1.0, 0.0, 0.25]
    assert list(journal.recover().groups[0].finished) == group.finished, "the next attempt has all of it"


async def test_an_execution_is_dropped_whole_with_the_reason_of_the_first_that_failed(path, journal):
    script = {
        0: [], 1: [("fine",), ("x", None, Status.ABORTED), ("x", None, Status.FAILED)], 2: [("fine",), ("bad",)],
        3: [("fine",), ("own", float("inf"))], 4: [("fine",), ("fine",)],
    }  # fmt: skip
    result = await rollout(journal, options(path, script, reward="spoilt"), n=5)
    assert result.dropped == {"generation_empty": 1, "generation_aborted": 1, "reward_bad_value": 2}
    assert [(s.index, s.part) for s in result.groups[0].finished] == [(4, 0), (4, 1)]
    assert [journal.record(i).reason for i in range(5)] == ["generation_empty", "generation_aborted", "reward_bad_value", "reward_bad_value", None]
    assert journal.ledger().balanced and sum(journal.ledger().dropped.values()) == 4


async def test_with_group_rm_the_function_sees_siblings_too_and_has_the_last_word(path, journal):
    result = await rollout(journal, options(path, {0: [("a", 0.5), ("b",)], 1: ("c",)}, reward="of_group", group_rm=True), n=2)
    assert [s.reward for s in result.groups[0].finished] == [30.5, 30.0, 30.0]


async def test_a_group_that_the_filter_refuses_is_dropped_by_executions(path, journal, tmp_path):
    (tmp_path / "keep.py").write_text("def longer(args, samples): return len(samples) > 3\n")
    script = {0: [("0",), ("1",)], 1: ("0",), 2: [("0",)] * 3, 3: ("0",)}
    args = options(path, script, dynamic_sampling_filter_path=f"{tmp_path / 'keep.py'}:longer")
    result = await rollout(journal, args, n=2)
    assert result.dropped == {"filter_rejected": 2} and [g.index for g in result.groups] == [1]
    assert journal.ledger().dropped == {"filter_rejected": 2} and journal.ledger().balanced


@pytest.mark.parametrize(("generate", "said"), [("nested", "a list that holds list"), ("nothing", "NoneType")])
async def test_what_is_no_sample_ends_the_run_and_names_the_function(path, journal, generate, said):
    with pytest.raises(UsageError, match=f"{generate}': it returned {said}"):
        await rollout(journal, options(path, generate=generate))


async def test_each_step_commits_the_executions_that_it_trained(path, journal):
    """What the conductor writes is what the trainer's own split holds."""
    script = {0: [("0",)] * 3, 1: ("0",), 2: [("0",)] * 2, 3: ("1",)}
    buffer, args = buffer_of(journal, 4), options(path, script)
    async with RewardPool(1, 10) as rewards:
        result = await Generator(args, None, rewards).rollout(buffer, 0, lambda count: None)
    samples = result.groups[0].finished
    journal.batched(executions(samples), 0)
    parts = packing.split_steps([s.index for s in samples], 2)
    assert [len(part) for part in parts] == [4, 3]
    steps = [(step, 0, "v", list(executions(samples[i] for i in part))) for step, part in enumerate(parts)]
    journal.commit(steps=steps, checkpoint="c")
    assert [journal.record(i).step for i in range(4)] == [0, 0, 1, 1] and journal.ledger().balanced


async def test_in_evaluation_an_execution_scores_the_mean_of_its_siblings(path):
    script = {0: [("0",), ("wrong",), ("0",), ("0",)], 1: [], 2: [("own", 0.25)], 3: ("1", None, Status.TRUNCATED)}
    args = options(path, script, n_samples_per_eval_prompt=2)
    async with RewardPool(1, 10) as rewards:
        found = await evaluate("set", Source(), Generator(args, None, rewards), render, lambda count: None)
    assert found["reward_mean"] == pytest.approx((0.75 + 0 + 0.25 + 1) / 4)
    assert (found["prompts"], found["executions"], found["samples"], found["reward_failures"]) == (2, 4, 6, 1)
    assert found["truncated_ratio"] == pytest.approx(1 / 6)


async def test_a_single_sample_is_what_it_was_before_there_were_lists(path, journal):
    (group,) = (await rollout(journal, options(path, dict.fromkeys(range(2), ("0",))), n=2)).groups
    want = Sample(index=0, group_index=0, prompt="0?", label="0", tokens=[1, 2, 5], response="0", response_length=1, reward=1.0, rollout_id=0,
                  status=Status.COMPLETED)  # fmt: skip
    assert group.finished == [want, dataclasses.replace(want, index=1)]
