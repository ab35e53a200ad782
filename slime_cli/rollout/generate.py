"""From leased groups to rewarded trajectories: the engines or a user's function answer, a teacher and a reward judge.

Called by the collector, group by group, and by evaluation. The custom function may fan one trajectory out into several
samples. It is trained whole or dropped whole: when it has no sample, or generation or reward of one sibling fails, the
trajectory is dropped for the reason of the first that failed. What a user's function raises for one sample, or returns
unfit for training, costs that trajectory; what it raises for a group ends the run. An interrupted trajectory is
neither: it keeps what was generated, and is continued later.
"""

import asyncio
import contextlib
import dataclasses
import types
from collections.abc import Callable
from typing import Any, Protocol

from slime_cli.buffer.types import Group, Sample, Status
from slime_cli.buffer.values import RewardFailure
from slime_cli.errors import EngineError, SlimeError
from slime_cli.hooks import batches, raised
from slime_cli.hooks import client as hooks_client
from slime_cli.hooks import kinds as hooks
from slime_cli.hooks.evidence import NOTHING, Evidence
from slime_cli.hooks.lending import copied
from slime_cli.rollout import turns
from slime_cli.rollout.boundary import Boundary
from slime_cli.rollout.client import EndedError, RouterClient, ending
from slime_cli.rollout.concurrent import side_by_side
from slime_cli.rollout.failures import Failure, Failures
from slime_cli.rollout.teacher import Teacher
from slime_cli.rollout.watch import Watch


class Rewards(Protocol):
    """Who judges (:class:`slime_cli.rewards.rewards.RewardPool`)."""

    async def score_group(
        self, samples: list[Sample], args: Any, stops: Any = (), evaluation: bool = False
    ) -> list[Any]: ...


