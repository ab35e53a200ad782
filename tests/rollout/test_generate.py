"""Rollout and evaluation with a scripted generate function: trajectories that fan out, fail, and are told what they may
return."""

import asyncio
import dataclasses
import itertools
import math
import statistics
import types
from fractions import Fraction

import numpy as np
import pytest

from slime_cli.buffer.buffer import DataBuffer
from slime_cli.buffer.gate import Gate
from slime_cli.buffer.journal import Journal
from slime_cli.buffer.places import Place
from slime_cli.buffer.types import PromptRow, Sample, Status, trajectories
from slime_cli.errors import DataError, EngineError, UsageError
from slime_cli.options.evaluations import EvaluationSet
from slime_cli.rewards.rewards import RewardPool
from slime_cli.rollout.boundary import Boundary
from slime_cli.rollout.client import RouterClient
from slime_cli.rollout.collector import Collector
from slime_cli.rollout.evaluate import evaluate, mean_over_prompts, pass_at, result_of
from slime_cli.rollout.failures import Failures
from slime_cli.rollout.generate import Generator
from slime_cli.training.batching import packing

FUNCTIONS = """
import asyncio, copy
from slime_cli.buffer.types import Sample, Status
from slime_cli.errors import EngineError

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

async def scripted(args, sample, sampling_params, evaluation=None):
    act = args.script[sample.index % len(args.script)]
    args.seen.append((sample.index, evaluation))
    if act == "raise": raise KeyError("lost")
    if act == "exit": raise SystemExit(3)
    if act == "asks": raise EngineError("no answer")
    if act == "cancel": raise asyncio.CancelledError
    out = made(sample, "0")
    for name, value in args.change.items() if act == "change" else ():
        setattr(out, name, value)
    return out

async def cut_off(args, sample, sampling_params, evaluation=None):
    # the first time it ends with the run's abort, unless the script says otherwise
    args.seen.append((sample.index, sample.status.value, list(sample.tokens)))
    if args.script.get(sample.index) == "answers" or len([i for i, *_ in args.seen if i == sample.index]) > 1:
        return [made(sample, "0", 1.0, Status.COMPLETED) for _ in range(args.siblings)]
    args.waits += 1
    await args.aborted.wait()
    ends = [made(sample, "0", 1.0, Status.ABORTED)]
    return [*ends, made(sample, "0", 1.0, Status.COMPLETED)] if args.script.get(sample.index) == "fans out" else ends

def kept(args, samples): return 1 / 0 if isinstance(args.verdict, str) and args.verdict == "raise" else args.verdict
def spoiling(args, samples):
    exec(args.code)
    return True
async def kept_async(args, samples): return args.verdict
def raising(args, sample, **kw): raise KeyError("lost")
def forgetful(args, sample, **kw): pass
def breaking(args, sample, **kw):
    sample.loss_mask = [1, 1]
    return 1.0
def exact(args, sample, **kw): return float(sample.response == sample.label)
def spoilt(args, sample, **kw): return float("nan") if sample.response == "bad" else 1.0
def losing(args, sample, **kw):
    if sample.index == 0: sample.metadata = None
    return 1.0
def losing_group(args, samples, **kw): return [losing(args, sample) for sample in samples]
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
        "rm_type rm_url reward_key dynamic_sampling_filter_path rollout_sample_hook_path over_sampling_batch_size"
        " rollout_temperature rollout_top_p rollout_top_k rollout_max_response_len rollout_stop rollout_stop_token_ids"
        " use_top_p_replay rollout_skip_special_tokens mask_offpolicy_in_partial_rollout eval_temperature eval_top_p"
        " eval_top_k eval_min_new_tokens eval_max_response_len eval_reward_key rollout_max_context_len"
        " eval_max_context_len eval_max_prompt_len apply_chat_template apply_chat_template_kwargs"
    )
    given = {
        "custom_generate_function_path": path(generate),
        "custom_rm_path": path(reward),
        "group_rm": False,
        "rollout_batch_size": 1,
    }
    return types.SimpleNamespace(**{**dict.fromkeys(names.split()), **given, "script": script, **changes})


def buffer_of(journal, n=3, batch=1):
    options = dict(samples_per_prompt=n, shuffle=False, seed=0, render=render, gate=Gate(batch, None))
    return DataBuffer(journal, Source(), folder=journal.path.parent, **options)


def client(alive=lambda: None):
    return RouterClient("http://127.0.0.1:9", 8, alive)


async def collected(generator, buffer):
    """The groups of rollout 0, and what was dropped on the way."""
    args = generator.args
    batch = args.rollout_batch_size
    burst = args.over_sampling_batch_size or batch
    options = dict(batch=batch, burst=burst, slots=99, keep_partial=False)
    buffer.make = lambda chosen: chosen
    collector = Collector(generator, buffer, generator.client, **options)
    try:
        return await collector.take(0)
    finally:
        await collector.stop()


async def rollout(journal, args, n=3, **more):
    async with RewardPool(1, 10) as rewards:
        return await collected(
            Generator(args, client(), rewards, **more), buffer_of(journal, n, args.rollout_batch_size)
        )


def line_of(text):
    return FUNCTIONS.split("\n").index(text) + 1


async def test_one_trajectory_fans_out_and_its_siblings_are_rewarded_and_kept_together(path, journal):
    script = {0: ("0",), 1: [("0",), ("wrong",), ("own", 0.25)], 2: [("0",)]}
    result = await rollout(journal, options(path, script))
    (group,) = result.groups
    assert [(s.index, s.part, s.group_index, s.reward) for s in group.finished] == [
        (0, 0, 0, 1.0),
        (1, 0, 0, 1.0),
        (1, 1, 0, 0.0),
        (1, 2, 0, 0.25),
        (2, 0, 0, 1.0),
    ]
    assert not result.dropped and journal.ledger().dispatched == 3 and journal.ledger().in_flight == {"REWARDED": 3}
    assert journal.record(1).reward == [1.0, 0.0, 0.25]
    assert list(journal.recover().groups[0].finished) == group.finished, "the next attempt has all of it"


async def test_a_trajectory_is_dropped_whole_with_the_reason_of_the_first_that_failed(path, journal):
    script = {
        0: [],
        1: [("fine",), ("x", None, Status.ABORTED), ("x", None, Status.FAILED)],
        2: [("fine",), ("bad",)],
        3: [("fine",), ("own", float("inf"))],
        4: [("fine",), ("fine",)],
    }
    result = await rollout(journal, options(path, script, reward="spoilt"), n=5)
    assert result.dropped == {"generation_empty": 1, "generation_aborted": 1, "reward_bad_value": 2}
    assert [(s.index, s.part) for s in result.groups[0].finished] == [(4, 0), (4, 1)]
    assert [journal.record(i).reason for i in range(5)] == [
        "generation_empty",
        "generation_aborted",
        "reward_bad_value",
        "reward_bad_value",
        None,
    ]
    assert journal.ledger().balanced and sum(journal.ledger().dropped.values()) == 4


async def test_with_group_rm_the_function_sees_siblings_too_and_has_the_last_word(path, journal):
    result = await rollout(
        journal, options(path, {0: [("a", 0.5), ("b",)], 1: ("c",)}, reward="of_group", group_rm=True), n=2
    )
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
    with pytest.raises(
        UsageError, match=rf"generate hook '.*{generate}': {generate} \(.*mine.py:\d+\) returned {said}"
    ):
        await rollout(journal, options(path, generate=generate))


async def test_each_step_commits_the_trajectories_that_it_trained(path, journal):
    """What the conductor writes is what the trainer's own split holds."""
    script = {0: [("0",)] * 3, 1: ("0",), 2: [("0",)] * 2, 3: ("1",)}
    buffer = buffer_of(journal, 4)
    args = options(path, script)
    async with RewardPool(1, 10) as rewards:
        result = await collected(Generator(args, client(), rewards), buffer)
    samples = result.groups[0].finished
    journal.batched(trajectories(samples), 0)
    parts = packing.split_steps([s.index for s in samples], 2)
    assert [len(part) for part in parts] == [4, 3]
    steps = [(step, 0, "v", list(trajectories(samples[i] for i in part))) for step, part in enumerate(parts)]
    journal.commit(steps=steps, checkpoint="c")
    assert [journal.record(i).step for i in range(4)] == [0, 0, 1, 1] and journal.ledger().balanced


