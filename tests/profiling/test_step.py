"""The step budget: each moment counted once, shares exact, whatever overlaps or is missing."""

import json
import random

import pytest
from typer.testing import CliRunner

from slime_cli.commands.profile import app
from slime_cli.errors import DataError
from slime_cli.profiling.step import OTHER, UNACCOUNTED, exact_shares, step_budget
from slime_cli.tracing.spans import Tracer


def span(name, ts, dur, process="conductor", depth=1, **args):
    return {"name": name, "ts": ts, "dur": dur, "process": process, "depth": depth, "args": args}


def by_name(phases):
    return {phase.name: phase for phase in phases}


def test_phases_and_remainders():
    budget = step_budget(
        [
            span("step", 0, 10, depth=0, rollout_id=0),
            span("generate", 0, 4),
            span("train", 4, 5),
            span("inner", 1, 1, depth=2),
            span("train", 4, 5, "trainer-0", 0),
            span("log_probs", 4.5, 1, "trainer-0", 1),
            span("attention", 4.6, 0.5, "trainer-0", 2),
            span("forward_backward", 5.5, 3, "trainer-0", 1),
            span("log_probs", 5, 9, "trainer-1", 0),
            span("elsewhere", 20, 1),
        ]
    )
    phases = by_name(budget.phases)
    train = by_name(budget.train)
    assert {name: phase.seconds for name, phase in phases.items()} == {"train": 5, "generate": 4, UNACCOUNTED: 1}
    assert [phase.share for phase in budget.phases] == [50.0, 40.0, 10.0]
    parts = {name: phase.seconds for name, phase in train.items()}
    assert parts == {"train: forward_backward": 3, "train: log_probs": 1, OTHER: 1}
    assert sum(phase.permille for phase in budget.train) == phases["train"].permille
    assert budget.phases[-1].name == UNACCOUNTED and budget.train[-1].name == OTHER


def test_generation_in_the_background_costs_only_the_wait():
    budget = step_budget(
        [
            span("generate", -3, 3.5),
            span("step", 0, 10, depth=0),
            span("generate", 0.5, 8),
            span("train", 1, 5),
        ]
    )
    assert {p.name: p.seconds for p in budget.phases} == {"train": 5, "generate": 3.5, UNACCOUNTED: 1.5}
    assert by_name(budget.phases)["generate"].calls == 1


@pytest.mark.parametrize("seed", range(20))
def test_shares_sum_to_exactly_100_percent(seed):
    rng = random.Random(seed)
    spans = []
    for step in range(rng.randint(1, 5)):
        spans.append(span("step", 10 * step, rng.uniform(1, 9), depth=0))
        for _ in range(rng.randint(0, 12)):
            name = rng.choice(["generate", "train", "save", "publish", "sync"])
            spans.append(span(name, 10 * step + rng.uniform(-1, 9), rng.uniform(0, 4)))
            spans.append(span(rng.choice("ab"), 10 * step + rng.uniform(0, 9), rng.uniform(0, 3), "trainer-0", 0))
    budget = step_budget(spans)
    assert sum(phase.permille for phase in budget.phases) == 1000
    assert sum(phase.seconds for phase in budget.phases) == pytest.approx(budget.seconds)
    assert all(phase.seconds >= 0 for phase in (*budget.phases, *budget.train))
    if budget.train:
        train = by_name(budget.phases)["train"]
        assert sum(phase.permille for phase in budget.train) == train.permille
        assert sum(phase.seconds for phase in budget.train) == pytest.approx(train.seconds)


def test_stages_and_rollouts_are_chosen():
    spans = [
        span("step", 0, 1, depth=0, stage="sft", rollout_id=0),
        span("step", 2, 3, depth=0, stage="rl", rollout_id=0),
        span("step", 6, 4, depth=0, stage="rl", rollout_id=1),
    ]
    assert step_budget(spans).seconds == 8 and step_budget(spans, "rl").seconds == 7
    assert step_budget(spans, "rl", 1).seconds == 4 and step_budget(spans, "none").steps == 0


def test_exact_shares():
    assert exact_shares([1, 1, 1], 1000) == [334, 333, 333]
    assert exact_shares([0, 0], 1000) == [0, 0] and exact_shares([], 1000) == []


def test_the_command_prints_the_table_and_refuses_a_run_without_steps(tmp_path):
    tracer = Tracer(tmp_path, "conductor")
    with tracer.span("step", rollout_id=0, stage="rl"), tracer.span("generate"):
        pass
    tracer.close()
    table = CliRunner().invoke(app, ["step", str(tmp_path)]).output
    assert "generate" in table and UNACCOUNTED in table
    assert json.loads(CliRunner().invoke(app, ["step", str(tmp_path), "--json"]).output)["steps"] == 1
    assert isinstance(CliRunner().invoke(app, ["step", str(tmp_path), "--stage", "x"]).exception, DataError)