@dataclasses.dataclass(frozen=True)
class Lent:
    """The run's client, as users' functions ask through it: one answer has all its versions."""

    client: RouterClient
    evidence: Evidence = NOTHING
    """Asked for beside what the function asks for itself."""

    async def generate(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        if self.client.streams:
            return [hooks_client.whole(await self.client.stream(body))]
        return await self.client.generate(body)


@dataclasses.dataclass(frozen=True)
class Interrupted:
    """A trajectory that this run aborted, with what was generated so far."""

    sample: Sample


@dataclasses.dataclass
class Answers:
    """The outcome of a group's pending trajectories."""

    whole: list[Sample]
    """Rewarded, with siblings."""
    failed: dict[int, str]
    """Why, by trajectory."""
    unfinished: list[Sample]
    """Interrupted ones, with what was generated so far. Where there are some and the rollout ends, rewards are not
    asked for any more: who was told of whole ones has them."""


def _nothing_said(samples: list[Sample]) -> None:
    """Does nothing with samples whose reward is still to come."""


def shortened(params: dict[str, Any], together: int | None, prompt: int) -> dict[str, Any]:
    """``params`` for an answer to a prompt of so many tokens that is cut where both have ``together``."""
    if together is None:
        return params
    bounds = [bound for bound in (params["max_new_tokens"], together - prompt) if bound is not None]
    return params | {"max_new_tokens": min(bounds)}


class Generator:
    """``args`` is what hooks get. ``ends`` says whether an interrupted trajectory stays so."""

    def __init__(
        self,
        args: types.SimpleNamespace,
        client: RouterClient,
        rewards: Rewards,
        routed_experts_shape: list[int] | None = None,
        teacher: Teacher | None = None,
        *,
        boundary: Boundary | None = None,
        failures: Failures | None = None,
        watch: Watch | None = None,
        span: Callable[..., contextlib.AbstractContextManager[Any]] = lambda *names, **about: contextlib.nullcontext(),
    ) -> None:
        """``routed_experts_shape``: layers and experts a token, where the engines are to say which experts they
        chose."""
        self.args = args
        self.client = client
        self.rewards = rewards
        self.routed_experts_shape = routed_experts_shape
        self.teacher = teacher
        self.boundary = boundary or Boundary()
        self.failures = failures or Failures()
        self.watch = watch or Watch()
        self.span = span
        path = args.custom_generate_function_path
        self.custom = hooks.load(path, "generate") if path else None
        self.custom_place = f"generate hook {path!r}: {hooks.place_of(self.custom)}" if path else ""
        path = args.dynamic_sampling_filter_path
        self.filter = hooks.Hook.load(path, "dynamic_filter") if path else None
        self.sample_hooks = [hooks.Hook.load(path, "sample_hook") for path in args.rollout_sample_hook_path or ()]

    def having(self, args: types.SimpleNamespace, boundary: Boundary) -> "Generator":
        """The same engines and rewards for an evaluation set with options of its own."""
        return Generator(
            args,
            self.client,
            self.rewards,
            self.routed_experts_shape,
            self.teacher,
            boundary=boundary,
            failures=self.failures,
            watch=self.watch,
            span=self.span,
        )

    def sampling_params(self) -> dict[str, Any]:
        a = self.args
        return {
            "temperature": a.rollout_temperature,
            "top_p": a.rollout_top_p,
            "top_k": a.rollout_top_k,
            "max_new_tokens": a.rollout_max_response_len,
            "stop": a.rollout_stop,
            "stop_token_ids": a.rollout_stop_token_ids,
            "skip_special_tokens": a.rollout_skip_special_tokens,
            "no_stop_trim": True,
            "spaces_between_special_tokens": False,
        }

    async def refusal(self, samples: list[Sample]) -> str | None:
        """Why a finished group is left out; None when it stays."""
        if not any(sample.trained for sample in samples):
            detail = f"group {samples[0].group_index}: every token of its samples is masked"
            self.failures.show(Failure("nothing_to_train", detail))
            return "nothing_to_train"
        return await batches.verdict(self.filter, self.args, samples) if self.filter else None

    async def answered(
        self,
        group: Group,
        params: dict[str, Any] | None = None,
        *,
        ends: Callable[[], bool] = lambda: False,
        generated: Callable[[list[Sample]], None] = _nothing_said,
    ) -> Answers:
        """Generation and reward of the group's pending trajectories. ``params`` are those of an evaluation;
        ``generated`` is told of samples that lack nothing but the reward."""
        training = params is None
        out = Answers([], {}, [])
        with self.span("generate", group=group.index), ending(ends):
            made = await self._generated(group, params, out, ends)
        if not made and not out.unfinished and self._engines_failed(out):
            await asyncio.to_thread(self.client.alive)  # raises when the engines are gone
        if training:
            generated(made)
        if out.unfinished and ends():
            return out
        with self.span("reward", group=group.index):
            if self.teacher and training:
                with self.watch.at("groups before the teacher"):
                    made = await self._taught(made, out)
            with self.watch.at("groups before their rewards"):
                await self._judged(made, out, training)
        return out

    async def _generated(
        self, group: Group, params: dict[str, Any] | None, out: Answers, ends: Callable[[], bool]
    ) -> list[Sample]:
        """Samples that are fit for a reward. Those that an earlier attempt generated are taken as they are. The group's
        own samples stay as they are: what is cancelled on the way leaves nothing half made in them."""
        training = params is None
        done = [s for s in group.pending if s.status in (Status.COMPLETED, Status.TRUNCATED)]
        ready = [siblings for s in done for siblings in [group.partial.get(s.index, [s])]]
        todo = [copied(s) for s in group.pending if s.status not in (Status.COMPLETED, Status.TRUNCATED)]
        answers = await self.generate(dataclasses.replace(group, pending=todo), params, ends) if todo else []
        made = [sample for siblings in ready for sample in siblings]
        for leased, answer in zip(todo, answers, strict=True):
            found = await self._prepared(answer, training) if isinstance(answer, list) else answer
            if isinstance(found, Interrupted):
                out.unfinished.append(found.sample)
            elif isinstance(found, Failure):
                self._fail(out, leased.index, found)
            elif failure := self._failure(found, training):
                self._fail(out, leased.index, failure)
            else:
                for sample in found:
                    self.boundary.strip(sample)
                made += found
        return made

    async def _prepared(self, samples: list[Sample], training: bool) -> list[Sample] | Failure:
        """As the functions of ``--rollout-sample-hook-path`` leave them."""
        try:
            return [
                await batches.prepared(
                    self.sample_hooks, self.args, sample, rollout_id=sample.rollout_id, evaluation=not training
                )
                for sample in samples
            ]
        except SlimeError as error:
            return Failure("sample_hook_invalid", error.message)
        except (Exception, SystemExit) as error:
            return Failure("sample_hook_error", raised.sentence(error), raised.trace(error))

    def _engines_failed(self, out: Answers) -> bool:
        """Every trajectory failed while it was generated: it may be no fault of the user's function."""
        return bool(out.failed) and {*out.failed.values()} == {"generation_error"}

    def _fail(self, out: Answers, index: int, failure: Failure) -> None:
        out.failed.setdefault(index, failure.reason)
        self.failures.show(failure)

    async def _taught(self, made: list[Sample], out: Answers) -> list[Sample]:
        assert self.teacher is not None
        known = {*out.failed}
        left = await self.teacher.teach(made, out.failed)
        for reason in {reason for index, reason in out.failed.items() if index not in known}:
            self.failures.show(Failure(reason, self.teacher.details[reason]))
        return left

    async def _judged(self, made: list[Sample], out: Answers, training: bool) -> None:
        by_user = [bool(hooks.reward_path(sample, self.args)) for sample in made]
        rewards = await self.rewards.score_group(made, self.args, self.boundary.stops, evaluation=not training)
        for sample, reward, may_be_changed in zip(made, rewards, by_user, strict=True):
            if isinstance(reward, RewardFailure):
                self._fail(out, sample.index, Failure(f"reward_{reward.kind}", reward.detail, reward.trace))
            elif may_be_changed and (fault := self.boundary.fault(sample, training)):
                self._fail(out, sample.index, Failure("reward_invalid", fault))
            else:
                sample.reward = reward
        out.whole = [sample for sample in made if sample.index not in out.failed]

    def _failure(self, siblings: list[Sample], training: bool) -> Failure | None:
        """Why a trajectory counts as failed; None when all of it is there, and fit for training."""
        if not siblings:
            return Failure("generation_empty", f"{self.custom_place} returned no sample")
        maker = self.custom_place or "the engine"
        for sample in siblings:
            if sample.status not in (Status.COMPLETED, Status.TRUNCATED):
                return Failure(f"generation_{sample.status.value}", f"{maker}: sample {sample.index} ended so")
            if fault := self.boundary.fault(sample, training):
                return Failure("generation_invalid", f"{maker}: {fault}")
        if not any(sample.response_length or sample.response and not training for sample in siblings):
            return Failure("generation_no_tokens", f"{maker}: sample {siblings[0].index} has no response token")
        return None

    async def generate(
        self, group: Group, params: dict[str, Any] | None = None, ends: Callable[[], bool] = lambda: False
    ) -> list["list[Sample] | Failure | Interrupted"]:
        """Responses for the group's pending samples: the engines answer, or the custom function for each of them.

        What each of them ended in, in order: itself, or the siblings that the function fanned it out into. ``params``
        are those of an evaluation. Raises DataError for a prompt that the model can't take.
        """
        training = params is None
        together = self.args.rollout_max_context_len if training else self.args.eval_max_context_len
        params = shortened(params or self.sampling_params(), together, len(group.rendered.tokens))
        self.boundary.prompt(group.row, group.rendered.tokens)
        if self.custom:
            calls = (self._custom(sample, params, group.rendered.tokens, not training) for sample in group.pending)
            return await side_by_side(calls)
        asking = self._asking(group.rendered.tokens, params, training, ends)
        cut_off = await turns.answer_all(asking, group.pending)
        if self.args.mask_offpolicy_in_partial_rollout:
            for sample in group.pending:
                turns.mask_earlier_versions(sample)
        open_ = {sample.index for sample in cut_off}
        return [Interrupted(sample) if sample.index in open_ else [sample] for sample in group.pending]

    def _asking(
        self, prompt: list[int], params: dict[str, Any], training: bool, ends: Callable[[], bool]
    ) -> turns.Asking:
        tokenizer = self.boundary.tokenizer
        skip = params.get("skip_special_tokens", True)

        def decode(tokens: list[int]) -> str:
            return tokenizer.decode(tokens, skip_special_tokens=skip, spaces_between_special_tokens=False)

        return turns.Asking(
            self.client,
            prompt,
            params,
            evidence=self.evidence(training),
            ends=ends,
            decode=None if tokenizer is None else decode,
        )

    def evidence(self, training: bool) -> Evidence:
        """The evidence that engines are asked for; none in an evaluation."""
        return Evidence(self.args.use_top_p_replay, self.routed_experts_shape) if training else NOTHING

    async def _custom(
        self, leased: Sample, params: dict[str, Any], prompt_tokens: list[int], evaluation: bool
    ) -> "list[Sample] | Failure | Interrupted":
        """The user's function called for a sample. An evaluation that this run interrupted calls it again, with the
        sample that it returned; in training the group is dealt again."""
        while isinstance(made := await self._called(leased, params, prompt_tokens, evaluation), Interrupted):
            if not evaluation:
                break
            leased = made.sample
        return made

    async def _called(
        self, leased: Sample, params: dict[str, Any], prompt_tokens: list[int], evaluation: bool
    ) -> "list[Sample] | Failure | Interrupted":
        """One call. It was interrupted where this run ended a request meanwhile and a sample that it returned says so:
        it continues from that sample, or, where it had fanned out, from the one that it was given."""
        assert self.custom is not None
        given = copied(leased)
        if not given.response_length:
            given.tokens = list(prompt_tokens)
        try:
            async with self.client.call():
                before = self.client.aborts
                result = await self._result(given, params, evaluation)
        except EndedError:
            return Interrupted(leased)
        if isinstance(result, Failure):
            return result
        try:
            made = hooks.siblings(self.custom_place, leased, result)
        except (ValueError, TypeError, RuntimeError) as error:  # a tensor's truth, a value that holds itself
            return Failure("generation_invalid", f"{self.custom_place}: {error}")
        if self.client.aborts > before and any(sample.status is Status.ABORTED for sample in made):
            return Interrupted(made[0] if len(made) == 1 else leased)
        for sample in made:
            if sample.status is Status.PENDING:
                sample.status = Status.COMPLETED
        return made

    async def _result(self, given: Sample, params: dict[str, Any], evaluation: bool) -> Any:
        """The function's own answer, or the Failure of what it raised."""
        assert self.custom is not None
        optional = hooks.accepted(self.custom, evaluation=evaluation)
        try:
            lent = Lent(self.client, self.evidence(not evaluation))
            with self.watch.at(f"calls of {self.custom_place}", by_user=True), hooks_client.through(lent):
                return await hooks.awaited(self.custom(self.args, given, dict(params), **optional))
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # the run ends; a cancellation of the function's own is its failure
            if isinstance(error, EngineError):
                await asyncio.to_thread(self.client.alive)  # raises when the engines are gone: no fault of its own
            return Failure("generation_error", raised.sentence(error), raised.trace(error))