async def test_in_evaluation_a_trajectory_scores_the_mean_of_its_siblings(path):
    script = {0: [("0",), ("wrong",), ("0",), ("0",)], 1: [], 2: [("own", 0.25)], 3: ("1", None, Status.TRUNCATED)}
    args = options(path, script, n_samples_per_eval_prompt=2)
    async with RewardPool(1, 10) as rewards:
        found = await evaluate(
            EvaluationSet("set", "", args), Source(), Generator(args, client(), rewards), render, lambda count: None
        )
    assert found["reward_mean"] == pytest.approx((0.75 + 0 + 0.25 + 1) / 4)
    assert (found["prompts"], found["trajectories"], found["samples"], found["failures"]) == (
        2,
        4,
        6,
        {"generation_empty": 1},
    )
    assert found["truncated_ratio"] == pytest.approx(1 / 6)


async def test_an_answer_is_cut_where_prompt_and_answer_have_their_length_together(tmp_path, journal):
    code = "\n".join([FUNCTIONS, "async def asked(args, sample, sampling_params, evaluation=None):"])
    code += "\n    args.asked.append((evaluation, sampling_params))\n    return made(sample, '0', 1.0)\n"
    (tmp_path / "mine.py").write_text(code)
    lengths = dict(rollout_max_response_len=50, eval_max_response_len=60, eval_top_k=3, eval_min_new_tokens=2)
    together = dict(rollout_max_context_len=20, eval_max_context_len=90, n_samples_per_eval_prompt=1)
    args = options(lambda name: f"{tmp_path / 'mine.py'}:{name}", generate="asked", asked=[], **lengths, **together)
    tokens = len(render(Source()[0]).tokens)
    await rollout(journal, args, n=1)
    async with RewardPool(1, 10) as rewards:
        await evaluate(
            EvaluationSet("set", "", args), Source(), Generator(args, client(), rewards), render, lambda count: None
        )
    trained = [params for evaluation, params in args.asked if not evaluation]
    evaluated = [params for evaluation, params in args.asked if evaluation]
    assert trained and evaluated
    assert {params["max_new_tokens"] for params in trained} == {20 - tokens}
    assert {(p["max_new_tokens"], p["top_k"], p["min_new_tokens"]) for p in evaluated} == {(60, 3, 2)}


