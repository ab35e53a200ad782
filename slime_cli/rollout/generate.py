"""One rollout: groups generated and rewarded concurrently, each journalled as it finishes, until enough are accepted."""

import asyncio
import collections
import dataclasses
import types
from collections.abc import Callable
from typing import Any

from slime_cli.buffer.buffer import DataBuffer, Group
from slime_cli.buffer.types import Sample, Status
from slime_cli.rollout import hooks
from slime_cli.rollout.client import RouterClient, fill, fill_routed_experts
from slime_cli.rollout.pool import RewardFailure
from slime_cli.rollout.rewards import RewardPool


@dataclasses.dataclass
class Result:
    """What a rollout ended with."""

    groups: list[Group]
    dropped: collections.Counter
    """Samples by reason."""


class Generator:
    """Turns leased groups into rewarded ones. ``args`` is what hooks get."""

    def __init__(
        self, args: types.SimpleNamespace, client: RouterClient, rewards: RewardPool, routed_experts_shape: list[int] | None = None
    ):
        """``routed_experts_shape``: layers and experts a token, where the engines are to say which experts they chose."""
        self.args, self.client, self.rewards, self.routed_experts_shape = args, client, rewards, routed_experts_shape
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
        await self.generate(group)
        failed: dict[str, list[int]] = collections.defaultdict(list)
        whole = [s for s in group.pending if s.status in (Status.COMPLETED, Status.TRUNCATED)]
        for sample in group.pending:
            if sample not in whole:
                failed[f"generation_{sample.status.value}"].append(sample.index)
        for sample, reward in zip(whole, await self.rewards.score_group(whole, self.args)):
            if isinstance(reward, RewardFailure):
                failed[f"reward_{reward.kind}"].append(sample.index)
            else:
                sample.reward = reward
                group.finished.append(sample)
        journal.finish([s for s in group.pending if s.reward is not None])
        group.pending = []
        for reason, indices in failed.items():
            journal.drop(indices, reason)
            dropped[reason] += len(indices)
        if not group.finished:
            return None
        group.finished.sort(key=lambda s: s.index)
        reason = self._refusal(group.finished)
        if reason:
            journal.drop([s.index for s in group.finished], reason)
            dropped[reason] += len(group.finished)
            return None
        return group

    def _refusal(self, samples: list[Sample]) -> str | None:
        """Why the dynamic filter leaves the group out; None when it stays."""
        if self.filter is None:
            return None
        verdict = self.filter(self.args, samples)
        keep = getattr(verdict, "keep", verdict)
        return None if keep else f"filter_{getattr(verdict, 'reason', None) or 'rejected'}"

    async def generate(self, group: Group, params: dict[str, Any] | None = None) -> None:
        """Responses for the group's pending samples: one request for all of them, or the custom function for each."""
        params = params or self.sampling_params()
        if not group.pending:
            return
        if self.custom:
            await asyncio.gather(*(self._custom(sample, params, group.rendered.tokens) for sample in group.pending))
            return
        body = {"input_ids": group.rendered.tokens, "sampling_params": params | {"n": len(group.pending)}, "return_logprob": True}
        if self.routed_experts_shape:
            body["return_routed_experts"] = True
        for sample, answer in zip(group.pending, await self.client.generate(body), strict=True):
            fill(sample, group.rendered.tokens, answer)
            if self.routed_experts_shape:
                fill_routed_experts(sample, answer, self.routed_experts_shape)

    async def _custom(self, sample: Sample, params: dict[str, Any], prompt_tokens: list[int]) -> None:
        sample.tokens = list(prompt_tokens)
        result = await self.custom(self.args, sample, dict(params))
        if result is not sample:
            for field in dataclasses.fields(Sample):
                if field.name not in ("index", "group_index", "rollout_id"):
                    setattr(sample, field.name, getattr(result, field.name))
        sample.check()
        if sample.status is Status.PENDING:
            sample.status = Status.COMPLETED
