"""One rollout of a stage with a scripted generate function and trainers that only look: executions from lease to
commit."""

import asyncio
import collections
import dataclasses
import json
import types

import pytest

from slime_cli.buffer.batch import rollout_folder, to_parquet
from slime_cli.buffer.buffer import DataBuffer
from slime_cli.buffer.journal import Journal
from slime_cli.buffer.types import Fate, PromptRow
from slime_cli.errors import DataError, EngineError
from slime_cli.loop import phase as stage_module
from slime_cli.loop import resuming
from slime_cli.loop.phase import Stage
from slime_cli.loop.saving import Saver
from slime_cli.options.resolve import resolve
from slime_cli.rewards.rewards import RewardPool
from slime_cli.rollout.boundary import Boundary
from slime_cli.rollout.generate import Generator
from slime_cli.tracing.spans import Tracer
from slime_cli.training.batching import packing

AGENT = """
import dataclasses
async def agent(args, sample, sampling_params):
    lengths = {0: [2, 3, 2], 1: [2], 2: [2, 9], 3: [2, 2], 4: [2]}[sample.index % 5]
    return [dataclasses.replace(sample, tokens=[1] + [5] * n, response_length=n, rollout_log_probs=[-1.0] * n, reward=float(n)) for n in lengths]
"""
CAP = 8


class Trainers:
    """Keeps the batch, and saves nothing."""

    def train(self, batch, fresh):
        self.batch = batch
        return {"grad_norm": 1.0}

    def call(self, name, *args):
        return "checkpoint"


class Rows(list):
    name = "rows"


@pytest.fixture
def stage(tmp_path):
    (tmp_path / "agent.py").write_text(AGENT)
    argv = (
        "--hf-checkpoint h --prompt-data p --num-rollout 1 --rollout-batch-size 1 --n-samples-per-prompt 5"
        f" --use-dynamic-batch-size --max-tokens-per-gpu {CAP} --oversize drop --custom-generate-function-path"
        f" {tmp_path / 'agent.py'}:agent"
    )
    loop = asyncio.new_event_loop()
    said = []
    conductor = types.SimpleNamespace(
        screen=types.SimpleNamespace(say=said.append),
        tracer=Tracer(str(tmp_path), "conductor", enabled=False),
        run_dir=tmp_path,
        wait=loop.run_until_complete,
    )
    options = resolve(argv.split())
    options = dataclasses.replace(options, slime=dataclasses.replace(options.slime, num_steps_per_rollout=2))
    out = Stage("train", options, tmp_path, conductor, Trainers(), None)
    out.step = 0
    out.seconds_before = 0.0
    out.said = said
    out.journal = Journal(tmp_path / "journal.sqlite")
    out.saver = Saver(out.s, tmp_path, tmp_path, out.journal, out.trainers, out.span)
    out.version = "v000000"
    open_buffer(out)
    out.boundary = Boundary(rows=320)
    out.generator = Generator(out.args, types.SimpleNamespace(retries=0), RewardPool(1, 10))
    out._publish = lambda: None
    yield out
    loop.run_until_complete(out.generator.rewards.close())
    loop.close()
    out.close()


def open_buffer(stage):
    def render(row):
        return types.SimpleNamespace(text=row.prompt, tokens=[1])

    rows = Rows([PromptRow("?", None, {}, "d.jsonl", 1)])
    stage.buffer = DataBuffer(stage.journal, rows, samples_per_prompt=5, shuffle=False, seed=0, render=render)