async def test_a_single_sample_is_what_it_was_before_there_were_lists(path, journal):
    (group,) = (await rollout(journal, options(path, dict.fromkeys(range(2), ("0",))), n=2)).groups
    want = Sample(
        index=0,
        group_index=0,
        prompt="0?",
        label="0",
        tokens=[1, 2, 5],
        response="0",
        response_length=1,
        reward=1.0,
        rollout_id=0,
        status=Status.COMPLETED,
    )
    assert group.finished == [want, dataclasses.replace(want, index=1)]


# -- failures
# -------------------------------------------------------------------------------------------------------------------


RAISES = '    if act == "raise": raise KeyError("lost")'


@pytest.mark.parametrize(
    ("act", "reason", "detail"),
    [
        ("raise", "generation_error", "KeyError: 'lost' at "),
        ("exit", "generation_error", "SystemExit: 3 at "),
        ("cancel", "generation_error", "Cancel"),
    ],
)
async def test_what_a_generate_function_raises_costs_one_sample_and_names_its_line(path, journal, act, reason, detail):
    said = []
    args = options(path, [act, "fine", act], generate="scripted", seen=[])
    result = await rollout(journal, args, failures=Failures(4, said.append))
    assert result.dropped == {reason: 2} and [s.index for s in result.groups[0].finished] == [1]
    (text,) = said
    assert text.startswith(f"{reason}: {detail}") and "mine.py:" in text
    assert act != "raise" or f'mine.py", line {line_of(RAISES)}, in scripted' in text
    assert args.seen == [(0, False), (1, False), (2, False)]


