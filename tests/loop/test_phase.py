"""A phase's verbs with a scripted generate function, a learner that only looks and engines that hold what they are
told:
trajectories from lease to commit."""

import contextlib
import dataclasses
import json
import types

import pytest

from slime_cli.buffer.batch_files import to_parquet
from slime_cli.buffer.buffer import DataBuffer
from slime_cli.buffer.gate import Gate
from slime_cli.buffer.journal import Journal
from slime_cli.buffer.types import Fate, PromptRow
from slime_cli.cluster.learner import Trained
from slime_cli.errors import DataError, EngineError
from slime_cli.loop import checks, opening, resuming
from slime_cli.loop import phase as phase_module
from slime_cli.loop.phase import Phase
from slime_cli.loop.publishing import Timetable
from slime_cli.loop.saving import Saver
from slime_cli.loop.trackers import NONE
from slime_cli.loop.turns import Turns
from slime_cli.manifests import layout
from slime_cli.options.resolve import resolve
from slime_cli.rewards.rewards import RewardPool
from slime_cli.rollout.boundary import Boundary
from slime_cli.rollout.client import RouterClient
from slime_cli.rollout.collector import Collector
from slime_cli.rollout.generate import Generator
from slime_cli.rollout.watch import Watch
from slime_cli.tracing.spans import Tracer
from slime_cli.training.batching import packing

AGENT = """
import dataclasses
from slime_cli.buffer.types import Span
async def agent(args, sample, sampling_params):
    lengths = {0: [2, 3, 2], 1: [2], 2: [2, 9], 3: [2, 2], 4: [2]}[sample.index % 5]
    made = dict(rollout_log_probs=None, reward=0.0)
    def one(n):
        told = dict(rollout_log_probs=[-1.0] * n, reward=float(n), spans=[Span(n, "v000000")])
        return dataclasses.replace(sample, tokens=[1] + [5] * n, response_length=n, **told)
    return [one(n) for n in lengths]
"""
CAP = 8


class Learner:
    """Keeps the batch, and saves nothing."""

    def __init__(self):
        self.step = 0
        self.metrics = {"grad_norm": 1.0}
        self.steps = 2
        self.batch = None

    def train(self, batch):
        self.batch = batch
        self.step += self.steps
        return Trained(self.step, dict(self.metrics))

    def save(self, root):
        return "checkpoint"

    def saved(self, wait):
        return True

    def remove(self, paths):
        pass


class Publisher:
    """Engines take every version."""

    timetable = types.SimpleNamespace(evaluated=lambda rollout_id: False)
    held = "v000000"
    held_step = 0
    asked_for = None

    def due(self, rollout_id):
        return True

    def write(self, step):
        return step

    def send(self, version, *, flush):
        self.held_step = version
        self.held = f"v{version:06d}"


class Rows(list):
    name = "rows"


def render(row):
    return types.SimpleNamespace(text=row.prompt, tokens=[1])


@contextlib.asynccontextmanager
async def opened(folder, monkeypatch, **changes):
    """A phase as the next attempt finds it."""
    (folder / "agent.py").write_text(AGENT)
    argv = (
        "--hf-checkpoint h --prompt-data p --num-rollout 9 --rollout-batch-size 1 --n-samples-per-prompt 5"
        f" --use-dynamic-batch-size --max-tokens-per-gpu {CAP} --oversize drop --custom-generate-function-path"
        f" {folder / 'agent.py'}:agent"
    )
    options = resolve(argv.split())
    options = dataclasses.replace(
        options, slime=dataclasses.replace(options.slime, **({"num_steps_per_rollout": 2, "num_rollout": 1} | changes))
    )
    said = []
    learner = Learner()
    tracer = Tracer(str(folder), "conductor", enabled=False)
    shared = types.SimpleNamespace(
        screen=types.SimpleNamespace(say=said.append),
        tracer=tracer,
        trackers=NONE,
        turns=Turns(None, None),
        run_dir=folder,
        learner=learner,
        rollouts={},
        engine_urls=list,
        watch=Watch(),
    )

    def open_phase(name, options, folder, shared, args):
        s = options.slime
        journal = Journal(folder / "journal.sqlite")
        rows = Rows([PromptRow("?", None, {}, "d.jsonl", 1)])
        dealing = dict(samples_per_prompt=5, shuffle=False, seed=0, render=render, gate=Gate(1, None))
        limits = dict(rows=320, steps_per_rollout=s.num_steps_per_rollout, unfit=opening.oversize(options))
        buffer = DataBuffer(journal, rows, folder=folder, **dealing, **limits)
        saver = Saver(s, folder, folder, buffer, learner, tracer.span)
        opening.drop_rollouts(name, s, buffer, said.append)
        return opening.Opened(None, Boundary(rows=320), buffer, None, saver)

    monkeypatch.setattr(opening, "open_phase", open_phase)
    async with RewardPool(1, 10) as rewards:
        phase = Phase("train", options, folder, shared, None)
        phase.said = said
        phase.client = RouterClient("http://127.0.0.1:9", 8)
        phase.publisher = Publisher()
        phase.generator = Generator(phase.args, phase.client, rewards)
        sizes = dict(batch=1, burst=1, slots=9, keep_partial=False)
        phase.collector = Collector(phase.generator, phase.buffer, phase.client, **sizes)
        committed = phase.buffer.recovery.committed
        phase.step = learner.step = committed.step if committed else 0
        try:
            yield phase
        finally:
            await phase.close()


