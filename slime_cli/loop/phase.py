"""One phase of a run: reinforcement learning, or supervised training of the same model, over its own journal.

:class:`slime_cli.run.Run` makes one for each entry of the profile's list, and a schedule of
:mod:`slime_cli.loop.schedules` drives it through its verbs. Everything that a resumed phase needs is in its folder.
Killed at any point, the next attempt trains batches that were made but not committed from their files, on the
committed weights; finished groups wait in the buffer, and unfinished ones are generated again or continued.
"""

import asyncio
import contextlib
import functools
import pathlib
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from slime_cli.buffer import saved
from slime_cli.buffer.batch import Batch
from slime_cli.buffer.types import trajectories
from slime_cli.errors import SlimeError
from slime_cli.loop import checks, figures, generation, opening, starting
from slime_cli.loop.attempts import append_line, computed_with
from slime_cli.loop.evaluating import Beside, Evaluations
from slime_cli.loop.in_flight import interrupted
from slime_cli.loop.publishing import Publisher, Timetable
from slime_cli.loop.schedules import SCHEDULES
from slime_cli.loop.shared import Shared
from slime_cli.loop.targets import KEEP_WEIGHTS
from slime_cli.loop.users import Users
from slime_cli.manifests import layout
from slime_cli.manifests.layout import version_name
from slime_cli.models import architecture
from slime_cli.options.resolve import Resolved, args_namespace
from slime_cli.rollout.client import Hold
from slime_cli.rollout.collector import Collector
from slime_cli.rollout.supervised import examples
from slime_cli.rollout.teacher import Teacher
from slime_cli.screen import note
from slime_cli.tracing.report import PhaseResult
from slime_cli.weights import transports, verification
from slime_cli.weights.transport import Version