UNFIT = {
    "loss_mask has 2 entries for 1 response tokens": dict(loss_mask=[1, 1]),
    "token 320 is not among the 320 rows": dict(tokens=[1, 2, 320]),
    "token -1 is not among": dict(tokens=[1, -1, 5]),
    "tokens holds ['float']": dict(tokens=[1, 2.5, 5]),
    "response_length 4 of 3 tokens": dict(response_length=4),
    "rollout_log_probs holds nan": dict(rollout_log_probs=[float("nan")]),
    "rollout_log_probs holds ['NoneType']": dict(rollout_log_probs=[None]),
    "rollout_log_probs holds 0.9": dict(rollout_log_probs=[0.9]),
    "loss_mask holds 2, not only": dict(loss_mask=[2]),
    "'finished' is not a valid Status": dict(status="finished"),
    "metadata can't be stored: object": dict(metadata={"client": object()}),
    "metadata can't be stored: can't serialize ints": dict(metadata={"seed": 2**70}),
    "metadata can't be stored: keys must be": dict(metadata={(1, 2): 3}),
    "metadata is NoneType, not a dict": dict(metadata=None),
    "metadata is list, not a dict": dict(metadata=["a"]),
    "metadata can't be stored: maximum recursion": dict(metadata=(endless := {})),
    "response can't be stored: 'utf-8' codec": dict(response="\ud800"),
    "prompt can't be stored: 'utf-8' codec": dict(prompt="\ud800"),
    "weight_versions can't be stored: 'utf-8' codec": dict(weight_versions=["\ud800"]),
    "rollout_top_p_token_ids holds ['str']": dict(rollout_top_p_token_ids=["a"], rollout_top_p_token_offsets=[0, 1]),
    "rollout_top_p_token_ids are not among": dict(rollout_top_p_token_ids=[320], rollout_top_p_token_offsets=[0, 1]),
    "routed_experts_shape holds ['str']": dict(routed_experts_shape="2x2"),
    "label is int, not text": dict(label=3),
    "has no prompt token": dict(tokens=[5]),
    "'NoneType' object is not iterable": dict(weight_versions=None),
    "response is NoneType": dict(response=None),
    "tokens is NoneType, not a list": dict(tokens=None),
}
endless["itself"] = endless


@pytest.mark.parametrize("said", UNFIT)
async def test_what_can_not_be_trained_never_reaches_the_buffer_and_the_function_is_named(path, journal, said):
    shown = []
    args = options(path, ["change", "fine"], generate="scripted", seen=[], change=UNFIT[said])
    result = await rollout(journal, args, n=2, boundary=Boundary(rows=320), failures=Failures(4, shown.append))
    assert result.dropped == {"generation_invalid": 1} and journal.ledger().balanced
    assert said in shown[0] and f"{path('scripted')}': scripted ({path('')[:-1]}:" in shown[0]


async def test_arrays_and_numbers_of_numpy_become_plain_values(path, journal):
    change = dict(
        metadata={"turns": np.int64(2), "seen": np.arange(2), "done": np.bool_(True)},
        response=np.str_("x"),
        label=np.str_("y"),
    )
    result = await rollout(journal, options(path, ["change"], n=1, generate="scripted", seen=[], change=change), n=1)
    (sample,) = result.groups[0].finished
    assert (sample.metadata, sample.response, sample.label) == ({"turns": 2, "seen": [0, 1], "done": True}, "x", "y")
    assert {*map(type, (*sample.metadata.values(), sample.response))} == {int, list, bool, str}


UNSTORABLE = {"bytes": b"x", "big": 2**70, "surrogate": "\ud800", "key": {(1, 2): 3}}


@pytest.mark.parametrize("kind", UNSTORABLE)
async def test_a_reward_that_can_not_be_stored_costs_its_execution(path, journal, kind):
    script = [("0", {"score": 1.0, "extra": UNSTORABLE[kind]}), ("1", {"score": 0.0, "extra": "fine"})]
    result = await rollout(journal, options(path, script, reward_key="score"), n=2)
    assert result.dropped == {"reward_bad_value": 1} and journal.ledger().balanced
    assert [s.index for s in result.groups[0].finished] == [1]


@pytest.mark.parametrize("reward", ["losing", "losing_group"])
async def test_a_reward_function_that_spoils_a_sample_costs_no_more_than_that(path, journal, reward):
    args = options(path, [("0",), ("1",)], reward=reward, group_rm=reward == "losing_group")
    result = await rollout(journal, args, n=2)
    assert result.dropped == {"reward_invalid": 1} and [s.index for s in result.groups[0].finished] == [1]


SPOILT = [
    "samples[0].reward = None",
    "samples[0].metadata['x'] = args",
    "samples[0].tokens = []",
    "for s in samples: s.index = 7",
]


@pytest.mark.parametrize("code", SPOILT)
async def test_a_filter_that_changes_a_sample_ends_the_run_and_is_named(path, journal, code):
    args = options(
        path, ["fine"], generate="scripted", seen=[], dynamic_sampling_filter_path=path("spoiling"), code=code
    )
    with pytest.raises(UsageError, match=r"spoiling \(.*mine.py:\d+\) (changed|left)"):
        await rollout(journal, args)


@pytest.mark.parametrize("code", ["samples.clear()", "samples.sort(key=lambda s: -s.index)"])
async def test_a_filter_may_do_with_its_list_what_it_likes(path, journal, code):
    args = options(
        path, ["fine"], generate="scripted", seen=[], dynamic_sampling_filter_path=path("spoiling"), code=code
    )
    result = await rollout(journal, args)
    assert [s.index for s in result.groups[0].finished] == [0, 1, 2] and not result.dropped