def test_what_a_step_commits_is_what_it_trained(stage, tmp_path):
    line = stage._rollout(0, last=True)
    batch = stage.trainers.batch
    assert batch.sample_index_N.tolist() == [
        0,
        0,
        0,
        1,
        3,
        3,
        4,
    ], "execution 2 has a sample above the cap: it went whole"
    by_step = [
        set(batch.sample_index_N[part].tolist()) for part in packing.split_steps(batch.sample_index_N.tolist(), 2)
    ]
    assert by_step == [{0, 1}, {3, 4}]
    records = {i: stage.journal.record(i) for i in range(5)}
    assert [{i for i, r in records.items() if r.step == step} for step in (1, 2)] == by_step
    assert (records[2].fate, records[2].reason) == (Fate.DROPPED, "oversize")
    ledger = stage.journal.ledger()
    assert ledger.balanced and (ledger.dispatched, ledger.trained, ledger.dropped) == (5, 4, {"oversize": 1})
    assert (line["samples"], line["executions"], line["dropped"]) == (7, 4, {"oversize": 1})
    assert line["reward_mean"] == pytest.approx(((2 + 3 + 2) / 3 + 2 + 2 + 2) / 4)
    manifest = json.loads((rollout_folder(tmp_path, 0) / "manifest.json").read_text())
    assert (manifest["samples"], manifest["executions"], manifest["fates"]) == (
        7,
        4,
        {"batched": 4, "dropped:oversize": 1},
    )


def test_a_batch_that_was_not_committed_is_trained_again_with_all_its_siblings(stage):
    samples, _ = stage._batch(0)
    open_buffer(stage)  # as the next attempt does
    again, dropped = stage._batch(0)
    assert again == samples and [(s.index, s.part) for s in again][:3] == [(0, 0), (0, 1), (0, 2)] and not dropped


def test_fewer_samples_than_steps_end_the_run_before_it_trains(stage):
    stage.s = dataclasses.replace(stage.s, num_steps_per_rollout=6)
    with pytest.raises(DataError, match="4 samples are left for --num-steps-per-rollout 6"):
        stage._rollout(0, last=True)
    assert not hasattr(stage.trainers, "batch")


def test_engines_that_compute_another_model_end_the_run_before_the_step_is_committed(stage, monkeypatch):
    found = {"grad_norm": 1.0, "train_rollout_logprob_abs_diff": 2.1}
    monkeypatch.setattr(stage.trainers, "train", lambda batch, fresh: found)
    stage.s = dataclasses.replace(stage.s, max_logprob_diff=0.5)
    with pytest.raises(
        EngineError, match="rollout 0: .* differ by 2.10 nats a token on average .--max-logprob-diff 0.5"
    ):
        stage._rollout(0, last=True)
    assert not stage.journal.commits() and stage.step == 0
    found["train_rollout_logprob_abs_diff"] = 0.4
    open_buffer(stage)  # as the next attempt does
    stage._rollout(0, last=True)
    assert stage.journal.commits()


@pytest.mark.parametrize(
    "found", [{}, {"train_rollout_logprob_abs_diff": 9.0}, {"train_rollout_logprob_abs_diff": float("nan")}]
)
def test_without_a_bound_or_a_figure_nothing_is_compared(stage, found):
    stage._check_engines(0, found)  # this stage has a generate function of its own
    stage.s = dataclasses.replace(stage.s, max_logprob_diff=float("inf") if found else 0.5)
    stage._check_engines(0, found)


@pytest.mark.parametrize("moment", ["_publish", "append_line"])
def test_a_rollout_that_is_committed_has_its_line_whenever_it_is_killed(stage, tmp_path, monkeypatch, moment):
    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(stage if moment == "_publish" else stage_module, moment, killed)
    with pytest.raises(KeyboardInterrupt):
        stage._rollout(0, last=True)
    assert [c.rollout_id for c in stage.journal.commits()] == [0, 0] and not (tmp_path / "metrics.jsonl").exists()
    resuming.write_metrics(tmp_path, {"train": stage.journal})
    (line,) = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert line == stage.journal.lines()[0] and line["samples"] == 7 and line["seconds"] > 0
    assert line["weight_version"] == "v000002", "the version that the engines get after this rollout"


