"""Users' functions that the loop itself calls: for a whole rollout or evaluation, for logs, for a version's files.

:class:`slime_cli.loop.phase.Phase` makes one when the engines are there. What a function raises ends the run and names
its line; functions that may block run in a thread.
"""

import asyncio
import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

from slime_cli.buffer.batch import Batch
from slime_cli.buffer.buffer import DataBuffer
from slime_cli.buffer.types import Group, Sample
from slime_cli.hooks import batches, rollouts
from slime_cli.hooks.client import EngineClient, through
from slime_cli.hooks.kinds import Hook
from slime_cli.hooks.protocols import Args
from slime_cli.hooks.table import KINDS
from slime_cli.options.checks.functions import of_user
from slime_cli.rollout.evaluate import result_of


@dataclasses.dataclass(frozen=True)
class Users:
    """``client``: the run's, lent to functions for a whole rollout."""

    args: Args
    client: EngineClient | None = None
    rollout: Hook | None = None
    eval_rollout: Hook | None = None
    rollout_log: Hook | None = None
    eval_log: Hook | None = None
    weight_post_write: Hook | None = None

    @classmethod
    def of(cls, args: Args, client: EngineClient) -> "Users":
        kinds = [field.name for field in dataclasses.fields(cls)][2:]
        paths = {kind: getattr(args, KINDS[kind].option) for kind in kinds}
        found = {kind: Hook.load(path, kind) if of_user(path) else None for kind, path in paths.items()}
        return cls(args, client, **found)

    async def generated(
        self, buffer: DataBuffer, rollout_id: int, version: int, fault: Callable[[Sample], str | None]
    ) -> Batch:
        """The batch of a rollout that ``--rollout-function-path`` makes. ``fault``: why a sample can't be trained."""
        hook = self.rollout
        assert hook is not None and self.client is not None

        def release(groups: list[Group]) -> None:
            for group in groups:
                buffer.release(group, keep=False)

        with through(self.client):
            dealer = rollouts.Dealer(hook, lambda n: buffer.lease(n, version=version), release)
            rolled = await rollouts.rollout(hook, self.args, rollout_id, dealer)
        for group, samples in rolled.groups:
            if wrong := next(filter(None, map(fault, samples)), None):
                raise hook.refuse(f"returned something unfit: {wrong}", "leave out what is not to be trained")
            made = {sample.index for sample in samples}
            lost = {s.index: "rollout_function" for s in (*group.pending, *group.finished) if s.index not in made}
            pending = {sample.index for sample in group.pending}
            buffer.finish(group, [sample for sample in samples if sample.index in pending], lost)
            buffer.accept(group)
        for group in rolled.left_out:
            buffer.reject(group, "rollout_function")
        chosen = buffer.choose(rollout_id)
        assert chosen is not None, "it returned as many groups as a rollout has"
        return await asyncio.to_thread(buffer.make, chosen)

    async def evaluated(self, rollout_id: int) -> list[tuple[dict[str, Any], list[Sample]]]:
        """The sets of an evaluation that ``--eval-function-path`` makes."""
        hook = self.eval_rollout
        assert hook is not None and self.client is not None

        def lease(count: int) -> list[Group]:
            raise hook.refuse(f"asked for {count} groups", "in an evaluation nothing is dealt: args names its data")

        with through(self.client):
            dealer = rollouts.Dealer(hook, lease, lambda groups: None)
            sets, _ = await rollouts.evaluation(hook, self.args, rollout_id, dealer)
        return [(result_of(name, one.rewards_PN, one.truncated), one.samples) for name, one in sets.items()]

    async def log_rollout(self, batch: Batch, line: dict[str, Any]) -> bool:
        """True when slime's own line is left out."""
        if self.rollout_log is None:
            return False
        drops = {f"rollout/dynamic_filter/drop_{reason}": float(count) for reason, count in batch.dropped.items()}
        given = (self.rollout_log, batch.rollout_id, self.args, batch.samples, drops, line["seconds"])
        return await asyncio.to_thread(batches.log_rollout, *given)

    async def log_evaluation(self, rollout_id: int, found: dict[str, list[Sample]]) -> bool:
        if self.eval_log is None:
            return False
        return await asyncio.to_thread(batches.log_evaluation, self.eval_log, rollout_id, self.args, found, {})

    def written(self, folder: pathlib.Path, engines: list[str]) -> None:
        """A version's files are there, and no engine has read them."""
        if self.weight_post_write is not None:
            self.weight_post_write(self.args, str(folder), engines)