@pytest.mark.parametrize(
    "verdict", [np.bool_(True), np.float32(1), True, types.SimpleNamespace(keep=np.bool_(True), reason=None)]
)
async def test_a_filter_says_yes_in_numbers_of_numpy_too(path, journal, verdict):
    args = options(
        path, ["fine"], generate="scripted", seen=[], dynamic_sampling_filter_path=path("kept"), verdict=verdict
    )
    assert len((await rollout(journal, args)).groups[0].finished) == 3


KEYED = [
    {"score": 1.0, "acc": 0.5},
    {"score": 1.0},
    {"score": 1.0, "acc": float("nan")},
    {"score": 1.0, "acc": "yes"},
    {"acc": 0.25},
]


async def test_evaluation_reads_its_own_reward_key_and_what_has_no_number_there_is_a_failure(path):
    args = options(
        path,
        [("0", reward) for reward in KEYED],
        reward_key="score",
        eval_reward_key="acc",
        n_samples_per_eval_prompt=len(KEYED),
    )
    async with RewardPool(1, 10) as rewards:
        generator = Generator(args, client(), rewards)
        source = Source()
        source.rows = source.rows[:1]
        found = await evaluate(EvaluationSet("set", "", generator.args), source, generator, render, lambda count: None)
    assert found["failures"] == {"reward_bad_value": 3} and found["reward_mean"] == pytest.approx(0.75 / 5)


async def test_not_a_number_where_nothing_is_trained_does_no_harm(path, journal):
    change = dict(tokens=[1, 2, 3, 4], response_length=2, loss_mask=[0, 1], rollout_log_probs=[float("nan"), -1.0])
    result = await rollout(journal, options(path, ["change"], generate="scripted", seen=[], change=change))
    assert not result.dropped


async def test_a_column_that_the_options_need_must_be_there_except_in_evaluation(path, journal):
    args = options(path, ["change", "fine"], generate="scripted", seen=[], change={"rollout_log_probs": [-1.0]})
    boundary = Boundary(columns=("rollout_log_probs",))
    result = await rollout(journal, args, n=2, boundary=boundary)
    assert result.dropped == {"generation_invalid": 1} and [s.index for s in result.groups[0].finished] == [0]
    args.n_samples_per_eval_prompt = 1
    args.seen = []
    async with RewardPool(1, 10) as rewards:
        found = await evaluate(
            EvaluationSet("set", "", args),
            Source(),
            Generator(args, client(), rewards, boundary=boundary),
            render,
            lambda count: None,
        )
    assert found["failures"] == {} and args.seen == [(0, True), (1, True)]


HOPELESS = {
    "reward_error": dict(reward="raising"),
    "reward_bad_value": dict(reward="forgetful"),
    "reward_invalid": dict(reward="breaking"),
    "filter_rejected": dict(dynamic_sampling_filter_path="kept", verdict=False),
    "generation_empty": dict(script=[[]]),
    "generation_error": dict(generate="scripted", script=["raise"]),
    "generation_no_tokens": dict(generate="scripted", script=["change"], change={"response_length": 0}),
    "nothing_to_train": dict(generate="scripted", script=["change"], change={"loss_mask": [0]}),
}


@pytest.mark.parametrize("reason", HOPELESS)
async def test_a_rollout_without_progress_ends_after_so_many_groups_with_the_reasons(path, journal, reason):
    case = {"seen": [], "script": ["fine"], "generate": "scripted"} | HOPELESS[reason]
    if reason == "generation_empty":
        case |= {"generate": "agent", "script": dict.fromkeys(range(100), [])}
    if "dynamic_sampling_filter_path" in case:
        case["dynamic_sampling_filter_path"] = path(case["dynamic_sampling_filter_path"])
    shown = []
    with pytest.raises(
        DataError, match=f"not one of 4 groups in a row was of use; lost by reason: {reason} 8"
    ) as caught:
        await rollout(journal, options(path, **case), n=2, failures=Failures(4, shown.append))
    assert caught.value.exit_code == 3
    assert journal.ledger().dropped == {reason: 8} and journal.ledger().balanced
    assert len(shown) == (reason != "filter_rejected"), "the filter's reason says it all; of the others, one is shown"


