"""What every micro-batch of a rollout gets before its first step: old and reference log-probabilities, the critic's
values, advantages and returns, off-policy corrections.

The trainer makes one :class:`Preparation` a rollout. Each column is computed over the whole batch, on every rank that
needs it, and then handed out, so that none can depend on packing, micro-batch count or layout. All is as of the weights
that the policy has before the first step. Collective.
"""

import argparse
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from megatron.core import mpu

from slime_cli.buffer.columns import TrainBatch
from slime_cli.errors import UsageError
from slime_cli.hardware import peak
from slime_cli.tracing.names import SpanName
from slime_cli.tracing.spans import Tracer
from slime_cli.training import saved
from slime_cli.training.algorithm import advantages, corrections, losses, user_weights
from slime_cli.training.algorithm.versions import Writers
from slime_cli.training.batching import packing
from slime_cli.training.batching.microbatch import MicroBatch, filled
from slime_cli.training.batching.parts import Part, Splitter
from slime_cli.training.network import heads, routing
from slime_cli.training.network.network import Network
from slime_cli.training.settings import Settings

OLD_ACTOR = "old_actor"
"""The name by which the policy keeps the weights of ``--keep-old-actor``."""


@dataclasses.dataclass(frozen=True)
class Preparation:
    """One rollout's. ``hooks``: users' functions by kind."""

    policy: Network
    critic: Network | None
    splitter: Splitter
    settings: Settings
    args: argparse.Namespace
    hooks: Mapping[str, Callable]
    head: Callable[..., torch.Tensor]
    """Reads log-probabilities off the policy."""
    tracer: Tracer
    batch: TrainBatch
    parts: list[Part]
    writers: Writers
    """Whose weights wrote which token."""
    rollout_id: int

    def run(self) -> dict[str, float]:
        """Fills the micro-batches in; metrics of the corrections. Only the last pipeline stage has any of it, and only
        it needs any."""
        s = self.settings
        if s.reference:
            with self._pass("ref_log_probs"), self.policy.as_kept("reference"):
                for mb, log_probs_R in self.log_probs("ref_"):
                    mb.ref_log_probs_R = log_probs_R
        if s.use_opd and s.opd_type != "sglang":
            with self._pass("teacher_log_probs"), self.policy.as_kept("teacher"):
                for mb, log_probs_R in self.log_probs("teacher_"):
                    mb.teacher_log_probs_R = log_probs_R
        self._old_log_probs()
        if self.critic:
            with self._pass("values"):
                for part in self.parts:
                    for mb, values_R in zip(part, self.critic.forward(part, heads.values)):
                        mb.old_values_R = values_R
        if not mpu.is_pipeline_last_stage(ignore_virtual=True):
            return {}
        with self.tracer.span("advantages"):
            prepared = self._masked_anew() if "data_postprocess" in self.hooks else self
            return prepared._advantages()

    @contextlib.contextmanager
    def _pass(self, name: SpanName) -> Iterator[None]:
        """A span of a pass without gradients, with the memory that it took."""
        with self.tracer.span(name) as about, peak.during(about):
            yield

    @property
    def _mbs(self) -> Iterator[MicroBatch]:
        return (mb for part in self.parts for mb in part)

    # -- log-probabilities -------------------------------------------------------------------------------------------

    def log_probs(
        self, prefix: str = "", how: str = routing.FREE, first: int = 0
    ) -> Iterator[tuple[MicroBatch, torch.Tensor]]:
        """Every micro-batch, from step ``first`` on, with the log-probabilities of its response tokens under the
        policy's weights of this moment, on the last pipeline stage. ``prefix`` tells a user's function whose they
        are."""
        s = self.settings
        if "before_log_prob" in self.hooks:
            self.hooks["before_log_prob"](s.for_users(self.args), self.policy.model, prefix)
        for part in self.parts[first:]:
            yield from ((mb, out_2R[0]) for mb, out_2R in zip(part, self.policy.forward(part, self.head, how)))

    def _old_log_probs(self) -> None:
        """The old policy's log-probabilities, and where they can be compared with the engine's.

        The old policy is the engine's (``--use-rollout-logprobs``), or the one before the first step; of tokens that
        the kept weights wrote it is those.
        """
        s = self.settings
        if s.use_rollout_logprobs:
            for mb in self._mbs:
                mb.old_log_probs_R = mb.rollout_log_probs_R
            for mb in self.parts[0]:  # what the loss compares then are the policy's own: in the first step only
                mb.measured_R = mb.take(self.writers.present_R)
            return
        for mb in self._mbs:
            mb.measured_R = mb.take(self.writers.known_R)
        how = routing.mode(s.replays_routing, s.records_routing)
        kept, present = self.writers.kept_R.any(), self.writers.present_R.any()
        if kept and present and s.records_routing:
            raise UsageError(
                "--use-routing-replay with --keep-old-actor: two policies wrote tokens of this batch, and the experts"
                " that one of them chose are replayed",
                "leave one of the two out",
            )
        # The first step's own log-probabilities are the old ones, unless something wants them before it.
        early = s.corrected or s.kl_coef or s.use_opd or s.use_routing_replay or s.save_debug_train_data
        early = early or not {"data_postprocess", "loss"}.isdisjoint(self.hooks)
        first = 0 if early or kept else 1
        if present if kept else self.parts[first:]:
            with self._pass("log_probs"):
                for mb, log_probs_R in self.log_probs(how=how, first=first):
                    mb.old_log_probs_R = log_probs_R
        if kept:
            with self._pass("old_log_probs"), self.policy.as_kept(OLD_ACTOR):
                for mb, log_probs_R in self.log_probs(how=how):
                    present_R = mb.old_log_probs_R
                    kept_R = mb.take(self.writers.kept_R)
                    mb.old_log_probs_R = (
                        log_probs_R if present_R is None else torch.where(kept_R, log_probs_R, present_R)
                    )

    # -- advantages and corrections ----------------------------------------------------------------------------------

    def _advantages(self) -> dict[str, float]:
        s = self.settings
        shape = advantages.Shape(self.batch.response_lengths_N, self.batch.loss_mask_R.astype(bool))
        whole = Whole(list(self._mbs), shape)
        kl_R = distil_R = None
        if s.kl_coef:
            old_R, ref_R = map(torch.from_numpy, (whole.old_log_probs_R, whole.ref_log_probs_R))
            kl_R = losses.kl(old_R, ref_R, s.kl_loss_type).numpy()
        if s.use_opd:
            distil_R = whole.old_log_probs_R - whole.teacher_log_probs_R
        values_R = whole.old_values_R if self.critic else None
        advantages_R, returns_R = self._estimated(shape, kl_R, values_R, distil_R)
        factor_R, found = self._factor(shape, whole)
        for mb in self._mbs:
            mb.advantages_R = mb.take(advantages_R)
            mb.returns_R = mb.take(returns_R)
            if factor_R is not None:
                mb.correction_R = mb.take(factor_R)
        if distil_R is not None:
            gap = distil_R[shape.mask_R] if shape.mask_R.any() else np.zeros(1)
            found |= {"opd_reverse_kl": float(gap.mean()), "opd_gap_abs": float(np.abs(gap).mean())}
        if kl_R is not None:
            found["reward_kl"] = float(kl_R[shape.mask_R].mean()) if shape.mask_R.any() else 0.0
        if s.save_debug_train_data:
            self._save(s.save_debug_train_data, whole, {"advantages": advantages_R, "returns": returns_R})
        return found

    def _save(self, template: str, whole: "Whole", columns_R: Mapping[str, np.ndarray]) -> None:
        """``--save-debug-train-data``: gathered on every rank, written on one."""
        read = {
            "log_probs": whole.old_log_probs_R,
            "ref_log_probs": whole.ref_log_probs_R if self.settings.reference else None,
            "teacher_log_probs": whole.teacher_log_probs_R if self.settings.use_opd else None,
            "values": whole.old_values_R if self.critic else None,
            "rollout_log_probs": self.batch.rollout_log_probs_R,
        }
        if not mpu.get_data_parallel_rank(with_context_parallel=True) and not mpu.get_tensor_model_parallel_rank():
            saved.write(template, self.rollout_id, self.batch, {**read, **columns_R})

    def _estimated(
        self,
        shape: advantages.Shape,
        kl_R: np.ndarray | None,
        values_R: np.ndarray | None,
        distil_R: np.ndarray | None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Advantages and returns by the estimator, or by a user's function in its place."""
        batch = self.batch
        if "advantage" in self.hooks:
            advantages_R, returns_R = self._custom_advantages(shape, kl_R, values_R)
            return advantages.conclude(self.settings, advantages_R, shape, distil_R), returns_R
        return advantages.compute(
            self.settings,
            batch.rewards_N,
            batch.group_index_N,
            shape,
            trajectories_N=batch.sample_index_N,
            kl_R=kl_R,
            values_R=values_R,
            distil_R=distil_R,
        )

    def _factor(self, shape: advantages.Shape, whole: "Whole") -> tuple[np.ndarray | None, dict[str, float]]:
        """What the policy loss of each token is multiplied by, if anything, and the corrections' metrics."""
        s = self.settings
        batch = self.batch
        found: dict[str, float] = {}
        factor_R = None
        if s.corrected:
            custom = None
            if "tis" in self.hooks:
                args = s.for_users(self.args)
                custom = functools.partial(
                    user_weights.importance, self.hooks["tis"], args, batch.lengths_N, shape=shape
                )
            correction = corrections.correct(
                s, whole.old_log_probs_R, filled(batch.rollout_log_probs_R), shape, custom, batch.sample_index_N
            )
            found = correction.metrics
            factor_R = correction.weights_R if s.use_tis or s.use_rs else None
        if "pg_loss_reducer" in self.hooks:
            factor_R = self._reducer_factor(shape) * (1.0 if factor_R is None else factor_R)
        return factor_R, found

    # -- users' functions --------------------------------------------------------------------------------------------

    def _masked_anew(self) -> "Preparation":
        """The same with the loss masks that ``--rollout-data-postprocess-path`` leaves, in the micro-batches too."""
        batch = self.batch
        everywhere = advantages.Shape(batch.response_lengths_N, np.ones(len(batch.loss_mask_R), bool))
        whole = Whole(list(self._mbs), everywhere)
        columns = {
            "log_probs": whole.old_log_probs_R,
            "ref_log_probs": whole.ref_log_probs_R if self.settings.reference else None,
            "rollout_log_probs": batch.rollout_log_probs_R,
        }
        mask_R = user_weights.masks(
            self.hooks["data_postprocess"],
            self.settings.for_users(self.args),
            self.rollout_id,
            batch.loss_mask_R,
            batch.response_lengths_N,
            {name: column_R for name, column_R in columns.items() if column_R is not None},
            {
                "total_lengths": batch.lengths_N,
                "rewards": batch.rewards_N,
                "truncated": batch.truncated_N.astype(int),
                "sample_indices": batch.sample_index_N,
                "group_indices": batch.group_index_N,
            },
        )
        batch = dataclasses.replace(batch, loss_mask_R=mask_R.astype(np.uint8))
        steps = packing.split_steps(batch.sample_index_N.tolist(), self.settings.num_steps_per_rollout)
        for part, positions in zip(self.parts, steps, strict=True):
            weights_N = self.splitter.token_weights(batch, positions)
            for mb in part:
                if len(mb.rows_R):
                    mb.mask_R = mb.take(mask_R)
                    mb.weight_R = mb.take(weights_N[everywhere.owner_R])
        return dataclasses.replace(self, batch=batch)

    def _reducer_factor(self, shape: advantages.Shape) -> np.ndarray:
        """What the policy loss of each token is multiplied by so that the mean becomes what a user's reducer makes of
        it, [R]."""
        batch = self.batch
        per_token = self.args.calculate_per_token_loss
        out_R = np.zeros(len(shape.mask_R))
        for positions in packing.split_steps(batch.sample_index_N.tolist(), self.settings.num_steps_per_rollout):
            n = sorted(positions)
            rows = np.isin(shape.owner_R, positions)
            weights_R = user_weights.reduction(
                self.hooks["pg_loss_reducer"],
                batch.lengths_N[n],
                batch.response_lengths_N[n],
                shape.mask_R[rows],
                per_token,
            )
            counted = max(int(shape.mask_R[rows].sum()), 1) if per_token else len(np.unique(batch.sample_index_N[n]))
            ours_R = self.splitter.token_weights(batch, positions)[shape.owner_R[rows]]
            out_R[rows] = np.divide(weights_R / counted, ours_R, out=np.zeros_like(weights_R), where=ours_R > 0)
        return out_R

    def _custom_advantages(
        self, shape: advantages.Shape, kl_R: np.ndarray | None, values_R: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """``--custom-advantage-function-path``: sets ``advantages`` (and ``returns``, if it has a critic), both [R]."""
        batch = self.batch
        data = {
            "rewards": batch.rewards_N,
            "group_index": batch.group_index_N,
            "sample_index": batch.sample_index_N,
            "response_lengths": batch.response_lengths_N,
            "loss_mask": shape.mask_R,
            "rollout_log_probs": batch.rollout_log_probs_R,
            "kl": kl_R,
            "values": values_R,
        }
        return user_weights.advantages(self.hooks["advantage"], self.settings.for_users(self.args), shape, data)


@dataclasses.dataclass
class Whole:
    """Per-token columns of a rollout's micro-batches as columns of the whole batch, float64 [R], 0 where masked.

    Each is gathered when it is first read, which is collective over the data-parallel ranks of the last pipeline stage.
    """

    mbs: Sequence[MicroBatch]
    shape: advantages.Shape

    @functools.cached_property
    def old_log_probs_R(self) -> np.ndarray:
        return self._gathered([mb.old_log_probs_R for mb in self.mbs])

    @functools.cached_property
    def ref_log_probs_R(self) -> np.ndarray:
        return self._gathered([mb.ref_log_probs_R for mb in self.mbs])

    @functools.cached_property
    def teacher_log_probs_R(self) -> np.ndarray:
        return self._gathered([mb.teacher_log_probs_R for mb in self.mbs])

    @functools.cached_property
    def old_values_R(self) -> np.ndarray:
        return self._gathered([mb.old_values_R for mb in self.mbs])

    def _gathered(self, columns: Sequence[torch.Tensor | None]) -> np.ndarray:
        """Each rank fills its own places, and the sum has them all."""
        out_R = torch.zeros(len(self.shape.mask_R), dtype=torch.float64)
        for mb, column_R in zip(self.mbs, columns, strict=True):
            if len(mb.rows_R):
                out_R[torch.from_numpy(mb.rows_R)] = filled(column_R).double().cpu()
        out_R = out_R.to(self.mbs[0].tokens_T.device)
        torch.distributed.all_reduce(out_R, group=mpu.get_data_parallel_group(with_context_parallel=True))
        return self.shape.masked(out_R.cpu().numpy())