class Phase:
    """``start_from``: the checkpoint of the phase before."""

    def __init__(
        self, name: str, options: Resolved, folder: pathlib.Path, shared: Shared, start_from: str | None
    ) -> None:
        self.name = name
        self.options = options
        self.folder = folder
        self.shared = shared
        self.learner = shared.learner
        self.turns = shared.turns
        self.start_from = start_from
        self.s = options.slime
        self.args = args_namespace(options)
        self.policy = self.s.loss_type != "sft_loss"
        self.generates = self.s.generates
        self.trains = start_from is not None or starting.needed(self.s, folder)
        self.say = shared.screen.say
        self.span = shared.tracer.span
        self.evaluations = Evaluations(name, self.s, folder, shared)
        self.total = self.s.num_rollout if self.s.num_rollout is not None else shared.rollouts[name]
        self.step = 0
        """Optimizer steps so far: the trainer's own count."""
        self.started = time.time()
        self.waited = 0.0
        """Seconds that the trainer waited for its last batch."""
        self.seconds_before = 0.0
        self.stopped = False
        self._untold_said = False
        self.users = Users(self.args)
        self.publisher: Publisher | None = None
        self.served: str | None = None
        """The version that the engines hold where this run publishes none."""
        self.collector: Collector | None = None
        self.teacher: Teacher | None = None
        self._advance: Callable[..., None] = lambda n=1, note="": None
        self._ahead: dict[int, asyncio.Task[Batch]] = {}
        self._evaluating = Beside()
        self._told_at = time.monotonic()
        self._idle_before = 0.0
        self.opened = opened = opening.open_phase(name, options, folder, shared, self.args)
        self.buffer = opened.buffer
        self.renderer = opened.renderer
        self.boundary = opened.boundary
        self.failures = opened.failures
        self.saver = opened.saver

    async def close(self) -> None:
        if self.collector is not None:
            await self.collector.stop()
        tasks = [*self._ahead.values(), *self._evaluating.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.teacher is not None:
            await self.teacher.close()
        self.buffer.close()

    # -- from start to end ---------------------------------------------------------------------------------------------

    async def run(self) -> None:
        state = self.buffer.state
        committed = self.buffer.recovery.committed
        self.step = committed.step if committed else 0
        self.seconds_before = state.seconds
        if state.finished is not None and state.finished >= self.total:
            self.say(f"{self.name}: already finished at step {self.step}")
            return
        self.first = committed.rollout_id + 1 if committed else 0
        self.stopped = state.stopped is not None and self.first > state.stopped
        if self.generates and self.s.use_opd and self.s.opd_type == "sglang":
            assert self.s.opd_teacher_url is not None
            self.teacher = Teacher(self.s.opd_teacher_url, self.s.opd_teacher_timeout)
            await self.teacher.check(self.renderer.tokenizer, architecture.vocabulary(self.shared.model))
        if self.generates and self.trains:
            self.publisher = self._publisher()
        behind = self.publisher.behind() if self.publisher else None
        if self.turns.taken and self.trains and (self.generates or not self.policy):
            await self.turns.rest(await self.shared.serving())
        if self.trains:
            await asyncio.to_thread(self._prepare_trainers, behind)
        if self.generates:
            await self._prepare_generation()
            if self.publisher is not None:
                await self._publish(behind)
            if self._evaluation_is_missing():
                await self._evaluate()
        self._told_at = time.monotonic()
        self._idle_before = self.collector.idle_seconds() if self.collector else 0.0
        with self.shared.screen.progress(self.name, self.total, min(self.first, self.total)) as self._advance:
            await SCHEDULES[self.s.schedule if self.generates else "sync"](self)
        await self._end()

    async def _end(self) -> None:
        if self.collector is not None:
            await self.collector.give_back()
        if self.generates:
            await self._evaluating.ended()
            await self._evaluate()
        await asyncio.to_thread(self.saver.commit, wait=True)
        if self.publisher is not None:
            await asyncio.to_thread(self.publisher.close)
        self.buffer.put_state(seconds=self.seconds(), finished=self.total)

    def result(self) -> PhaseResult:
        """Once it has run."""
        return PhaseResult(
            name=self.name,
            policy=self.policy,
            steps=self.step,
            seconds=self.buffer.state.seconds,
            weight_version=self._held(),
            evaluations=self.evaluations.found(),
            proofs=self.publisher.proofs if self.publisher else (),
        )

    def _held(self) -> str | None:
        """The version that the engines hold, or held when an earlier attempt finished; None where there are none."""
        if not self.generates:
            return None
        if self.publisher is not None:
            return self.publisher.held
        return version_name(self.step) if self.trains else self.served

    def seconds(self) -> float:
        """The duration of this phase, over all attempts (an attempt that was killed counts up to its last commit)."""
        return self.seconds_before + time.time() - self.started

    def _prepare_trainers(self, behind: Version | None) -> None:
        self.say(f"{self.name}: Megatron builds the model")
        with self.span("begin_phase"):
            start = starting.Start(self.name, self.options, self.shared.model, self.learner, self.say)
            if kernels := start.networks():
                computed_with(self.shared.run_dir, kernels)
            start.weights(self.buffer.commits(), self.start_from)
            start.others(self.saver.updated_reference())
            if behind and self.publisher:
                self.publisher.restore_old_actor(behind)
            start.last_commit(self.buffer.commits(), len(self.buffer.recovery.replay))

    def _publisher(self) -> Publisher:
        def say(text: str) -> None:
            self.say(f"{self.name}: {text}")

        return Publisher(
            transports.chosen(self.s, self.folder, KEEP_WEIGHTS, say),
            self.learner,
            self.shared.engine_urls,
            Timetable.of(self.s, self.total),
            self.buffer.commits,
            self.saver.under_way,
            keep_old_actor=self.s.keep_old_actor,
            span=self.span,
            say=say,
        )

    async def _prepare_generation(self) -> None:
        made = await generation.prepare(self.s, self.args, self.shared, self.opened, self.teacher)
        self.args, self.client, self.generator = made.args, made.client, made.generator
        self.users, self.collector = made.users, made.collector
        self.answering = functools.partial(generation.answering, made, self.opened)
        if self.publisher is None:
            urls = self.shared.engine_urls()
            self.served = await asyncio.to_thread(verification.reported, urls[0])

    def _evaluation_is_missing(self) -> bool:
        """The evaluation before training, or the one that an earlier attempt was killed in, after its last commit."""
        if not self.first:
            return not self.s.skip_eval_before_train
        return self.publisher is not None and self.publisher.timetable.evaluated(self.first - 1)

    # -- the verbs of a schedule ---------------------------------------------------------------------------------------

    def remaining(self) -> Iterator[int]:
        for rollout_id in range(self.first, self.total):
            if self.stopped:
                return
            with self.span("step", phase=self.name, rollout=rollout_id):
                yield rollout_id

    def flow(self) -> None:
        assert self.collector is not None
        self.collector.flow([i for i in range(self.first, self.total) if i not in self.buffer.recovery.replay])

    def begin(self, rollout_id: int) -> None:
        if rollout_id < self.total and rollout_id not in self._ahead:
            with self.shared.tracer.about(rollout=rollout_id):
                self._ahead[rollout_id] = asyncio.create_task(self._collect(rollout_id))

    async def take(self, rollout_id: int) -> Batch:
        self.begin(rollout_id)
        since = time.monotonic()
        with self.span("wait_for_batch", rollout=rollout_id):
            batch = await self._watched(
                self._evaluating.unless_it_fails(self._ahead[rollout_id]), f"rollout {rollout_id} waits"
            )
        del self._ahead[rollout_id]
        self.waited = time.monotonic() - since
        if self.s.save_debug_rollout_data:
            await asyncio.to_thread(saved.save, self.s.save_debug_rollout_data, batch)
        return batch

    async def _collect(self, rollout_id: int) -> Batch:
        if (indices := self.buffer.made_before(rollout_id)) is not None:
            return await asyncio.to_thread(self.buffer.replay, rollout_id, indices)
        if self.collector is not None and self.users.rollout:
            version = self.collector.version
            with self.shared.watch.at(f"calls of {self.users.rollout.where}", by_user=True):
                return await self.users.generated(self.buffer, rollout_id, version, self.boundary.fault)
        if self.collector is not None:
            return await self.collector.take(rollout_id)
        if self.policy:
            groups = self.buffer.adopt(*saved.load(self.s, rollout_id, self.boundary.fault))
        else:
            groups = examples(self.buffer, self.boundary, self.s.rollout_batch_size)
        return await asyncio.to_thread(self.buffer.make, self.buffer.supervised(rollout_id, groups))

    async def train(self, batch: Batch) -> None:
        rollout_id = batch.rollout_id
        self.batch = batch
        if not self.trains:
            self.line = self._line(batch, self.step, {})
            return
        await asyncio.to_thread(self.saver.commit, wait=False)
        steps = checks.steps(batch, self.s.num_steps_per_rollout or 1)
        before = self.step
        if self.publisher is not None:
            await self.turns.train(self.client, new_weights=self.publisher.due(rollout_id))
        with self.span("train", rollout=rollout_id):
            trained = await self._trained(batch)
        checks.engines(rollout_id, trained.metrics, self.s.max_logprob_diff)
        self.step = trained.step
        for number, part in enumerate(steps, before + 1):
            self.saver.trained(number, rollout_id, list(trajectories(batch.samples[i] for i in part)))
        line = self._line(batch, before, trained.metrics)
        self.stopped = self._low_enough(line)
        self.buffer.line(rollout_id, line)  # before the commit: what a kill leaves out of the file is made from it
        last = self.stopped or rollout_id + 1 == self.total
        if last or (rollout_id + 1) % (self.s.save_interval or 1) == 0 or self.saver.reference_due(rollout_id):
            await asyncio.to_thread(self.saver.save, seconds=self.seconds(), stopped=self.stopped)
        self.line = line

    async def publish(self, rollout_id: int) -> None:
        if self.publisher is not None and self.publisher.due(rollout_id):
            await self._evaluating.ended()
            await self._publish()
        elif self.publisher is not None:
            await self.turns.generate()
        await self._told(rollout_id)
        if (
            self.publisher is not None
            and self.publisher.timetable.evaluated(rollout_id)
            and rollout_id + 1 < self.total
        ):
            self._evaluating.begin(self._evaluate())
            if self.s.schedule == "sync":
                await self._evaluating.ended()

    # -- inside them ---------------------------------------------------------------------------------------------------

    async def _watched[T](self, waiting: Awaitable[T], what: str) -> T:
        """Ends the run where generation comes to nothing any more."""
        if not self.generates:
            return await waiting
        limit = self.s.max_seconds_without_progress
        return await self.shared.watch.over(waiting, f"{self.name}: {what}", limit=limit, say=self.say)

    async def _idle(self, what: Hold) -> None:
        await self._watched(self.client.idle(what), "the new weights wait")

    async def _told(self, rollout_id: int) -> None:
        """A rollout is done: its line is in the journal, the file and on the screen."""
        line = self.line
        now = time.monotonic()
        idle = self.collector.idle_seconds() if self.collector else None
        line["seconds"] = now - self._told_at
        if idle is not None:
            line["rollout_idle"] = idle - self._idle_before
        self._told_at = now
        self._idle_before = idle or 0.0
        self.buffer.line(rollout_id, line)
        append_line(self.shared.run_dir / layout.METRICS, line)
        self.shared.trackers.rollout(line)
        if self.policy and self.batch.untold and not self._untold_said:
            self._untold_said = True
            self.say(
                f"{self.name}: rollout {rollout_id}: {self.batch.untold} of {len(self.batch.samples)} samples tell no"
                " weight version (spans, weight_versions): their staleness counts from when their groups were leased"
            )
        quiet = self.policy and await self.users.log_rollout(self.batch, line)
        self._advance(1, "" if quiet else note(line))
        if self.stopped:
            self.say(f"{self.name}: loss {line['train/loss']:.3f} reached --stop-at-loss at step {self.step}")

    async def _trained(self, batch: Batch) -> Any:
        try:
            return await asyncio.to_thread(self.learner.train, batch.columns)
        except SlimeError as error:
            if batch.replayed:  # it may fail for ever
                error.fix += (
                    f"; should it be this batch that fails, --drop-rollouts {batch.rollout_id} makes another in its"
                    " place"
                )
            raise

    def _line(self, batch: Batch, step_before: int, trained: dict[str, float]) -> dict[str, Any]:
        publisher = self.publisher
        held = None if publisher is None or publisher.due(batch.rollout_id) else publisher.held
        out: dict[str, Any] = {
            "phase": self.name,
            "rollout_id": batch.rollout_id,
            "step": self.step,
            "weight_version": held or version_name(self.step),
            "skipped_prompts": self.buffer.skipped,
            "skipped_by_kind": dict(self.buffer.skipped_by_kind),
        }
        out |= figures.of_batch(batch)
        if self.policy:
            out |= figures.of_policy(batch, step_before, self.buffer.steps_per_rollout)
            out |= {"trainer_idle": self.waited}
        if self.generates:
            out |= {"retries": self.client.retries, "rollout_idle": 0.0}
            if self.teacher is not None:
                out["teacher_retries"] = self.teacher.retries
        return out | {f"train/{name}": value for name, value in trained.items()}

    def _low_enough(self, line: dict[str, Any]) -> bool:
        """``--stop-at-loss`` is reached."""
        target = self.s.stop_at_loss
        return not self.policy and target is not None and line["train/loss"] <= target

    def final_checkpoint(self) -> str | None:
        """The checkpoint that the next phase starts from; None where that is the run's own start."""
        commits = self.buffer.commits()
        return commits[-1].checkpoint if commits else self.start_from

    async def _publish(self, behind: Version | None = None) -> None:
        """The trainer's present weights, or those of an earlier version after a resume, into every engine, proven."""
        assert self.publisher is not None and self.collector is not None
        version = behind
        if version is None:
            version = await asyncio.to_thread(self.publisher.write, self.step)
            if self.users.weight_post_write is not None:  # asking which engines are alive takes time, and blocks
                folder = layout.version(self.folder, self.step)
                with self.shared.watch.at(f"calls of {self.users.weight_post_write.where}", by_user=True):
                    written = asyncio.to_thread(lambda: self.users.written(folder, self.shared.engine_urls()))
                    await self._watched(written, "the new weights wait")
        policy = self.s.in_flight
        await self.turns.sync()
        with self.span("pause"):
            async with self._interrupted(policy):
                await asyncio.to_thread(self.publisher.send, version, flush=policy != "pause")
                self.client.adapter = self.publisher.asked_for
        await self.turns.generate()
        self.collector.published(self.buffer.rollouts_of(self.publisher.held_step))

    def _interrupted(self, policy: str) -> contextlib.AbstractAsyncContextManager[None]:
        if self.turns.taken:  # nothing has been in the engines since the trainer's turn began
            return contextlib.nullcontext()
        return interrupted(self.client, policy, self.shared.engine_urls, self._idle)

    async def _evaluate(self) -> None:
        step = self.publisher.held_step if self.publisher else 0
        rollout_id = self.buffer.rollouts_of(step)
        given = (step, self._held(), self.generator, self.answering)
        evaluated = self.evaluations.run(*given, rollout_id=rollout_id, users=self.users, trained=lambda: self.step)
        await self._watched(evaluated, f"the evaluation of step {step} waits")
