"""One stage of a run: reinforcement learning, or supervised training of the same model, over its own journal.

The conductor (:mod:`slime_cli.run`) creates one for each stage. Everything that a resumed stage needs is in its
folder.
"""

import collections
import dataclasses
import pathlib
import time
import types

from slime_cli.buffer.batch import TrainBatch, columns, read_again, rollout_folder, unlike_the_others, write
from slime_cli.buffer.buffer import DataBuffer, Group
from slime_cli.buffer.journal import Journal
from slime_cli.buffer.sources.open import prompts_of
from slime_cli.buffer.types import Sample, executions
from slime_cli.errors import DataError, EngineError, SlimeError
from slime_cli.loop import publishing, resuming
from slime_cli.loop.attempts import JOURNAL, METRICS, append_line
from slime_cli.loop.evaluating import Evaluations
from slime_cli.loop.saving import KEEP_WEIGHTS, Saver, refuse_others
from slime_cli.manifests import checkpoints
from slime_cli.manifests.proof import Proof
from slime_cli.models import architecture
from slime_cli.options import roles
from slime_cli.options.resolve import args_namespace
from slime_cli.rollout.boundary import Boundary
from slime_cli.rollout.chat import Renderer, RenderOptions
from slime_cli.rollout.failures import Failures
from slime_cli.rollout.generate import Generator
from slime_cli.rollout.supervised import SupervisedRenderer, lease_examples
from slime_cli.rollout.teacher import Teacher
from slime_cli.screen import note
from slime_cli.tracing.report import PhaseResult
from slime_cli.training.algorithm.advantages import execution_rewards, groups_without_spread
from slime_cli.training.batching import packing
from slime_cli.training.settings import Settings
from slime_cli.weights import publish, sync


def version_name(step: int) -> str:
    return f"v{step:06d}"


