"""One rollout: groups generated and rewarded concurrently, each journalled as it finishes, until enough are accepted.

The custom function may fan one execution out into several samples. It is trained whole or dropped whole: when it has no sample,
or generation or reward of one sibling fails, the execution is dropped for the reason of the first that failed.
"""

import asyncio
import collections
import dataclasses
import types
from collections.abc import Callable, Iterable
from typing import Any

from slime_cli.buffer.buffer import DataBuffer, Group
from slime_cli.buffer.types import Sample, Status, executions
from slime_cli.rollout import hooks, nucleus
from slime_cli.rollout.client import RouterClient, fill, fill_routed_experts
from slime_cli.rollout.pool import RewardFailure
from slime_cli.rollout.rewards import RewardPool
from slime_cli.rollout.teacher import Teacher


@dataclasses.dataclass
class Result:
    """What a rollout ended with."""

    groups: list[Group]
    dropped: collections.Counter
    """Executions by reason."""


class Generator:
    """Turns leased groups into rewarded ones. ``args`` is what hooks get."""

    def __init__(
        self, args: types.SimpleNamespace, client: RouterClient, rewards: RewardPool, routed_experts_shape: list[int] | None = None,
        teacher: Teacher | None = None,
    ):  # fmt: skip
        """``routed_experts_shape``: layers and experts a token, where the engines are to say which experts they chose."""
        self.args, self.client, self.rewards, self.routed_experts_shape = args, client, rewards, routed_experts_shape
        self.teacher = teacher
        self.custom = hooks.load(args.custom_generate_function_path, "generate") if args.custom_generate_function_path else None
        path = args.dynamic_sampling_filter_path
        self.filter = hooks.load(path, "dynamic_filter") if path else None

    def sampling_params(self) -> dict[str, Any]:
        a = self.args
        return {
            "temperature": a.rollout_temperature, "top_p": a.rollout_top_p, "top_k": a.rollout_top_k,
            "max_new_tokens": a.rollout_max_response_len, "stop": a.rollout_stop, "stop_token_ids": a.rollout_stop_token_ids,
            "skip_special_tokens": a.rollout_skip_special_tokens, "no_stop_trim": True, "spaces_between_special_tokens": False,
        }  # fmt: skip

    async def rollout(self, buffer: DataBuffer, rollout_id: int, progress: Callable[[int], None]) -> Result:
        """``rollout_batch_size`` accepted groups. Groups accepted beyond that are kept for the next rollout."""
        need, dropped = self.args.rollout_batch_size, collections.Counter()
        accepted: list[Group] = []
        while len(accepted) < need:
            missing = need - len(accepted)
            count = missing if self.filter is None else max(missing, self.args.over_sampling_batch_size or missing)
            groups = buffer.lease(count, rollout_id)

            async def one(group: Group) -> Group | None:
                kept = await self._group(group, buffer.journal, dropped)
                progress(1 if kept else 0)
                return kept

            accepted += [g for g in await asyncio.gather(*(one(g) for g in groups)) if g is not None]
        buffer.give_back(accepted[need:])
        return Result(accepted[:need], dropped)

    async def _group(self, group: Group, journal, dropped: collections.Counter) -> Group | None:
        failed: dict[int, str] = {}

        def drop(indices: Iterable[int], reason: str) -> None:
            indices = list(indices)
            journal.drop(indices, reason)
            dropped[reason] += len(indices)

        made = await self.generate(group)
        for leased, siblings in zip(group.pending, made, strict=True):
            if reason := _failure(siblings):
                failed[leased.index] = reason
        whole = [s for siblings in made for s in siblings if s.index not in failed]
        if self.teacher:
            whole = await self.teacher.teach(whole, failed)
        for sample, reward in zip(whole, await self.rewards.score_group(whole, self.args), strict=True):
            if isinstance(reward, RewardFailure):
                failed.setdefault(sample.index, f"reward_{reward.kind}")
            else:
                sample.reward = reward
        finished = [s for s in whole if s.index not in failed]
        journal.finish(finished)
        group.finished, group.pending = group.finished + finished, []
        for reason in dict.fromkeys(failed.values()):
            drop((index for index, why in failed.items() if why == reason), reason)
        if not group.finished:
            return None
        group.finished.sort(key=lambda s: (s.index, s.part))
        reason = self._refusal(group.finished)
        if reason:
            drop(executions(group.finished), reason)
            return None
        return group

    def _refusal(self, samples: list[Sample]) -> str | None:
        """Why the dynamic filter leaves the group out; None when it stays."""
        if self.filter is None:
            return None
        verdict = self.filter(self.args, samples)
        keep = getattr(verdict, "keep", verdict)
        return None if keep else f"filter_{getattr(verdict, 'reason', None) or 'rejected'}"

    async def generate(self, group: Group, params: dict[str, Any] | None = None) -> list[list[Sample]]:
        """Responses for the group's pending samples: one request for all of them, or the custom function for each.

        What each of them ended in, in order: itself, or the siblings that the function fanned it out into.
        """
        training, params = params is None, params or self.sampling_params()
        if not group.pending:
            return []
        if self.custom:
            return await asyncio.gather(*(self._custom(sample, params, group.rendered.tokens) for sample in group.pending))
        replay = training and self.args.use_top_p_replay and self.args.rollout_top_k > 0
        body = {"input_ids": group.rendered.tokens, "sampling_params": params | {"n": len(group.pending)}, "return_logprob": True}
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

    async def _custom(self, leased: Sample, params: dict[str, Any], prompt_tokens: list[int]) -> list[Sample]:
        result = await self.custom(self.args, dataclasses.replace(leased, tokens=list(prompt_tokens)), dict(params))
        made = hooks.siblings(self.args.custom_generate_function_path, leased, result)
        for sample in made:
            if sample.status is Status.PENDING:
                sample.status = Status.COMPLETED
        return made


def _failure(siblings: list[Sample]) -> str | None:
    """Why generation of an execution counts as failed; None when all of it is there."""
    if not siblings:
        return "generation_empty"
    bad = (s.status.value for s in siblings if s.status not in (Status.COMPLETED, Status.TRUNCATED))
    return next((f"generation_{status}" for status in bad), None)
