"""One rollout: groups generated and rewarded concurrently, each journalled as it finishes, until enough are accepted.

The custom function may fan one execution out into several samples. It is trained whole or dropped whole: when it has no
sample,
or generation or reward of one sibling fails, the execution is dropped for the reason of the first that failed. What a
user's
function raises for one sample, or returns unfit for training, costs that execution; what it raises for a group ends the
run.
"""

import asyncio
import collections
import dataclasses
import types
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from slime_cli.buffer.buffer import DataBuffer, Group
from slime_cli.buffer.types import Sample, Status, executions
from slime_cli.errors import UsageError
from slime_cli.hooks import kinds as hooks
from slime_cli.hooks import raised
from slime_cli.rewards.pool_messages import RewardFailure
from slime_cli.rewards.rewards import RewardPool, custom_path
from slime_cli.rollout import nucleus
from slime_cli.rollout.boundary import Boundary
from slime_cli.rollout.client import RouterClient, fill, fill_routed_experts
from slime_cli.rollout.failures import Failure, Failures
from slime_cli.rollout.teacher import Teacher

FILTER = "--dynamic-sampling-filter-path"
CANCEL_SECONDS = 5.0
"""A user's function may not listen; it is not waited for longer."""


@dataclasses.dataclass
class Result:
    """What a rollout ended with."""

    groups: list[Group]
    dropped: collections.Counter
    """Executions by reason."""


