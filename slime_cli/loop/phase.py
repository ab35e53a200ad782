"""One phase of a run: reinforcement learning, or supervised training of the same model, over its own journal.

:class:`slime_cli.run.Run` makes one for each entry of the profile's list, and a schedule of
:mod:`slime_cli.loop.schedules` drives it through its verbs. Everything that a resumed phase needs is in its folder.
Killed at any point, the next attempt trains batches that were made but not committed from their files, on the
committed weights; finished groups wait in the buffer, and unfinished ones are generated again or continued.
"""

import asyncio
import pathlib
import time
import types
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from slime_cli.buffer.batch import Batch
from slime_cli.buffer.types import trajectories
from slime_cli.errors import SlimeError
from slime_cli.loop import checks, figures, opening, starting
from slime_cli.loop.attempts import append_line, computed_with
from slime_cli.loop.evaluating import Evaluations
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
from slime_cli.rollout.generate import Generator, Lent
from slime_cli.rollout.supervised import examples
from slime_cli.rollout.teacher import Teacher
from slime_cli.screen import note
from slime_cli.tracing.report import PhaseResult
from slime_cli.weights import transports
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
        self.start_from = start_from
        self.s = options.slime
        self.args = args_namespace(options)
        self.policy = self.s.loss_type != "sft_loss"
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
        self.collector: Collector | None = None
        self.teacher: Teacher | None = None
        self._advance: Callable[..., None] = lambda n=1, note="": None
        self._ahead: dict[int, asyncio.Task[Batch]] = {}
        self._evaluating: asyncio.Task[None] | None = None
        self._told_at = time.monotonic()
        self._idle_before = 0.0
        opened = opening.open_phase(name, options, folder, shared, self.args)
        self.buffer = opened.buffer
        self.renderer = opened.renderer
        self.boundary = opened.boundary
        self.failures = opened.failures
        self.saver = opened.saver

    async def close(self) -> None:
        if self.collector is not None:
            await self.collector.stop()
        tasks = [*self._ahead.values(), *([self._evaluating] if self._evaluating else [])]
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
        if self.policy and self.s.use_opd and self.s.opd_type == "sglang":
            assert self.s.opd_teacher_url is not None
            self.teacher = Teacher(self.s.opd_teacher_url, self.s.opd_teacher_timeout)
            await self.teacher.check(self.renderer.tokenizer, architecture.vocabulary(self.shared.model))
        if self.policy:
            self.publisher = self._publisher()
        behind = self.publisher.behind() if self.publisher else None
        await asyncio.to_thread(self._prepare_trainers, behind)
        if self.policy:
            await self._prepare_generation()
            await self._publish(behind)
            if self._evaluation_is_missing():
                await self._evaluate()
        self._told_at = time.monotonic()
        self._idle_before = self.collector.idle_seconds() if self.collector else 0.0
        with self.shared.screen.progress(self.name, self.total, min(self.first, self.total)) as self._advance:
            await SCHEDULES[self.s.schedule if self.policy else "sync"](self)
        await self._end()

    async def _end(self) -> None:
        if self.collector is not None:
            await self.collector.give_back()
        if self.policy:
            await self._evaluated()
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
        if not self.policy:
            return None
        return self.publisher.held if self.publisher else version_name(self.step)

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
        """Waits for the engines. What users' functions get as ``args`` says where they and the tokenizer's files
        are."""
        self.client = client = await self.shared.serving()
        shape = self._routed_experts_shape()
        client.engines = self.shared.engine_urls if shape else None
        ip, port = client.address()
        known = {"sglang_router_ip": ip, "sglang_router_port": port, "hf_checkpoint": str(self.shared.model)}
        known["sglang_context_length"] = self.renderer.options.context
        self.args = types.SimpleNamespace(**vars(self.args) | known)
        assert self.shared.rewards is not None
        self.generator = Generator(
            self.args,
            client,
            self.shared.rewards,
            shape,
            self.teacher,
            boundary=self.boundary,
            failures=self.failures,
            watch=self.shared.watch,
            span=self.span,
        )
        self.users = Users.of(self.args, Lent(client, self.generator.evidence(training=True)))
        s = self.s
        over = s.over_sampling_batch_size if s.partial_rollout or s.dynamic_sampling_filter_path else None
        self.collector = Collector(
            self.generator,
            self.buffer,
            client,
            batch=s.rollout_batch_size,
            burst=over or s.rollout_batch_size,
            slots=max(1, -(-client.in_flight // s.n_samples_per_prompt)),
            keep_partial=s.partial_rollout,
        )

    def _routed_experts_shape(self) -> list[int] | None:
        """[layers, experts a token] with ``--use-rollout-routing-replay``."""
        if not self.s.use_rollout_routing_replay:
            return None
        model = self.shared.model
        where = f"--use-rollout-routing-replay: {model}"
        return list(architecture.routed_experts(architecture.read_config(model), where))

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
            batch = await self._watched(self._ahead[rollout_id], f"rollout {rollout_id} waits")
        del self._ahead[rollout_id]
        self.waited = time.monotonic() - since
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
        groups = examples(self.buffer, self.boundary, self.s.rollout_batch_size)
        return await asyncio.to_thread(self.buffer.make, self.buffer.supervised(rollout_id, groups))

    async def train(self, batch: Batch) -> None:
        rollout_id = batch.rollout_id
        await asyncio.to_thread(self.saver.commit, wait=False)
        steps = checks.steps(batch, self.s.num_steps_per_rollout or 1)
        before = self.step
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
        self.batch = batch

    async def publish(self, rollout_id: int) -> None:
        if self.publisher is not None and self.publisher.due(rollout_id):
            await self._evaluated()
            await self._publish()
        await self._told(rollout_id)
        if (
            self.publisher is not None
            and self.publisher.timetable.evaluated(rollout_id)
            and rollout_id + 1 < self.total
        ):
            self._evaluating = asyncio.create_task(self._evaluate())
            if self.s.schedule == "sync":
                await self._evaluated()

    # -- inside them ---------------------------------------------------------------------------------------------------

    async def _watched[T](self, waiting: Awaitable[T], what: str) -> T:
        """Ends the run where generation comes to nothing any more."""
        if not self.policy:
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
            out |= {"retries": self.client.retries, "trainer_idle": self.waited, "rollout_idle": 0.0}
            if self.teacher is not None:
                out["teacher_retries"] = self.teacher.retries
        return out | {f"train/{name}": value for name, value in trained.items()}

    def _low_enough(self, line: dict[str, Any]) -> bool:
        """``--stop-at-loss`` is reached."""
        target = self.s.stop_at_loss
        return not self.policy and target is not None and line["train/loss"] <= target

    def final_checkpoint(self) -> str:
        return self.buffer.commits()[-1].checkpoint

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
        with self.span("pause"):
            async with interrupted(self.client, policy, self.shared.engine_urls, self._idle):
                await asyncio.to_thread(self.publisher.send, version, flush=policy != "pause")
        self.collector.published(self.buffer.rollouts_of(self.publisher.held_step))

    async def _evaluate(self) -> None:
        assert self.publisher is not None
        render = self.boundary.checked(self.renderer.eval_prompt)
        step = self.publisher.held_step
        rollout_id = self.buffer.rollouts_of(step)
        given = (step, self.publisher.held, self.generator, render)
        evaluated = self.evaluations.run(*given, rollout_id=rollout_id, users=self.users)
        await self._watched(evaluated, f"the evaluation of step {step} waits")

    async def _evaluated(self) -> None:
        """Waits for the evaluation that is under way: it is of one version."""
        task, self._evaluating = self._evaluating, None
        if task is not None:
            await task