async def test_a_rollout_that_ends_leaves_no_task_behind(path, journal):
    args = options(path, ["raise"], generate="scripted", seen=[], rollout_batch_size=8)
    with pytest.raises(DataError):
        await rollout(journal, args, failures=Failures(2, lambda text: None))
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.parametrize(
    ("verdict", "said"),
    [
        ("raise", r"dynamic_filter hook '.*mine.py:kept' raised ZeroDivisionError: .* at .*mine.py:\d+"),
        (None, "returned None"),
        ((False, "easy"), r"returned tuple \(False, 'easy'\)"),
        ("no", "returned str 'no'"),
        (np.array([True, False]), "returned ndarray array"),
    ],
)
async def test_a_filter_that_raises_or_says_nothing_clear_ends_the_run_and_is_named(path, journal, verdict, said):
    args = options(
        path, ["fine"], generate="scripted", seen=[], dynamic_sampling_filter_path=path("kept"), verdict=verdict
    )
    with pytest.raises(UsageError, match=said):
        await rollout(journal, args)


async def test_a_coroutine_filters_too(path, journal):
    args = options(
        path, ["fine"], generate="scripted", seen=[], dynamic_sampling_filter_path=path("kept_async"), verdict=False
    )
    with pytest.raises(DataError, match="filter_rejected"):
        await rollout(journal, args, failures=Failures(2, lambda text: None))


async def test_engines_that_are_gone_end_the_run_though_the_functions_error_is_another(path, journal):
    def alive():
        raise EngineError("no engine is left")

    args = options(path, ["raise"], generate="scripted", seen=[])
    async with RewardPool(1, 10) as rewards:
        with pytest.raises(EngineError, match="no engine is left"):
            await collected(Generator(args, client(alive), rewards), buffer_of(journal))


async def test_engines_that_are_gone_cost_no_trajectory_where_a_function_found_out(path, journal):
    def alive():
        raise EngineError("no engine is left")

    args = options(path, ["fine", "asks", "fine"], generate="scripted", seen=[])
    buffer = buffer_of(journal)
    async with RewardPool(1, 10) as rewards:
        with pytest.raises(EngineError, match="no engine is left"):
            await collected(Generator(args, client(alive), rewards), buffer)
        assert not journal.ledger().dropped
        failures = Failures(4, lambda text: None)
        batch = await collected(Generator(args, client(), rewards, failures=failures), buffer_of(journal))
    assert dict(batch.dropped) == {"generation_error": 1}, "it is the function's own where the engines are there"


async def test_a_prompt_beyond_the_models_rows_is_refused_by_row_before_a_function_or_an_engine_sees_it(path, journal):
    args = options(path, ["fine"], generate="scripted", seen=[])
    with pytest.raises(DataError, match="data.jsonl:1: it has token 2, and the model's embedding has 2 rows"):
        await rollout(journal, args, boundary=Boundary(rows=2))
    assert args.seen == []


# -- evaluation
# -----------------------------------------------------------------------------------------------------------------


async def evaluated(path, script, n=2, failures=None, **case):
    args = options(path, script, n_samples_per_eval_prompt=n, seen=[], **{"generate": "scripted", **case})
    async with RewardPool(1, 10) as rewards:
        return await evaluate(
            EvaluationSet("set", "", args),
            Source(),
            Generator(args, client(), rewards, failures=failures),
            render,
            lambda count: None,
        )


@pytest.mark.parametrize("case", [dict(reward="raising"), dict(reward="forgetful"), dict(script=["raise"])])
async def test_an_evaluation_in_which_everything_fails_has_no_result(path, case):
    with pytest.raises(
        DataError, match="not one of 2 prompts of evaluation set in a row was of use; lost by reason: .* 4"
    ):
        await evaluated(path, case.pop("script", ["fine"]), **case)


async def test_an_evaluation_judges_an_answer_that_is_text_alone(path):
    found = await evaluated(path, ["change"], change={"tokens": [], "response_length": 0, "response": "1"})
    assert found["failures"] == {} and found["reward_mean"] == 0.5
    with pytest.raises(DataError, match="generation_no_tokens 4"):
        await evaluated(path, ["change"], change={"tokens": [], "response_length": 0, "response": ""})


async def test_an_evaluation_of_which_no_row_can_be_used_says_so(path):
    args = options(path, ["fine"], generate="scripted", seen=[], n_samples_per_eval_prompt=1)
    async with RewardPool(1, 10) as rewards:
        with pytest.raises(DataError, match="evaluation set: none of its 2 rows can be used"):
            await evaluate(
                EvaluationSet("set", "", args),
                Source(),
                Generator(args, client(), rewards),
                lambda row: None,
                lambda count: None,
            )