def test_the_line_in_the_file_is_the_journal_s(stage, tmp_path):
    line = stage._rollout(0, last=True)
    assert (
        json.loads((tmp_path / "metrics.jsonl").read_text()) == json.loads(json.dumps(line)) == stage.journal.lines()[0]
    )


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda s: setattr(s, "tokens", [1, 320, 5]), "sample 0: token 320 is not among the 320 rows"),
        (lambda s: setattr(s, "loss_mask", [1]), "sample 0: loss_mask has 1 entries for 2 response tokens"),
        (lambda s: setattr(s, "rollout_log_probs", [float("nan")] * 2), "sample 0: rollout_log_probs holds nan"),
        (lambda s: setattr(s, "rollout_log_probs", None), "sample 0 has no rollout_log_probs while others have"),
        (lambda s: setattr(s, "reward", {"score": 1.0}), "sample 0: its reward"),
        (lambda s: setattr(s, "reward", float("nan")), "sample 0: its reward"),
        (lambda s: setattr(s, "index", 77), "sample 0 is not in it"),
        (None, "can't be trained"),
    ],
)
def test_a_batch_on_disk_that_can_not_be_trained_is_named_and_dropped_by_its_name(stage, tmp_path, spoil, said):
    """As one that an older slime wrote."""
    samples, _ = stage._batch(0)
    path = rollout_folder(tmp_path, 0) / "samples.parquet"
    if spoil:
        samples = [s for s in samples if s.index or not s.part]
        spoil(samples[0])
        path.write_bytes(to_parquet(samples))
    else:
        path.write_bytes(path.read_bytes()[:100])
    open_buffer(stage)
    with pytest.raises(DataError, match=said) as caught:
        stage._rollout(0, last=True)
    assert str(path) in caught.value.message and "--drop-rollouts 0" in caught.value.fix
    stage.s = dataclasses.replace(stage.s, drop_rollouts=[0, 8])
    open_buffer(stage)
    stage._drop_rollouts()
    assert stage.said[-2:] == [
        "train: --drop-rollouts 0: dropped, 4 executions",
        "train: --drop-rollouts 8: no such batch waits to be trained",
    ]
    line = stage._rollout(0, last=True)
    ledger = stage.journal.ledger()
    assert (
        ledger.balanced
        and ledger.dropped == {"oversize": 2, "drop_rollouts": 4}
        and ledger.trained == line["executions"] == 4
    )
    open_buffer(stage)
    stage._drop_rollouts()
    assert stage.journal.ledger() == ledger, "the same command again drops nothing more"


def test_a_batch_that_fails_again_in_the_trainer_names_the_way_out(stage):
    def fail(batch, fresh):
        raise EngineError("the trainer failed", "try again")

    stage.trainers.train = fail
    with pytest.raises(EngineError) as first:
        stage._rollout(0, last=True)
    open_buffer(stage)
    with pytest.raises(EngineError) as second:
        stage._rollout(0, last=True)
    assert (
        first.value.fix == "try again"
        and second.value.fix.startswith("try again; ")
        and "--drop-rollouts 0" in second.value.fix
    )


def test_samples_that_lack_what_others_have_are_dropped_and_counted(stage):
    def unlike(sample):
        return (
            {"rollout_log_probs": None}
            if sample.index == 1
            else {"rollout_top_p_token_ids": []}
            if sample.index == 3
            else {}
        )

    samples, _ = stage._batch(0)
    samples = [dataclasses.replace(s, **unlike(s)) for s in samples]
    dropped = collections.Counter()
    left = stage._fitting(samples, dropped)
    assert dropped == {"no_rollout_log_probs": 1, "no_rollout_top_p_token_ids": 2} and {s.index for s in left} == {3}


@pytest.mark.parametrize("nothing", [{"loss_mask": [0, 0]}, {"remove_sample": True}])
def test_no_step_is_taken_on_nothing(stage, nothing):
    samples, _ = stage._batch(0)
    samples = [dataclasses.replace(s, **nothing) for s in samples if s.response_length == 2]
    with pytest.raises(DataError, match="left no token to train on"):
        stage._fitting(samples, collections.Counter())