async def rollout(phase, rollout_id=0):
    batch = await phase.take(rollout_id)
    await phase.train(batch)
    await phase.publish(rollout_id)
    return phase.line


@pytest.fixture
def opening_of(tmp_path, monkeypatch):
    return lambda **changes: opened(tmp_path, monkeypatch, **changes)


async def test_what_a_step_commits_is_what_it_trained(opening_of, tmp_path):
    async with opening_of() as phase:
        line = await rollout(phase)
        batch = phase.learner.batch
        indices = batch.sample_index_N.tolist()
        assert indices == [0, 0, 0, 1, 3, 3, 4], "trajectory 2 has a sample above the cap: it went whole"
        by_step = [set(batch.sample_index_N[part].tolist()) for part in packing.split_steps(indices, 2)]
        assert by_step == [{0, 1}, {3, 4}]
        assert batch.versions_R.tolist() == [0] * len(batch.loss_mask_R)
    with Journal.open_readonly(tmp_path / "journal.sqlite") as journal:
        records = {i: journal.record(i) for i in range(5)}
        ledger = journal.ledger()
    assert [{i for i, r in records.items() if r.step == step} for step in (1, 2)] == by_step
    assert (records[2].fate, records[2].reason) == (Fate.DROPPED, "oversize")
    assert ledger.balanced and (ledger.dispatched, ledger.trained, ledger.dropped) == (5, 4, {"oversize": 1})
    assert (line["samples"], line["trajectories"], line["dropped"]) == (7, 4, {"oversize": 1})
    assert (line["step"], line["staleness_max"]) == (2, 0)
    assert line["reward_mean"] == pytest.approx(((2 + 3 + 2) / 3 + 2 + 2 + 2) / 4)
    manifest = json.loads((layout.rollout(tmp_path, 0) / "manifest.json").read_text())
    found = (manifest["samples"], manifest["trajectories"], manifest["fates"])
    assert found == (7, 4, {"batched": 4, "dropped:oversize": 1})


async def test_a_batch_that_was_not_committed_is_trained_again_and_is_the_same_value(opening_of):
    async with opening_of() as phase:
        first = await phase.take(0)
    async with opening_of() as phase:  # as the next attempt does
        again = await phase.take(0)
    assert again.replayed and not first.replayed
    assert (again.samples, again.dropped, again.groups) == (first.samples, first.dropped, first.groups)
    assert [(s.index, s.part) for s in again.samples][:3] == [(0, 0), (0, 1), (0, 2)]
    assert again.dropped == {"oversize": 1}


async def test_fewer_trajectories_than_steps_end_the_run_before_it_trains(opening_of):
    async with opening_of(num_steps_per_rollout=6) as phase:
        with pytest.raises(DataError, match="4 trajectories are left for --num-steps-per-rollout 6"):
            await rollout(phase)
        assert phase.learner.batch is None


async def test_engines_that_compute_another_model_end_the_run_before_the_step_is_committed(opening_of):
    async with opening_of(max_logprob_diff=0.5) as phase:
        phase.learner.metrics["train_rollout_logprob_abs_diff"] = 2.1
        with pytest.raises(
            EngineError, match="rollout 0: .* differ by 2.10 nats a token on average .--max-logprob-diff 0.5"
        ):
            await rollout(phase)
        assert not phase.buffer.commits()
    async with opening_of(max_logprob_diff=0.5) as phase:
        phase.learner.metrics["train_rollout_logprob_abs_diff"] = 0.4
        await rollout(phase)
        assert phase.buffer.commits()


def test_log_probabilities_that_are_no_numbers_are_no_agreement():
    with pytest.raises(EngineError, match="differ by nan nats"):
        checks.engines(0, {"train_rollout_logprob_abs_diff": float("nan")}, 0.5)


@pytest.mark.parametrize(
    "found", [{}, {"train_rollout_logprob_abs_diff": 9.0}, {"train_rollout_logprob_abs_diff": float("nan")}]
)
async def test_without_a_bound_or_a_figure_nothing_is_compared(opening_of, found):
    async with opening_of() as phase:
        assert phase.s.max_logprob_diff is None, "this phase has a generate function of its own"
    checks.engines(0, found, None)
    checks.engines(0, found, float("inf") if found else 0.5)