async def test_an_evaluation_counts_what_failed_by_reason(path):
    shown = []
    found = await evaluated(path, ["fine", "raise", "fine", "fine"], failures=Failures(4, shown.append))
    assert found["failures"] == {"generation_error": 1} and found["trajectories"] == 4 and len(shown) == 1
    assert found["reward_mean"] == pytest.approx(1 / 4), (
        "the answers are 0, 0 is the first prompt's label, and one failed"
    )


def test_the_standard_error_is_over_prompts():
    """Against the formula for a mean over clusters of one size in exact arithmetic, and for clusters of several
    sizes."""
    rewards_PN = [[1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]]
    means = [Fraction(1), Fraction(0), Fraction(1)]
    mean = sum(means) / 3
    variance = sum((m - mean) ** 2 for m in means) / (3 * 2)
    found = mean_over_prompts(rewards_PN)
    assert found == pytest.approx((float(mean), float(variance) ** 0.5), rel=1e-12)
    assert found[1] == pytest.approx(1 / 3), "as of 12 independent answers it would be 0.136"
    ragged = [[1.0], [0.0, 1.0, 1.0], [0.5, 0.25]]
    total = Fraction(15, 4) / 6
    gaps = [Fraction(1) - total, 2 - 3 * total, Fraction(3, 4) - 2 * total]
    error = (float(Fraction(3, 2) * sum(g * g for g in gaps)) ** 0.5) / 6
    assert mean_over_prompts(ragged) == pytest.approx((float(total), error), rel=1e-12)
    assert mean_over_prompts([[1.0, 0.0]]) == (0.5, None)


def cut_short(path, script, siblings=1):
    """What functions that are cut off get, and the client whose abort they hear."""
    args = options(path, script, generate="cut_off", seen=[], waits=0, siblings=siblings, aborted=asyncio.Event())
    loop = asyncio.get_running_loop()
    ends = RouterClient("http://127.0.0.1:9", 8, abort=lambda: loop.call_soon_threadsafe(args.aborted.set))
    return args, ends


@pytest.mark.parametrize("keep", [True, False])
async def test_a_trajectory_that_fanned_out_is_given_back_with_one_of_its_group_that_was_cut_off(path, journal, keep):
    async with RewardPool(1, 10) as rewards:
        args, ends = cut_short(path, {0: "answers", 2: "answers", 3: "answers"}, siblings=2)
        buffer = buffer_of(journal, n=2)
        buffer.make = lambda chosen: chosen.groups
        collector = Collector(
            Generator(args, ends, rewards), buffer, ends, batch=1, burst=2, slots=9, keep_partial=keep
        )
        (first,) = await collector.take(0)
        assert first.index == 1
        (group,) = buffer._places.groups[Place.RETURNED].values()
        assert [s.index for s in group.pending] == [0, 1] and [len(s) for s in group.partial.values()] == [2] * keep
        (second,) = await collector.take(1)
        await collector.stop()
    assert [(s.index, s.part) for s in second.finished] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    again = [seen for seen in args.seen[4:] if seen[0] < 2]
    assert again == ([(1, "aborted", [1, 2, 5])] if keep else [(0, "pending", [1, 2]), (1, "pending", [1, 2])])


async def test_a_trajectory_that_fanned_out_when_this_run_cut_it_off_begins_anew_and_is_not_dropped(path, journal):
    async with RewardPool(1, 10) as rewards:
        args, ends = cut_short(path, {0: "fans out", 1: "answers", 2: "answers"})
        buffer = buffer_of(journal, n=1)
        buffer.make = lambda chosen: chosen.groups
        collector = Collector(
            Generator(args, ends, rewards), buffer, ends, batch=1, burst=2, slots=9, keep_partial=True
        )
        assert [group.index for group in await collector.take(0)] == [1]
        assert [group.index for group in await collector.take(1)] == [0]
        await collector.stop()
    assert journal.ledger().dropped == {}
    assert [seen for seen in args.seen if seen[0] == 0] == [(0, "pending", [1, 2])] * 2


