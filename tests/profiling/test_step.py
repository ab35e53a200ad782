"""The step budget: each moment counted once, shares exact, whatever overlaps or is missing; who was idle."""

import itertools
import json
import random

import pytest
from typer.testing import CliRunner

from slime_cli.commands.profile import app
from slime_cli.errors import DataError
from slime_cli.profiling.step import OTHER, UNACCOUNTED, exact_shares, step_budget
from slime_cli.tracing.spans import Tracer, TraceSpan

IDS = itertools.count(1)


def span(name, ts, dur, parent=None, process="conductor", **about):
    return TraceSpan(
        name=name, ts=ts, dur=dur, process=process, id=next(IDS), parent=parent and parent.id, phase="rl", **about
    )


def rank0(name, ts, dur, parent=None):
    return span(name, ts, dur, parent, "trainer-0")


def by_name(parts):
    return {part.name: part for part in parts}


def seconds(parts):
    return {part.name: pytest.approx(part.seconds) for part in parts}


def test_parts_and_remainders():
    step = span("step", 0, 10, rollout=0)
    wait = span("wait_for_batch", 0, 4, step)
    train = span("train", 4, 5, step)
    its_train = rank0("train", 4, 5)
    log_probs = rank0("log_probs", 4.5, 1, its_train)
    budget = step_budget(
        [
            step,
            wait,
            train,
            span("write_batch", 1, 1, wait),
            its_train,
            log_probs,
            rank0("attention", 4.6, 0.5, log_probs),
            rank0("forward_backward", 5.5, 3, its_train),
            rank0("save_checkpoint", 4, 5),
            span("log_probs", 5, 9, process="trainer-1"),
            span("eval", 4, 6),
        ]
    )
    assert seconds(budget.parts) == {"train": 5, "wait_for_batch": 4, UNACCOUNTED: 1}
    assert [part.share for part in budget.parts] == [50.0, 40.0, 10.0]
    assert seconds(budget.train) == {"train: forward_backward": 3, "train: log_probs": 1, OTHER: 1}
    assert sum(part.permille for part in budget.train) == by_name(budget.parts)["train"].permille
    assert budget.parts[-1].name == UNACCOUNTED and budget.train[-1].name == OTHER
    assert (budget.trainer_idle, budget.trainer_idle_share, budget.rollout_idle) == (4, 0.4, None)


def asynchronous():
    """Two steps of 10 s that wait for 1 s and for 3 s, and interrupt the engines in their last two, of which the first
    second is for the weights. Groups are in flight from -2 to 6, from 8 to 13 (begun within the first step, and by a
    task that it started) and from 14 to 25."""
    steps = [span("step", 10.0 * i, 10, rollout=i) for i in (0, 1)]
    for step, waited in zip(steps, (1, 3), strict=True):
        yield step
        yield span("wait_for_batch", step.ts, waited, step)
        yield span("train", step.ts + waited, 10 - waited - 2, step)
        pause = span("pause", step.ts + 8, 2, step)
        yield pause
        yield span("sync", step.ts + 8, 0.75, pause)
        yield span("verify", step.ts + 8.75, 0.25, pause)
    for group in range(8):
        yield span("generate", -2 + group / 8, 7, group=group)
        yield span("reward", 5 + group / 8, 1 if group == 0 else 0.125, group=group)
    yield span("generate", 8, 5, steps[0], group=8)
    yield span("generate", 14, 11, group=9)


def test_generation_beside_training_costs_a_step_only_the_wait():
    budget = step_budget(asynchronous())
    expected = {"train": 12, "wait_for_batch": 4, "pause": 2, "sync": 1.5, "verify": 0.5, UNACCOUNTED: 0}
    assert seconds(budget.parts) == expected
    assert budget.trainer_idle == 4 and budget.trainer_idle_share == 0.2
    assert budget.rollout_idle == pytest.approx(2 + 1 + 2), "nothing in flight 6 to 8 and 13 to 14; weights twice"
    assert budget.rollout_idle_share == pytest.approx(0.25)


def test_the_idle_times_of_one_rollout():
    budget = step_budget(asynchronous(), rollout_id=1)
    assert (budget.rollouts, budget.trainer_idle, budget.rollout_idle) == (1, 3, pytest.approx(1 + 1))


def test_when_both_sides_take_turns_one_is_idle_while_the_other_works():
    step = span("step", 0, 10)
    works = [span("generate", g / 10, 3, group=g) for g in range(11)]
    budget = step_budget([step, span("wait_for_batch", 0, 4, step), span("train", 4, 6, step), *works])
    assert (budget.trainer_idle_share, budget.rollout_idle_share) == (0.4, pytest.approx(0.6))