@pytest.mark.parametrize("moment", ["publish", "append_line"])
async def test_a_rollout_that_is_committed_has_its_line_whenever_it_is_killed(
    opening_of, tmp_path, monkeypatch, moment
):
    class Killed(Exception):
        pass

    def killed(*_):
        raise Killed

    async with opening_of() as phase:
        if moment == "publish":
            phase.publisher.write = killed
        else:
            monkeypatch.setattr(phase_module, "append_line", killed)
        with pytest.raises(Killed):
            await rollout(phase)
        assert [c.rollout_id for c in phase.buffer.commits()] == [0, 0]
    assert not (tmp_path / "metrics.jsonl").exists()
    with Journal(tmp_path / "journal.sqlite") as journal:
        resuming.write_metrics(tmp_path, {"train": journal})
        (line,) = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        assert line == journal.lines()[0] and line["samples"] == 7
    assert line["weight_version"] == "v000002", "the version that the engines get after this rollout"


async def test_the_line_in_the_file_is_the_journal_s(opening_of, tmp_path):
    async with opening_of() as phase:
        line = await rollout(phase)
    with Journal.open_readonly(tmp_path / "journal.sqlite") as journal:
        kept = journal.lines()[0]
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == json.loads(json.dumps(line)) == kept
    assert line["seconds"] > 0 and line["rollout_idle"] >= 0 and line["trainer_idle"] > 0


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
async def test_a_batch_on_disk_that_can_not_be_trained_is_named_and_dropped_by_its_name(
    opening_of, tmp_path, spoil, said
):
    """As one that an older slime wrote."""
    async with opening_of() as phase:
        samples = (await phase.take(0)).samples
    path = layout.rollout(tmp_path, 0) / "samples.parquet"
    if spoil:
        samples = [s for s in samples if s.index or not s.part]
        spoil(samples[0])
        path.write_bytes(to_parquet(samples))
    else:
        path.write_bytes(path.read_bytes()[:100])
    async with opening_of() as phase:
        with pytest.raises(DataError, match=said) as caught:
            await rollout(phase)
        assert str(path) in caught.value.message and "--drop-rollouts 0" in caught.value.fix
    async with opening_of(drop_rollouts=[0, 8]) as phase:
        assert phase.said[-2:] == [
            "train: --drop-rollouts 0: dropped, 4 trajectories",
            "train: --drop-rollouts 8: no such batch waits to be trained",
        ]
        line = await rollout(phase)
        ledger = phase.buffer.ledger()
        assert ledger.balanced and ledger.dropped == {"oversize": 2, "drop_rollouts": 4}
        assert ledger.trained == line["trajectories"] == 4
    async with opening_of(drop_rollouts=[0, 8]) as phase:
        assert phase.buffer.ledger() == ledger, "the same command again drops nothing more"


async def test_a_batch_that_fails_again_in_the_trainer_names_the_way_out(opening_of):
    def fail(batch):
        raise EngineError("the trainer failed", "try again")

    fixes = []
    for _ in range(2):
        async with opening_of() as phase:
            phase.learner.train = fail
            with pytest.raises(EngineError) as caught:
                await rollout(phase)
            fixes.append(caught.value.fix)
    assert fixes[0] == "try again" and fixes[1].startswith("try again; ") and "--drop-rollouts 0" in fixes[1]


async def test_trajectories_that_lack_what_others_have_are_dropped_and_counted(opening_of):
    def unlike(sample):
        if sample.index == 1:
            return {"rollout_log_probs": None}
        return {"rollout_top_p_token_ids": [], "rollout_top_p_token_offsets": [0, 0, 0]} if sample.index == 3 else {}

    async with opening_of() as phase:
        phase.buffer.maker.shape = lambda groups, rejected: [
            dataclasses.replace(s, **unlike(s)) for group in groups for s in group
        ]
        batch = await phase.take(0)
        assert batch.dropped == {"no_rollout_log_probs": 1, "no_rollout_top_p_token_ids": 3}
        assert {s.index for s in batch.samples} == {3} and phase.buffer.ledger().balanced


@pytest.mark.parametrize("nothing", [{"loss_mask": [0, 0]}, {"remove_sample": True}])
async def test_no_step_is_taken_on_nothing(opening_of, nothing):
    async with opening_of() as phase:
        phase.buffer.maker.shape = lambda groups, rejected: [
            dataclasses.replace(s, **nothing) for group in groups for s in group if s.response_length == 2
        ]
        with pytest.raises(DataError, match="left no token to train on"):
            await phase.take(0)


async def test_an_evaluation_that_a_kill_left_out_is_made_before_training_goes_on(opening_of):
    async with opening_of() as phase:
        phase.publisher.timetable = Timetable(total=9, evaluation_interval=2)
        found = []
        for phase.first in range(5):
            found.append(phase._evaluation_is_missing())
        assert found == [True, False, True, False, True], "after rollouts 1 and 3, whose commits are the last"