class Generator:
    """Turns leased groups into rewarded ones. ``args`` is what hooks get."""

    def __init__(
        self,
        args: types.SimpleNamespace,
        client: RouterClient,
        rewards: RewardPool,
        routed_experts_shape: list[int] | None = None,
        teacher: Teacher | None = None,
        *,
        boundary: Boundary | None = None,
        failures: Failures | None = None,
    ):
        """``routed_experts_shape``: layers and experts a token, where the engines are to say which experts they
        chose."""
        self.args = args
        self.client = client
        self.rewards = rewards
        self.routed_experts_shape = routed_experts_shape
        self.teacher = teacher
        self.boundary = boundary or Boundary()
        self.failures = failures or Failures()
        self.streak = self.failures.streak("groups")
        path = args.custom_generate_function_path
        self.custom = hooks.load(path, "generate") if path else None
        self.custom_place = f"generate hook {path!r}: {hooks.place_of(self.custom)}" if path else ""
        path = args.dynamic_sampling_filter_path
        self.filter = hooks.load(path, "dynamic_filter") if path else None

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

    async def rollout(self, buffer: DataBuffer, rollout_id: int, progress: Callable[[int], None]) -> Result:
        """``rollout_batch_size`` accepted groups. Groups accepted beyond that are kept for the next rollout."""
        need = self.args.rollout_batch_size
        dropped = collections.Counter()
        accepted: list[Group] = []

        async def one(group: Group) -> None:
            lost = await self._group(group, buffer.journal)
            dropped.update(lost)
            if group.finished:
                accepted.append(group)
            self.streak.settle(bool(group.finished), lost)
            progress(bool(group.finished))

        while len(accepted) < need:
            missing = need - len(accepted)
            count = missing if self.filter is None else max(missing, self.args.over_sampling_batch_size or missing)
            await side_by_side(one(group) for group in buffer.lease(count, rollout_id))
        accepted.sort(key=lambda group: group.index)
        buffer.give_back(accepted[need:])
        return Result(accepted[:need], dropped)

    async def _group(self, group: Group, journal) -> collections.Counter[str]:
        """Finishes the group's pending executions, or drops them: how many by reason. All of it is dropped where none
        of it is to be
        trained, and nothing of it is left in ``finished``."""
        whole, failed = await self.answered(group)
        journal.finish(whole)
        group.finished = sorted([*group.finished, *whole], key=lambda s: (s.index, s.part))
        group.pending = []
        if group.finished and (reason := await self._refusal(group.finished)):
            failed |= dict.fromkeys(executions(group.finished), reason)
            group.finished = []
        lost = collections.Counter(failed.values())
        for reason in lost:
            journal.drop([index for index, why in failed.items() if why == reason], reason)
        return lost

    async def _refusal(self, samples: list[Sample]) -> str | None:
        """Why the group is left out; None when it stays."""
        if not any(sample.trained for sample in samples):
            self.failures.show(
                Failure("nothing_to_train", f"group {samples[0].group_index}: every token of its samples is masked")
            )
            return "nothing_to_train"
        return await self._verdict(samples) if self.filter else None

    async def _verdict(self, samples: list[Sample]) -> str | None:
        """The filter's. It gets copies: the journal has the samples by now, and what it changed would be lost in a
        resume."""
        copies = [dataclasses.replace(sample, metadata=dict(sample.metadata)) for sample in samples]
        where = f"{FILTER}: {hooks.place_of(self.filter)}"
        try:
            verdict = await hooks.awaited(self.filter(self.args, [*copies]))
        except Exception as error:
            raise UsageError(
                f"{where} raised {raised.sentence(error)}", f"fix the function:\n{raised.trace(error)}"
            ) from error
        if not hooks.unchanged(samples, copies):
            raise UsageError(
                f"{where} changed a sample",
                "change it in the reward function, which comes before and whose changes stay",
            )
        keep = hooks.plain_or_none(getattr(verdict, "keep", verdict))
        if not isinstance(keep, bool | int | float):
            said = "None" if verdict is None else f"{type(verdict).__name__} {verdict!r:.100}"
            raise UsageError(
                f"{where} returned {said}",
                "return whether the group is kept, True or False, or an object with keep and reason",
            )
        return None if keep else f"filter_{' '.join(str(getattr(verdict, 'reason', None) or 'rejected').split())}"

    async def answered(self, group: Group, params: dict[str, Any] | None = None) -> tuple[list[Sample], dict[int, str]]:
        """Rewarded samples of the group's pending executions, whole ones, and why the others failed, by index."""
        failed = {}
        training = params is None

        def fail(index: int, failure: Failure) -> None:
            failed.setdefault(index, failure.reason)
            self.failures.show(failure)

        whole: list[Sample] = []
        answers = await self.generate(group, params)
        if answers and all(isinstance(made, Failure) and made.reason == "generation_error" for made in answers):
            self.client.alive()  # raises when the engines are gone, and the user's functions can do nothing about it
        for leased, made in zip(group.pending, answers, strict=True):
            if found := made if isinstance(made, Failure) else self._failure(made, training):
                fail(leased.index, found)
            else:
                for sample in made:
                    self.boundary.strip(sample)
                whole += made
        if self.teacher and training:
            known = {*failed}
            whole = await self.teacher.teach(whole, failed)
            for reason in {reason for index, reason in failed.items() if index not in known}:
                self.failures.show(Failure(reason, self.teacher.details[reason]))
        by_user = [bool(custom_path(sample, self.args)) for sample in whole]
        rewards = await self.rewards.score_group(whole, self.args, self.boundary.stops, evaluation=not training)
        for sample, reward, may_be_changed in zip(whole, rewards, by_user, strict=True):
            if isinstance(reward, RewardFailure):
                fail(sample.index, Failure(f"reward_{reward.kind}", reward.detail, reward.trace))
            elif may_be_changed and (fault := self.boundary.fault(sample, training)):
                fail(sample.index, Failure("reward_invalid", fault))
            else:
                sample.reward = reward
        return [sample for sample in whole if sample.index not in failed], failed

    def _failure(self, siblings: list[Sample], training: bool) -> Failure | None:
        """Why an execution counts as failed; None when all of it is there, and fit for training."""
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

    async def generate(self, group: Group, params: dict[str, Any] | None = None) -> list[list[Sample] | Failure]:
        """Responses for the group's pending samples: one request for all of them, or the custom function for each.

        What each of them ended in, in order: itself, or the siblings that the function fanned it out into. ``params``
        are those of
        an evaluation. Raises DataError for a prompt that the model can't take.
        """
        training = params is None
        params = params or self.sampling_params()
        if not group.pending:
            return []
        self.boundary.prompt(group.row, group.rendered.tokens)
        if self.custom:
            return await side_by_side(
                self._custom(sample, params, group.rendered.tokens, not training) for sample in group.pending
            )
        replay = training and self.args.use_top_p_replay and self.args.rollout_top_k > 0
        body = {
            "input_ids": group.rendered.tokens,
            "sampling_params": params | {"n": len(group.pending)},
            "return_logprob": True,
        }
        body |= nucleus.request(self.args.rollout_top_k) if replay else {}
        shape = self.routed_experts_shape if training else None
        if shape:
            body["return_routed_experts"] = True
        for sample, answer in zip(group.pending, await self.client.generate(body), strict=True):
            fill(sample, group.rendered.tokens, answer)
            if shape:
                fill_routed_experts(sample, answer, shape)
            if replay:
                nucleus.fill(sample, answer, self.args.rollout_top_p)
        return [[sample] for sample in group.pending]

    async def _custom(
        self, leased: Sample, params: dict[str, Any], prompt_tokens: list[int], evaluation: bool
    ) -> list[Sample] | Failure:
        given = dataclasses.replace(leased, tokens=list(prompt_tokens), metadata=dict(leased.metadata))
        optional = hooks.accepted(self.custom, evaluation=evaluation)
        try:
            result = await hooks.awaited(self.custom(self.args, given, dict(params), **optional))
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and asyncio.current_task().cancelling():
                raise  # the run ends; a cancellation of the function's own is its failure
            return Failure("generation_error", raised.sentence(error), raised.trace(error))
        try:
            made = hooks.siblings(self.custom_place, leased, result)
        except (ValueError, TypeError, RuntimeError) as error:  # a tensor's truth, a value that holds itself
            return Failure("generation_invalid", f"{self.custom_place}: {error}")
        for sample in made:
            if sample.status is Status.PENDING:
                sample.status = Status.COMPLETED
        return made


async def side_by_side(coroutines: Iterable[Coroutine]) -> list[Any]:
    """What each comes to, in order. The first that raises ends the others."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=CANCEL_SECONDS)
        raise
