"""The schedules beside one another, where generation and training take equally long and neither needs the other's
device: the loop's own code over scripted parts. Runs in this process, without Ray, Megatron or SGLang, and takes
seconds.
"""

import asyncio
import dataclasses
import pathlib
import statistics
from typing import Any

from rich.console import Console

from bench import scripted
from slime_cli.loop.phase import Phase
from slime_cli.loop.shared import Shared
from slime_cli.options.resolve import resolve
from slime_cli.profiling.step import Budget, step_budget
from slime_cli.rollout.client import RouterClient
from slime_cli.screen import Screen
from slime_cli.tracing import ledger
from slime_cli.tracing.reading import metrics_of, read_spans
from slime_cli.tracing.spans import Tracer
from tests.scripted_engine import LoadingEngine

ROLLOUTS = 10
GROUPS = 8
SAMPLES = 4
SCHEDULES = ("sync", "one-step-off", "async")


@dataclasses.dataclass(frozen=True)
class Measured:
    """A phase under one schedule."""

    seconds: float
    """A rollout's, in the middle: neither the first, which nothing runs beside, nor one that the machine held up."""
    budget: Budget


def ratios(model: str, folder: pathlib.Path) -> dict[str, Any]:
    """How many times as fast as the synchronous schedule the others are, and how idle both sides were."""
    found = {schedule: measured(schedule, model, folder / schedule) for schedule in SCHEDULES}
    return {
        schedule: {
            "ratio": found["sync"].seconds / one.seconds,
            "seconds": one.seconds,
            "trainer_idle": one.budget.trainer_idle_share,
            "rollout_idle": one.budget.rollout_idle_share,
        }
        for schedule, one in found.items()
    }


def measured(schedule: str, model: str, folder: pathlib.Path) -> Measured:
    folder.mkdir(parents=True)
    asyncio.run(_phase(schedule, model, folder))
    parts = ledger.ledgers(folder)
    dispatched = ledger.total(parts)
    if not ledger.balanced(parts) or dispatched.trained != ROLLOUTS * GROUPS * SAMPLES:
        raise RuntimeError(f"{schedule}: {ledger.sentence(dispatched, ledger.balanced(parts))}")
    (lines,) = metrics_of(folder).values()
    return Measured(
        seconds=statistics.median(line["seconds"] for line in lines[1:]),
        budget=step_budget(read_spans(folder)),
    )


async def _phase(schedule: str, model: str, folder: pathlib.Path) -> None:
    """A policy phase from start to end, on engines that only hold weights."""
    options = resolve(
        f"--hf-checkpoint {model} --prompt-data reasoning-gym:basic_arithmetic?size=1000 --rm-type reasoning-gym"
        f" --apply-chat-template --num-rollout {ROLLOUTS} --rollout-batch-size {GROUPS}"
        f" --n-samples-per-prompt {SAMPLES}"
        f" --custom-generate-function-path bench.scripted.slow --save-interval {ROLLOUTS} --schedule {schedule}"
        f" --run-dir {folder}".split()
    )
    engine = LoadingEngine(model)
    for path in ("/abort_request", "/pause_generation", "/continue_generation"):
        engine.answers[path] = {}
    tracer = Tracer(folder, "conductor")
    learner: Any = scripted.Learner(model)
    client = RouterClient(engine.url, 2 * GROUPS * SAMPLES)

    async def serving() -> RouterClient:
        return client

    with open(folder / "screen.log", "w") as log:
        shared = Shared(
            run_dir=folder,
            model=model,
            screen=Screen(Console(file=log)),
            tracer=tracer,
            learner=learner,
            rewards=scripted.Rewards(),
            serving=serving,
            engine_urls=lambda: [engine.url],
            rollouts={},
        )
        phase = Phase("train", options, folder, shared, None)
        try:
            with tracer.about(phase="train"):
                await phase.run()
        finally:
            await phase.close()
            await client.close()
            tracer.close()
            engine.shutdown()
