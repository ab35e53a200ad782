"""Contracts of slime_cli.loop.evaluating: 1. a step is evaluated once, over all attempts; 2. what it found is said as
it is
written;
3. a row that cannot be used ends the run, or is left out and said."""

import asyncio
import dataclasses
import io
import json
import types

import pytest
from rich.console import Console

from slime_cli.buffer.types import PromptRow, RowError
from slime_cli.errors import DataError
from slime_cli.loop import evaluating
from slime_cli.loop.evaluating import Beside, Evaluations
from slime_cli.loop.trackers import NONE
from slime_cli.options.groups import SlimeOptions
from slime_cli.rollout.failures import Failures
from slime_cli.screen import Screen
from slime_cli.tracing.spans import Tracer

RESULT = {"reward_mean": 0.5, "prompts": 2, "trajectories": 4, "left_out": 1, "failures": {"reward_error": 1}}
PASS_AT = {"1": 0.25, "2": 0.5}


@pytest.fixture
def evaluations(tmp_path, monkeypatch):
    """One set of two rows, the second of which does not render. The answers are scripted."""
    (tmp_path / "rows.jsonl").write_text('{"input": "1"}\n{"input": "2"}\n')

    async def evaluate(one, source, generator, render, progress, judged):
        rendered = [render(row) for row in source]
        return RESULT | {"pass_at": PASS_AT, "dataset": one.name, "rendered": rendered}

    monkeypatch.setattr(evaluating, "evaluate", evaluate)
    s = SlimeOptions(
        eval_prompt_data=["held[b]out", str(tmp_path / "rows.jsonl")], eval_input_key="input", on_bad_row="skip"
    )
    out = io.StringIO()
    shared = types.SimpleNamespace(
        screen=Screen(Console(file=out, width=500)),
        tracer=Tracer(str(tmp_path), "conductor", enabled=False),
        trackers=NONE,
    )
    made = Evaluations("grpo", s, tmp_path / "grpo", shared)
    made.said = out
    return made


GENERATOR = types.SimpleNamespace(failures=Failures())


def render(row: PromptRow) -> str:
    if row.prompt == "2":
        raise RowError(row, "template", "no [role]", "fix the row")
    return row.prompt


def of_set(one):
    return GENERATOR, render


async def test_a_step_is_evaluated_once_and_its_file_names_the_weights(evaluations):
    await evaluations.run(3, "v000003", GENERATOR, of_set)
    first = evaluations.found()
    assert [(e["step"], e["weight_version"], len(e["results"])) for e in first] == [(3, "v000003", 1)]
    await evaluations.run(3, "v000003", GENERATOR, lambda one: pytest.fail("evaluated twice"))
    await evaluations.run(10, "v000010", GENERATOR, of_set)
    assert [e["step"] for e in evaluations.found()] == [3, 10]
    assert json.loads((evaluations.folder / "eval" / "000003.json").read_text()) == first[0]


async def test_what_it_found_is_said_as_it_is_written(evaluations):
    await evaluations.run(3, "v000003", GENERATOR, of_set)
    told = evaluations.said.getvalue()
    assert "rows.jsonl:2: no [role]" in told
    assert "grpo: held[b]out at step 3: reward 0.500 over 2 prompts, pass@1 0.250, pass@2 0.500; 1 rows" in told
    assert "1 rows are left out; 1 of 4 answers failed" in told
    assert "\\" not in told


async def test_a_row_that_cannot_be_used_ends_the_run_unless_told_otherwise(evaluations):
    evaluations.s = dataclasses.replace(evaluations.s, on_bad_row="fail")
    with pytest.raises(DataError, match="no .role."):
        await evaluations.run(3, "v000003", GENERATOR, of_set)
    assert not evaluations.found()


async def test_without_a_set_there_is_nothing_to_evaluate(evaluations):
    evaluations.s = dataclasses.replace(evaluations.s, eval_prompt_data=None)
    await evaluations.run(3, "v000003", GENERATOR, of_set)
    assert not evaluations.found()


async def test_how_far_training_went_meanwhile_is_its_lag(evaluations):
    await evaluations.run(3, "v000003", GENERATOR, of_set, trained=lambda: 7)
    assert evaluations.found()[0]["lag"] == 4
    assert "held[b]out at step 3, 4 steps behind training: reward" in evaluations.said.getvalue()


async def test_an_evaluation_that_fails_beside_training_ends_what_waits_at_once():
    async def fails():
        await asyncio.sleep(0)
        raise DataError("none answered", "look")

    async def batch():
        await asyncio.sleep(0.01)
        return "batch"

    beside = Beside()
    never = asyncio.create_task(asyncio.Event().wait())
    beside.begin(fails())
    with pytest.raises(DataError, match="none answered"):
        await beside.unless_it_fails(never)
    assert not never.done() and not beside.tasks
    never.cancel()
    beside.begin(asyncio.sleep(0))
    assert await beside.unless_it_fails(asyncio.create_task(batch())) == "batch"
    assert await beside.unless_it_fails(asyncio.create_task(batch())) == "batch", "without one"
    await beside.ended()