def test_a_supervised_phase_has_no_rollout_side_that_could_be_idle():
    warm_up = TraceSpan(name="step", ts=0, dur=5, process="conductor", id=next(IDS), phase="sft")
    assert step_budget([warm_up]).rollout_idle is None
    step = span("step", 10, 10)
    budget = step_budget([warm_up, step, span("wait_for_batch", 10, 5, step), span("generate", 10, 5)])
    assert (budget.seconds, budget.trainer_idle, budget.rollout_idle) == (15, 5, 5), "the warm-up's seconds don't count"


def test_an_older_run_generated_in_its_steps(tmp_path):
    (tmp_path / "trace").mkdir()
    lines = [
        {"name": "generate", "ts": 100.0, "dur": 4.0, "depth": 1, "args": {}},
        {"name": "inner", "ts": 105.0, "dur": 1.0, "depth": 2, "args": {}},
        {"name": "train", "ts": 104.0, "dur": 5.0, "depth": 1, "args": {}},
        {"name": "step", "ts": 100.0, "dur": 10.0, "depth": 0, "args": {"stage": "rl", "rollout_id": 7}},
        {"name": "eval", "ts": 110.0, "dur": 1.0, "depth": 0, "args": {"step": 3}},
    ]
    text = "".join(json.dumps(line | {"process": "conductor"}) + "\n" for line in lines)
    (tmp_path / "trace" / "conductor.jsonl").write_text(text)
    found = CliRunner().invoke(app, ["step", str(tmp_path), "--phase", "rl", "--rollout-id", "7", "--json"])
    budget = json.loads(found.output)
    assert {p["name"]: p["seconds"] for p in budget["parts"]} == {"train": 5, "generate": 4, UNACCOUNTED: 1}
    assert (budget["rollouts"], budget["trainer_idle"], budget["rollout_idle"]) == (1, 4, 6)


@pytest.mark.parametrize("seed", range(20))
def test_shares_sum_to_exactly_100_percent(seed):
    rng = random.Random(seed)
    spans = []
    for number in range(rng.randint(1, 5)):
        step = span("step", 10 * number, rng.uniform(1, 9))
        train = rank0("train", 10 * number, 9)
        spans += [step, train]
        for _ in range(rng.randint(0, 12)):
            name = rng.choice(["generate", "wait_for_batch", "train", "save", "publish", "sync"])
            spans.append(span(name, 10 * number + rng.uniform(-1, 9), rng.uniform(0, 4), rng.choice([step, None])))
            spans.append(rank0(rng.choice("ab"), 10 * number + rng.uniform(0, 9), rng.uniform(0, 3), train))
    budget = step_budget(spans)
    assert sum(part.permille for part in budget.parts) == 1000
    assert sum(part.seconds for part in budget.parts) == pytest.approx(budget.seconds)
    assert all(part.seconds >= 0 for part in (*budget.parts, *budget.train))
    assert 0 <= budget.trainer_idle <= budget.seconds and 0 <= (budget.rollout_idle or 0) <= budget.seconds
    if budget.train:
        train = by_name(budget.parts)["train"]
        assert sum(part.permille for part in budget.train) == train.permille
        assert sum(part.seconds for part in budget.train) == pytest.approx(train.seconds)


def test_phases_and_rollouts_are_chosen():
    def step(ts, dur, phase, rollout):
        return TraceSpan(name="step", ts=ts, dur=dur, process="conductor", id=next(IDS), phase=phase, rollout=rollout)

    spans = [step(0, 1, "sft", 0), step(2, 3, "rl", 0), step(6, 4, "rl", 1)]
    assert step_budget(spans).seconds == 8 and step_budget(spans, "rl").seconds == 7
    assert step_budget(spans, "rl", 1).seconds == 4 and step_budget(spans, "none").rollouts == 0


def test_exact_shares():
    assert exact_shares([1, 1, 1], 1000) == [334, 333, 333]
    assert exact_shares([0, 0], 1000) == [0, 0] and exact_shares([], 1000) == []


def test_the_command_prints_the_table_and_refuses_a_run_without_steps(tmp_path):
    tracer = Tracer(tmp_path, "conductor")
    with tracer.about(phase="rl"), tracer.span("step", rollout=0), tracer.span("wait_for_batch"):
        with tracer.span("generate"):
            pass
    tracer.close()
    table = CliRunner().invoke(app, ["step", str(tmp_path)]).output
    for said in ("wait_for_batch", UNACCOUNTED, "1 rollout, ", "trainer idle", "rollout idle"):
        assert said in table
    assert json.loads(CliRunner().invoke(app, ["step", str(tmp_path), "--json"]).output)["rollouts"] == 1
    assert isinstance(CliRunner().invoke(app, ["step", str(tmp_path), "--phase", "x"]).exception, DataError)