async def test_an_evaluation_that_this_run_cut_off_continues(path):
    """A rollout beside it has enough, and ends what the engines have."""
    async with RewardPool(1, 10) as rewards:
        args, ends = cut_short(path, {1: "answers"})
        args.n_samples_per_eval_prompt = 1
        task = asyncio.create_task(
            evaluate(
                EvaluationSet("held-out", "", args), Source(), Generator(args, ends, rewards), render, lambda n: None
            )
        )
        while not args.waits:
            await asyncio.sleep(0)
        await ends.abort()
        result = await task
    assert result["failures"] == {} and result["reward_mean"] == 1.0
    assert args.seen[-1] == (0, "aborted", [1, 2, 5])


async def test_what_is_cancelled_before_it_was_checked_is_not_kept(path, journal, tmp_path, monkeypatch):
    """An answer is there, and a function that prepares it does not end."""
    monkeypatch.setattr("slime_cli.rollout.collector.CANCEL_SECONDS", 0.02)
    (tmp_path / "slow.py").write_text(
        "import asyncio\nasync def slow(args, sample, **kw):\n"
        "    sample.metadata['seen'] = 1\n    await asyncio.sleep(0 if sample.index else 60)\n"
    )
    async with RewardPool(1, 10) as rewards:
        hook = [f"{tmp_path / 'slow.py'}:slow"]
        args = options(path, rollout_sample_hook_path=hook, rollout_max_response_len=4)
        args.custom_generate_function_path = None
        args.use_top_p_replay = args.mask_offpolicy_in_partial_rollout = False

        async def answered(body):
            meta = {"output_token_logprobs": [[-1.0, 5, None]], "finish_reason": {"type": "stop"}}
            return [{"output_ids": [5], "text": "0", "meta_info": meta | {"weight_version": "v000000"}}]

        ends = client()
        ends.generate = answered
        buffer = buffer_of(journal, n=1)
        buffer.make = lambda chosen: chosen.groups
        collector = Collector(
            Generator(args, ends, rewards), buffer, ends, batch=1, burst=2, slots=9, keep_partial=True
        )
        assert [group.index for group in await collector.take(0)] == [1]
        (group,) = buffer._places.groups[Place.RETURNED].values()
        await collector.stop()
    assert group.pending[0].response_length == 0 and group.pending[0].metadata == {}


def test_pass_at_k_is_the_share_of_choices_of_k_answers_that_hold_a_right_one():
    """Counted choice by choice; a failed answer (0) is an answer, and only a whole reward is right."""
    rewards_PN = [[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.5, 0.0], [0.0, 1.0, 0.0, 0.0, 0.0, 0.0]]
    found = pass_at(rewards_PN)
    assert list(found) == [1, 2, 4]
    for k, (rate, error) in found.items():
        rates_P = [
            statistics.fmean(any(value == 1 for value in chosen) for chosen in itertools.combinations(values, k))
            for values in rewards_PN
        ]
        assert rate == pytest.approx(statistics.fmean(rates_P), rel=1e-12)
        assert error == pytest.approx(statistics.stdev(rates_P) / math.sqrt(3), rel=1e-12)
    by_hand = pass_at([[1, 0, 0, 0], [1, 1, 0, 0]])
    assert {k: rate for k, (rate, _) in by_hand.items()} == pytest.approx({1: 3 / 8, 2: 2 / 3, 4: 1})
    result = result_of("s", [[1.0, 0.0]], [False, True])
    assert result["pass_at"] == {"1": 0.5, "2": 1.0} and result["pass_at_standard_error"] == {"1": None, "2": None}


async def test_a_set_has_its_own_sampling_and_reward(path):
    """Of its options alone; what its metadata names takes the place of the rows'."""
    seen = []
    args = options(
        path, ["fine"] * 2, generate="scripted", seen=seen, n_samples_per_eval_prompt=1, eval_temperature=1.0
    )
    mine = types.SimpleNamespace(**{**vars(args), "n_samples_per_eval_prompt": 3, "eval_temperature": 0.25})
    one = EvaluationSet("mine", "", mine, {"rm_type": "random", "k": 1})
    async with RewardPool(1, 10) as rewards:
        found = await evaluate(one, Source(), Generator(args, client(), rewards), render, lambda count: None)
    assert found["trajectories"] == 6 and found["dataset"] == "mine" and "2" in found["pass_at"]
    assert found["settings"]["n_samples_per_eval_prompt"] == 3 and found["settings"]["temperature"] == 0.25
    assert one.metadata_of({"k": 2, "custom_rm_path": "x", "rm_type": "f1"}) == {"k": 1, "rm_type": "random"}