class Stage:
    """``conductor`` gives the engines, ``trainers`` the ranks, ``start_from`` the checkpoint of the stage before."""

    def __init__(self, name, options, folder: pathlib.Path, conductor, trainers, start_from: str | None):
        self.name = name
        self.options = options
        self.folder = folder
        self.conductor = conductor
        self.trainers = trainers
        self.start_from = start_from
        self.s = options.slime
        self.args = args_namespace(options)
        self.policy = self.s.loss_type != "sft_loss"
        self.say = conductor.screen.say
        self.span = conductor.tracer.span
        self.evaluations = Evaluations(name, self.s, folder, conductor)
        self.started = time.time()
        self.proofs: list[Proof] = []
        self.version: str | None = None
        self.journal: Journal | None = None
        self.teacher: Teacher | None = None

    def close(self) -> None:
        if self.teacher is not None:
            self.conductor.wait(self.teacher.close())
        if self.journal is not None:
            self.journal.close()

    # -- the stage, from start to end -----------------------------------------------------------------------------

    def run(self) -> None:
        self._open()
        total = self._num_rollouts()
        committed = self.buffer.recovery.committed
        first = committed.rollout_id + 1 if committed else 0
        self.step = committed.step if committed else 0
        self.seconds_before = self.journal.get("seconds", 0.0)
        if self.journal.get("finished"):
            self.say(f"{self.name}: already finished at step {self.step}")
            self.version = version_name(self.step)
            return
        refuse_others(self.saver.root, self.journal)
        if self.policy and self.s.use_opd and self.s.opd_type == "sglang":
            self.teacher = Teacher(self.s.opd_teacher_url, self.s.opd_teacher_timeout)
            self.conductor.wait(
                self.teacher.check(self.renderer.tokenizer, architecture.vocabulary(self.conductor.model))
            )
        behind = self._behind()
        self._prepare_trainers(committed, behind)
        if self.policy:
            self._prepare_generator()
            self._send(behind) if behind else self._publish()
            if not self.s.skip_eval_before_train and not first:
                self._evaluate()
        stopped = self.journal.get("stopped")
        if stopped is not None and first > stopped:
            first = total
        with self.conductor.screen.progress(self.name, total, first) as advance:
            for rollout_id in range(first, total):
                line = self._rollout(rollout_id, last=rollout_id == total - 1)
                advance(1, note(line))
                if self._low_enough(line):
                    self.say(f"{self.name}: loss {line['train/loss']:.3f} reached --stop-at-loss at step {self.step}")
                    break
        if self.policy:
            self._evaluate()
        self.saver.commit(wait=True)
        self.journal.put("seconds", self.seconds())
        self.journal.put("finished", True)

    def result(self) -> PhaseResult:
        """Once it has run."""
        return PhaseResult(
            name=self.name,
            policy=self.policy,
            steps=self.step,
            seconds=self.journal.get("seconds", 0.0),
            weight_version=self.version,
            evaluations=self.evaluations.found(),
            proofs=self.proofs,
        )

    def seconds(self) -> float:
        """Of this stage, over all attempts (an attempt that was killed counts up to its last commit)."""
        return self.seconds_before + time.time() - self.started

    def _open(self) -> None:
        s = self.s
        context = architecture.context_length(
            architecture.read_config(self.conductor.model),
            self.options.sglang.get("context_length") if self.policy else None,
        )
        self.renderer = (Renderer if self.policy else SupervisedRenderer)(
            self.conductor.model, RenderOptions.of(s, context), self.say
        )
        self.source = prompts_of(s)
        if self.source.skipped:
            bad = self.source.skipped[0]
            self.say(
                f"{len(self.source.skipped)} bad rows skipped, the first: {bad.file}:{bad.row}: {bad.field}:"
                f" {bad.reason}"
            )
        self.journal = Journal(self.folder / JOURNAL)
        known = self.journal.get("source")
        found = self.source.fingerprint()
        if known is not None and known != found:
            raise DataError(
                f"{s.prompt_data} changed since this run began", "restore the data or start another --run-dir"
            )
        self.journal.put("source", found)
        self.saver = Saver(s, self.folder, self.conductor.run_dir, self.journal, self.trainers, self.span)
        columns = tuple(
            c for c in Settings.from_options(s).columns if c != "teacher_log_probs"
        )  # the teacher adds those
        rows = architecture.vocabulary(self.conductor.model)
        self.boundary = Boundary.of(self.renderer.tokenizer, self.conductor.model, rows, self.args, columns)
        render = self.boundary.checked(self.renderer.prompt if self.policy else self.renderer.example)
        self.buffer = DataBuffer(
            self.journal,
            self.source,
            samples_per_prompt=s.n_samples_per_prompt,
            shuffle=s.rollout_shuffle,
            seed=s.rollout_seed,
            render=render,
            on_bad_row=s.on_bad_row,
            say=self.say,
        )
        self._drop_rollouts()
        self.failures = Failures(s.max_groups_without_progress, lambda text: self.say(f"{self.name}: {text}"))

    def _drop_rollouts(self) -> None:
        """``--drop-rollouts``: what an earlier attempt made and could not train."""
        for rollout_id in self.s.drop_rollouts or ():
            found = self.buffer.drop_batch(rollout_id)
            what = f"dropped, {found} executions" if found else "no such batch waits to be trained"
            self.say(f"{self.name}: --drop-rollouts {rollout_id}: {what}")

    def _num_rollouts(self) -> int:
        if self.s.num_rollout is not None:
            return self.s.num_rollout
        return self.conductor.rollouts[self.name]

    def _prepare_trainers(self, committed, behind: pathlib.Path | None) -> None:
        """Weights: HF, then the stage before (or --load, --ref-load), then this stage's own last commit."""
        s = self.s
        self.say(f"{self.name}: Megatron builds the model")
        with self.span("begin_stage"):
            settings = Settings.from_options(s)
            critic = self._critic_argv() if settings.critic else None
            found = self.trainers.begin_stage(self._megatron_argv(), settings, self.conductor.model, critic)
            if found["warning"]:
                self.say(f"warning: {found['warning']}")
            start = None
            if resuming.needs_start(s, self.journal.commits()):
                start = self.start_from or resuming.start(s, self.say)
            others = {}
            if settings.reference:
                others["reference"] = self.saver.updated_reference() or (s.ref_load if s.load else None)
            if settings.use_opd and settings.opd_type == "megatron":
                others["teacher"] = s.opd_teacher_load
            if start or not committed:
                self.say(f"{self.name}: the weights of {start or self.conductor.model}")
            if start:
                self.trainers.call("load", start, True)
            for name, root in others.items():
                path = root and str(checkpoints.complete(root, self.say))
                if path:
                    self.say(f"{self.name}: the {name}'s weights are those of {path}")
                self.trainers.call("keep", name, path)
            if behind and settings.keep_old_actor:
                self.trainers.call("load_published", str(behind))
                self.trainers.call("keep", "old_actor")
            if committed:
                self.trainers.call("load", committed.checkpoint, False)
                self.say(
                    f"{self.name}: resumed at step {committed.step} from {committed.checkpoint},"
                    f" {len(self.buffer.recovery.replay)} batch(es) to train again"
                )

    def _prepare_generator(self) -> None:
        """Waits for the engines. What users' functions get as ``args`` says where they and the tokenizer's files
        are."""
        client = self.conductor.serving()
        shape = self._routed_experts_shape()
        client.engines = self.conductor.engine_urls if shape else None
        ip, port = client.address()
        known = {"sglang_router_ip": ip, "sglang_router_port": port, "hf_checkpoint": str(self.conductor.model)}
        self.args = types.SimpleNamespace(**vars(self.args) | known)
        self.generator = Generator(
            self.args,
            client,
            self.conductor.rewards,
            shape,
            self.teacher,
            boundary=self.boundary,
            failures=self.failures,
        )

    def _routed_experts_shape(self) -> list[int] | None:
        """[layers, experts a token] with ``--use-rollout-routing-replay``."""
        if not self.s.use_rollout_routing_replay:
            return None
        model = self.conductor.model
        where = f"--use-rollout-routing-replay: {model}"
        return list(architecture.routed_experts(architecture.read_config(model), where))

    def _critic_argv(self) -> list[str]:
        """The policy's options with those that ``--megatron-config-path`` gives the critic."""
        path = self.s.megatron_config_path
        given = roles.read(path, "critic") if path else {}
        return self._megatron_argv(dataclasses.replace(self.options, megatron=self.options.megatron | given))

    def _megatron_argv(self, options=None) -> list[str]:
        options = options or self.options
        model = self.conductor.model
        derived = architecture.to_derive(architecture.read_config(model), options.megatron, model)
        return architecture.argv(derived) + options.megatron_argv()

    # -- one rollout ------------------------------------------------------------------------------------------------

    def _rollout(self, rollout_id: int, last: bool) -> dict:
        begun = time.time()
        with self.span("step", phase=self.name, rollout=rollout_id):
            samples, dropped = self._batch(rollout_id)
            self.saver.commit(wait=False)
            with self.span("train"):
                batch = columns(samples, self.s.reward_key, rollout_folder(self.folder, rollout_id))
                steps = self._steps(batch, rollout_id)
                found = self._train(batch, rollout_id)
            self._check_engines(rollout_id, found)
            for part in steps:
                self.step += 1
                self.saver.trained(
                    self.step, rollout_id, version_name(self.step), list(executions(samples[i] for i in part))
                )
            publishes = self.policy and publishing.due(self.s, rollout_id, self._num_rollouts())
            line = self._line(rollout_id, samples, batch, dropped, found, publishes)
            line["seconds"] = time.time() - begun
            self.journal.line(rollout_id, line)  # before the commit: what a kill leaves out of the file is made from it
            stopped = self._low_enough(line)
            if (
                last
                or stopped
                or (rollout_id + 1) % (self.s.save_interval or 1) == 0
                or self.saver.reference_due(rollout_id)
            ):
                self.saver.save(seconds=self.seconds(), stopped=stopped)
            if publishes:
                self._publish()
        line["seconds"] = time.time() - begun
        self.journal.line(rollout_id, line)
        append_line(self.conductor.run_dir / METRICS, line)
        if self.policy and publishing.evaluated(self.s, rollout_id) and not last:
            self._evaluate()
        return line

    def _train(self, batch: TrainBatch, rollout_id: int) -> dict:
        try:
            return self.trainers.train(batch, not self.policy or self.version == version_name(self.step))
        except SlimeError as error:
            if rollout_id in self.buffer.recovery.replay:  # it may fail for ever
                error.fix += (
                    f"; should it be this batch that fails, --drop-rollouts {rollout_id} makes another in its place"
                )
            raise

    def _check_engines(self, rollout_id: int, found: dict[str, float]) -> None:
        """Raises EngineError, before the step is committed, when the engines compute another model than the trainer.
        The difference is there only for a rollout that the trainer's own weights generated
        (:attr:`MicroBatch.on_policy`).
        """
        bound = self.s.max_logprob_diff
        mean = found.get("train_rollout_logprob_abs_diff")
        if bound is not None and mean is not None and mean > bound:
            raise EngineError(
                f"rollout {rollout_id}: log-probabilities of engine and trainer differ by {mean:.2f} nats a token on"
                f" average (--max-logprob-diff {bound:g}), so they compute different models; the step is not committed",
                "look for what only one of them was given: Megatron or --sglang- options by hand, quantisation; "
                '"Numbers that differ" in docs/troubleshooting.md has a list',
            )

    def _steps(self, batch: TrainBatch, rollout_id: int) -> list[range]:
        """Places of each optimizer step's samples in the batch."""
        steps = packing.split_steps(batch.sample_index_N.tolist(), self.s.num_steps_per_rollout or 1)
        if not all(steps):
            raise DataError(
                f"{len(set(batch.sample_index_N.tolist()))} samples are left for --num-steps-per-rollout {len(steps)}",
                f"slime trace ledger says why the others were dropped; with --drop-rollouts {rollout_id} the same"
                " command makes another batch",
            )
        return steps

    def _low_enough(self, line: dict) -> bool:
        """``--stop-at-loss`` is reached."""
        target = self.s.stop_at_loss
        return not self.policy and target is not None and line["train/loss"] <= target

    def _batch(self, rollout_id: int) -> tuple[list[Sample], collections.Counter]:
        """This rollout's samples in training order: from its file when an earlier attempt made it, else new ones."""
        replay = self.buffer.recovery.replay.get(rollout_id)
        folder = rollout_folder(self.folder, rollout_id)
        if replay:
            return read_again(folder, replay, self.boundary.rows), collections.Counter()
        before = self.buffer.cursor
        with self.span("generate"):
            groups, dropped = self._generate(rollout_id) if self.policy else self._supervised(rollout_id)
        with self.span("write_batch"):
            samples = self._fitting([s for g in groups for s in g.finished], dropped)
            for sample in samples:
                sample.rollout_id = rollout_id
            batched = write(folder, samples, len(groups), dropped, (before, self.buffer.cursor), rollout_id)
            self.journal.batched(batched, rollout_id)
        return samples, dropped

    def _fitting(self, samples: list[Sample], dropped: collections.Counter) -> list[Sample]:
        """Without the executions of which a sample is above the cap with ``--oversize drop``, or lacks what others
        have; they are
        dropped in the journal, with the reason."""
        unfit = unlike_the_others(samples)
        if self.s.oversize == "drop" and self.s.use_dynamic_batch_size:
            ranks = self.options.megatron.get("context_parallel_size", 1)  # they share a pack
            gone = {index for indices in unfit.values() for index in indices}
            unfit["oversize"] = list(
                executions(
                    s
                    for s in samples
                    if packing.padded(len(s.tokens), ranks) > self.s.max_tokens_per_gpu * ranks and s.index not in gone
                )
            )
        for reason, indices in unfit.items():
            self.journal.drop(indices, reason)
            dropped.update({reason: len(indices)} if indices else {})
        gone = {index for indices in unfit.values() for index in indices}
        samples = [sample for sample in samples if sample.index not in gone]
        if not any(sample.trained for sample in samples):
            raise DataError(
                f"the rollout left no token to train on: {len(samples)} samples, dropped {dict(dropped)}",
                "look at the reasons (slime trace ledger) and at the samples' loss masks",
            )
        return samples

    def _generate(self, rollout_id: int) -> tuple[list[Group], collections.Counter]:
        result = self.conductor.wait(self.generator.rollout(self.buffer, rollout_id, lambda n: None))
        return result.groups, result.dropped

    def _supervised(self, rollout_id: int) -> tuple[list[Group], collections.Counter]:
        return (
            lease_examples(self.buffer, self.boundary, self.s.rollout_batch_size, rollout_id),
            collections.Counter(),
        )

    def _line(self, rollout_id, samples, batch, dropped, found, publishes: bool) -> dict:
        reward_N, first_N = execution_rewards(batch.rewards_N, batch.sample_index_N)
        rewards = reward_N[first_N].tolist()
        line = {
            "stage": self.name,
            "rollout_id": rollout_id,
            "step": self.step,
            "weight_version": version_name(self.step) if publishes or not self.policy else self.version,
            "seconds": 0.0,
            "samples": len(samples),
            "executions": len(rewards),
            "dropped": dict(dropped),
            "skipped_prompts": self.buffer.skipped,
            "skipped_by_kind": dict(self.buffer.skipped_by_kind),
        }
        if self.policy:
            line |= {
                "reward_mean": sum(rewards) / len(rewards),
                "response_length_mean": sum(s.response_length for s in samples) / len(samples),
                "truncated_ratio": sum(s.status.value == "truncated" for s in samples) / len(samples),
                "groups_without_spread": groups_without_spread(
                    batch.rewards_N, batch.group_index_N, batch.sample_index_N
                ),
                "retries": self.generator.client.retries,
            }
            if self.teacher is not None:
                line["teacher_retries"] = self.teacher.retries
        return line | {f"train/{name}": value for name, value in found.items()}

    def final_checkpoint(self) -> str:
        return self.journal.commits()[-1].checkpoint

    # -- weights and evaluation -----------------------------------------------------------------------------------

    def _step_held(self, saving: bool = False) -> int:
        """Whose weights the engines held after the last commit, or after the one that is being saved."""
        steps = [*self.journal.commits(), *(self.saver.under_way() if saving else ())]
        return publishing.step_held(self.s, steps, self._num_rollouts())

    def _behind(self) -> pathlib.Path | None:
        """The version that generates what comes after the last commit, where that is not the commit's own."""
        step = self._step_held()
        if not self.policy or step == self.step:
            return None
        folder = publishing.complete(self.folder, step)
        if folder is None:
            self.say(
                f"{self.name}: the weights of step {step} are gone, so the engines go on with those of step {self.step}"
            )
        return folder

    def _publish(self) -> None:
        """The trainer's present weights into every engine, proven."""
        folder = publish.folder(self.folder, self.step)
        with self.span("publish"):
            self.trainers.call("publish", str(folder), version_name(self.step))
            if self.s.keep_old_actor:
                self.trainers.call("keep", "old_actor")
        self._send(folder)

    def _send(self, folder: pathlib.Path) -> None:
        """A published version into every engine, proven. A resume may need the one that was current at the last
        commit."""
        before = self.version
        self.version = folder.name
        with self.span("sync"):
            urls = self.conductor.engine_urls()
            if before is not None:
                sync.unchanged(urls, before)
            sync.load(urls, folder, self.version)
        with self.span("verify"):
            self.proofs = sync.verify(urls, folder, self.version)
        needed = {self.version, version_name(self._step_held()), version_name(self._step_held(saving=True))}
        for old in sorted(folder.parent.glob("v*"))[:-KEEP_WEIGHTS]:
            if old.name not in needed:
                publish.remove(old)

    def _evaluate(self) -> None:
        self.evaluations.run(self.step, self.version, self.generator, self.boundary.checked(self.renderer.eval_prompt))
