"""The evaluations of a phase: each is done once and lies in ``PHASE/eval/STEP.json``.
:class:`slime_cli.loop.phase.Phase`
owns them.

An attempt that finds the file of a step does not evaluate that step again.
"""

import asyncio
import collections
import json
import pathlib
import types
from collections.abc import Callable, Coroutine
from typing import Any

from slime_cli import manifests
from slime_cli.buffer.sources.open import evaluations_of
from slime_cli.buffer.types import PromptRow, RowError, Sample
from slime_cli.loop.users import Users
from slime_cli.manifests import layout
from slime_cli.options.evaluations import EvaluationSet, evaluation_sets
from slime_cli.options.groups import SlimeOptions
from slime_cli.rollout.chat import Rendered
from slime_cli.rollout.evaluate import evaluate
from slime_cli.rollout.generate import Generator

Render = Callable[[PromptRow], Rendered | None]
Answering = tuple[Generator, Render]
"""Answers the prompts of a set, and makes them of its rows."""


class Beside:
    """The evaluation beside training, while one is under way: it is of one version, so there is one at a time."""

    def __init__(self) -> None:
        self.tasks: list[asyncio.Task[None]] = []

    def begin(self, evaluation: Coroutine[Any, Any, None]) -> None:
        self.tasks = [asyncio.create_task(evaluation)]

    async def ended(self) -> None:
        """Waits for it; raises what it raised."""
        tasks, self.tasks = self.tasks, []
        for task in tasks:
            await task

    async def unless_it_fails[T](self, waiting: asyncio.Task[T]) -> T:
        """The result of ``waiting``. Raises as soon as the evaluation does."""
        if self.tasks:
            await asyncio.wait((waiting, *self.tasks), return_when=asyncio.FIRST_COMPLETED)
            if self.tasks and self.tasks[0].done():
                await self.ended()
        return await waiting


class Evaluations:
    """``shared`` has the tracer and the screen; ``s``: slime's options by dest."""

    def __init__(self, name: str, s: SlimeOptions, folder: pathlib.Path, shared: Any) -> None:
        self.name = name
        self.s = s
        self.folder = folder
        self.shared = shared

    async def run(
        self,
        step: int,
        version: str | None,
        generator: Generator,
        of_set: Callable[[EvaluationSet], Answering],
        *,
        rollout_id: int = 0,
        users: Users | None = None,
        trained: Callable[[], int] | None = None,
    ) -> None:
        """All evaluation sets, answered by the weights of ``step``; or those of a user's function. ``generator``: the
        phase's. ``rollout_id``: rollouts that made these weights. ``trained``: the step that training has come to; how
        many it took meanwhile is the evaluation's lag."""
        users = users or Users(types.SimpleNamespace())
        path = layout.evaluation(self.folder, step)
        if not (evaluation_sets(self.s) or users.eval_rollout) or path.exists():
            return
        with self.shared.tracer.span("eval", step=step):
            found = await (users.evaluated(rollout_id) if users.eval_rollout else self._evaluated(of_set))
        results = [result for result, _ in found]
        lag = max(0, trained() - step) if trained else 0
        manifests.write_json(path, {"step": step, "weight_version": version, "lag": lag, "results": results})
        self.shared.trackers.evaluation(self.name, results, rollout_id, step)
        by_set = {result["dataset"]: samples for result, samples in found}
        if not await users.log_evaluation(rollout_id, by_set):
            for result in results:
                self._tell(step, result, generator, lag)

    async def _evaluated(
        self, of_set: Callable[[EvaluationSet], Answering]
    ) -> list[tuple[dict[str, Any], list[Sample]]]:
        found = []
        for one, source in zip(evaluation_sets(self.s), evaluations_of(self.s), strict=True):
            assert source is not None, "none is left out"
            judged: list[Sample] = []
            generator, render = of_set(one)
            with self.shared.screen.progress(f"evaluating {one.name}", len(source)) as advance:
                given = (one, source, generator, lambda row: self._rendered(row, render), advance, judged.extend)
                found.append((await evaluate(*given), judged))
        return found

    def found(self) -> list[dict[str, Any]]:
        """By step."""
        return [json.loads(path.read_text()) for path in layout.evaluations(self.folder)]

    def _rendered(self, row: PromptRow, render: Render) -> Rendered | None:
        """None for a row that is left out, and counted: too long, or with ``--on-bad-row skip`` unusable."""
        try:
            return render(row)
        except RowError as error:
            if self.s.on_bad_row != "skip":
                raise
            self.shared.screen.say(f"evaluation leaves out {error.message}")
            return None

    def _tell(self, step: int, result: dict[str, Any], generator: Generator, lag: int) -> None:
        lost = collections.Counter(result["failures"])
        reasons = generator.failures.told(lost)
        failed = f"; {lost.total()} of {result['trajectories']} answers failed and count 0: {reasons}" if lost else ""
        left = f"; {result['left_out']} rows are left out" if result["left_out"] else ""
        found = f"reward {result['reward_mean']:.3f} over {result['prompts']} prompts"
        if len(result["pass_at"]) > 1:
            found += "".join(f", pass@{k} {rate:.3f}" for k, rate in result["pass_at"].items())
        late = f", {lag} steps behind training" if lag else ""
        self.shared.screen.say(f"{self.name}: {result['dataset']} at step {step}{late}: {found}{left}{failed}")
