"""One rank's trainer: what RL asks of Megatron for one rollout, from log-probabilities to optimizer steps.

Created by the cluster's worker (one a process) and by the layout tests; every method is collective: all ranks call it
with
the same arguments. The loss of a step is one number over the global batch, and everything that is decided before a step
(advantages, whitening, off-policy corrections) is computed over the whole batch on every rank that needs it, so the
gradient
does not depend on packing, micro-batch count or layout.
"""

import copy
import functools
import math
import operator
import pathlib
import shutil
import types
from collections.abc import Callable, Sequence

import numpy as np
import torch
from megatron.core import mpu

from slime_cli import manifests
from slime_cli.buffer.batch import TrainBatch
from slime_cli.errors import UsageError
from slime_cli.manifests import layout
from slime_cli.tracing.spans import Tracer
from slime_cli.training import metrics
from slime_cli.training.algorithm import advantages, corrections, losses, objective, user_weights
from slime_cli.training.batching import balance, microbatch, packing, packs
from slime_cli.training.network import checkpoint, freezing, heads, megatron, model, routing
from slime_cli.training.network.network import Network
from slime_cli.training.settings import Settings

Part = list[microbatch.MicroBatch]


class Trainer:
    """Holds the networks of this rank for one stage of a run."""

    def __init__(
        self, args, settings: Settings, tracer: Tracer, hooks: dict[str, Callable] | None = None, critic_args=None
    ):
        self.args = args
        self.settings = settings
        self.tracer = tracer
        self.hooks = hooks or {}
        megatron.begin_stage(args)
        more = {"skip_nan": settings.on_nan_gradient == "skip", "stateless_optimizer": settings.use_stateless_adam}
        trained = freezing.Trained(settings.only_train_params_name_list, settings.freeze_params_name_list)
        self.policy = Network(args, trained.of(model.provider), tracer, **more)
        trained.check(self.policy.device)
        self.critic = None
        if settings.critic:
            self.critic = Network(_untied(critic_args or args), model.critic_provider, tracer, "critic", **more)
            self.policy.activate()
        self.step = 0
        """Optimizer steps of this stage, over all attempts; those that trained the critic alone count."""
        self._saving: list[tuple[pathlib.Path, manifests.Checkpoint]] = []

    # -- weights and checkpoints
    # ----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """The policy has its weights: the optimizer takes them over, and the critic begins as the policy does."""
        self.policy.optimizer.reload_model_params()
        if self.critic:
            self.critic.take_weights(self.policy)

    def save(self, root: str, manifest: manifests.Checkpoint) -> pathlib.Path:
        """Everything as of :attr:`step`; the folder. With ``--async-save`` it is complete once :meth:`saved` says
        so."""
        if self.critic:
            self._saving.append(
                (
                    self.critic.start_saving(layout.critic(layout.checkpoint(root, self.step)).parent, self.step),
                    manifest,
                )
            )
        self._saving.append((self.policy.start_saving(root, self.step), manifest))
        self.saved(wait=not self.args.async_save)
        return layout.checkpoint(root, self.step)

    def saved(self, wait: bool) -> bool:
        """Whether all that was saved is complete and durable; it can be waited for. The policy's manifest is written
        last:
        complete means that the critic's checkpoint is too."""
        if not checkpoint.written(wait):
            return False
        while self._saving:
            checkpoint.finish(*self._saving.pop(0))
        return True

    def load(self, path: str, *, weights_only: bool) -> int:
        """A checkpoint folder: all of it, to go on from, or the policy's weights alone, to begin with."""
        self.step = self.policy.load(path, weights_only=weights_only)
        if weights_only:
            self.step = 0
            self.begin()
        elif self.critic:
            self.critic.load(layout.critic(path), weights_only=False)
            self.policy.activate()
        return self.step

    def remove(self, paths: list[str]) -> None:
        """Removes checkpoints, with their critics'. Rank 0 alone calls it."""
        for path in paths:
            for folder in (path, layout.critic(path)):
                shutil.rmtree(folder, ignore_errors=True)

    # -- a rollout ----------------------------------------------------------------------------------------------------

    def train(self, batch: TrainBatch, fresh: bool = True) -> dict[str, float] | None:
        """Every optimizer step of one rollout. Metrics on the one rank that reports, None on the others.

        ``fresh``: the engines generated it with the weights that the policy has now, not with earlier ones.
        """
        s = self.settings
        if s.policy:
            self._check(batch)
        with self.tracer.span("data"):
            parts, dropped = self._parts(batch)
        found = self._prepare(batch, parts, fresh) if s.policy else {}
        if s.reset_optimizer_states:
            for network in filter(None, (self.policy, self.critic)):
                network.forget()
        reports = []
        of_critic = []
        if self.critic:
            of_critic = [self._step(self.critic, mbs, heads.values, objective.value) for mbs in parts]
        if not self.critic or self.step >= s.num_critic_only_steps * s.num_steps_per_rollout:
            head, loss = self._objective()
            reports = [
                self._step(self.policy, mbs, head, loss, self._routing, oversize_dropped=n)
                for mbs, n in zip(parts, dropped)
            ]
        self.step += len(parts)
        out = [metrics.over_steps(r) for r in (of_critic, reports) if r]
        return None if None in out else functools.reduce(operator.or_, out) | found

    def _check(self, batch: TrainBatch) -> None:
        """Raises ValueError for a column that the settings need and the samples lack: a custom generate function must
        fill it in."""
        columns = {
            "rollout_log_probs": batch.rollout_log_probs_R,
            "rollout_top_p_token_ids": batch.kept_ids_K,
            "rollout_routed_experts": batch.routed_experts_TLK,
            "teacher_log_probs": batch.teacher_log_probs_R,
        }
        for name in self.settings.columns:
            if columns[name] is None:
                raise ValueError(
                    f"the samples have no {name}, which the options need; a custom generate function must fill it in"
                )

    def _objective(self) -> tuple[Callable, Callable]:
        """The policy's head and loss."""
        s = self.settings
        if "loss" in self.hooks:
            return heads.logits, lambda s, mb, logits_RV: objective.custom(
                self.hooks["loss"], self.hook_args, mb, logits_RV
            )
        if not s.policy:
            return self._log_prob_head(temperature=1.0), objective.supervised
        return self._log_prob_head(entropy="gradient" if s.entropy_coef else "value"), objective.policy

    def _log_prob_head(self, **more) -> Callable:
        given = {"temperature": self.settings.rollout_temperature, "chunk": self.settings.log_probs_chunk_size} | more
        return functools.partial(heads.log_probs, **given)

    @property
    def _routing(self) -> str:
        """Of the policy's steps."""
        return routing.FOLLOW if self.settings.replays_routing else routing.FREE

    def _step(
        self, network: Network, mbs: Part, head: Callable, loss: Callable, how: str = routing.FREE, **counts: float
    ) -> dict[str, torch.Tensor] | None:
        reports, grad_norm = network.train(mbs, head, lambda mb, out: self._reported(loss, mb, out), how)
        prefix = "" if network is self.policy else f"{network.name}_"
        if not math.isfinite(grad_norm):
            counts |= {f"{prefix}skipped_steps": 1}
            grad_norm = 0.0
        scalars = {f"{prefix}grad_norm": grad_norm, f"{prefix}lr": network.lr, f"{prefix}skipped_steps": 0} | counts
        return metrics.over_ranks(reports, **scalars)

    def _reported(self, loss: Callable, mb: microbatch.MicroBatch, out: torch.Tensor) -> tuple[torch.Tensor, dict]:
        value, report = loss(self.settings, mb, out)
        return value, metrics.of_micro_batch(report, mb.mask_R)

    # -- before the first step ----------------------------------------------------------------------------------------

    def _parts(self, batch: TrainBatch) -> tuple[list[Part], list[int]]:
        """This rank's micro-batches of each optimizer step, and how many samples each step dropped."""
        steps = packing.split_steps(batch.sample_index_N.tolist(), self.settings.num_steps_per_rollout)
        made = [self._micro_batches(batch, positions) for positions in steps]
        return [mbs for mbs, _ in made], [dropped for _, dropped in made]

    def _micro_batches(self, batch: TrainBatch, positions: Sequence[int]) -> tuple[Part, int]:
        s = self.settings
        args = self.args
        context = args.context_parallel_size
        lengths = self._cut.whole(batch.lengths_N).tolist()
        costs = None
        if s.balance_data or s.balance_by_flops:
            costs = list(map(balance.Flops.of(args), lengths, batch.response_lengths_N.tolist()))
        plan = packing.schedule(
            list(positions),
            lengths,
            mpu.get_data_parallel_world_size(),
            max_tokens=s.max_tokens and s.max_tokens * context,
            micro_batch_size=args.micro_batch_size,
            oversize=s.oversize,
            pack_by=costs if s.balance_by_flops else None,
            deal_by=costs if s.balance_data else None,
            multiple=args.pipeline_model_parallel_size if args.virtual_pipeline_model_parallel_size else 1,
        )
        weights_N = self._weights(batch, positions)
        build = functools.partial(
            microbatch.build,
            batch,
            weights_N=weights_N,
            cut=self._cut,
            device=self.policy.device,
            nucleus=s.policy and s.use_top_p_replay,
        )
        mbs = [build(p) for p in plan.per_rank[mpu.get_data_parallel_rank()]]
        if s.policy and s.use_rollout_routing_replay:
            for mb in mbs:
                self.policy.routers.take(mb)
        return mbs, len(plan.dropped)

    @property
    def _cut(self) -> packs.Cut:
        args = self.args
        return packs.Cut(
            mpu.get_context_parallel_rank(),
            args.context_parallel_size,
            args.tensor_model_parallel_size if args.sequence_parallel else 1,
            local=args.transformer_impl == "local",
        )

    def _weights(self, batch: TrainBatch, positions: Sequence[int]) -> np.ndarray:
        """What a token of each sample counts in the loss of the step that the samples at ``positions`` make, [N]."""
        per_token = self.args.calculate_per_token_loss
        executions_N = batch.sample_index_N
        trained_R = np.concatenate([[0], np.cumsum(batch.loss_mask_R, dtype=np.int64)])
        sums_N = trained_R[batch.response_starts_N + batch.response_lengths_N] - trained_R[batch.response_starts_N]
        of_step = len(np.unique(executions_N[list(positions)]))
        weights_N = losses.sample_weights(
            torch.from_numpy(sums_N), torch.from_numpy(executions_N), of_step, per_token
        ).numpy()
        return weights_N / max(int(sums_N[list(positions)].sum()), 1) if per_token else weights_N

    def _prepare(self, batch: TrainBatch, parts: list[Part], fresh: bool = True) -> dict[str, float]:
        """Gives every micro-batch its old and reference log-probabilities, advantages, returns and corrections.

        Metrics of the corrections. Only the last pipeline stage has any of it, and only it needs any.
        """
        s = self.settings
        mbs = [mb for part in parts for mb in part]
        if s.reference:
            with self.tracer.span("ref_log_probs"), self.policy.as_kept("reference"):
                self._log_probs(parts, "ref_log_probs_R")
        if s.use_opd and s.opd_type != "sglang":
            with self.tracer.span("teacher_log_probs"), self.policy.as_kept("teacher"):
                self._log_probs(parts, "teacher_log_probs_R")
        self._old_log_probs(parts, fresh)
        if self.critic:
            with self.tracer.span("values"):
                for part in parts:
                    for mb, values_R in zip(part, self.critic.forward(part, heads.values)):
                        mb.old_values_R = values_R
        if not mpu.is_pipeline_last_stage(ignore_virtual=True):
            return {}
        with self.tracer.span("advantages"):
            return self._attach(batch, mbs)

    def _old_log_probs(self, parts: list[Part], fresh: bool = True) -> None:
        s = self.settings
        generated_with_kept = s.keep_old_actor and not fresh
        for step, part in enumerate(parts):
            for mb in part:
                mb.on_policy = generated_with_kept or (fresh and not (s.use_rollout_logprobs and step))
                if s.use_rollout_logprobs:
                    mb.old_log_probs_R = mb.rollout_log_probs_R
        if s.use_rollout_logprobs:
            return
        how = routing.RECORD if s.records_routing else self._routing
        if generated_with_kept:
            with self.tracer.span("old_log_probs"), self.policy.as_kept("old_actor"):
                self._log_probs(parts, "old_log_probs_R", how)
        elif len(parts) > 1 or s.corrected or s.kl_coef or s.use_opd or s.use_routing_replay:
            # Else the policy has not moved when its one step begins, and its own log-probabilities are the old ones.
            with self.tracer.span("log_probs"):
                self._log_probs(parts, "old_log_probs_R", how)

    def _log_probs(self, parts: list[Part], column: str, how: str = routing.FREE) -> None:
        for part in parts:
            for mb, out_2R in zip(part, self.policy.forward(part, self._log_prob_head(), how)):
                setattr(mb, column, out_2R[0])

    def _attach(self, batch: TrainBatch, mbs: Part) -> dict[str, float]:
        s = self.settings
        shape = advantages.Shape(batch.response_lengths_N, batch.loss_mask_R.astype(bool))

        @functools.cache  # each is a collective, and several of what follows read the old log-probabilities
        def whole(column: str) -> np.ndarray:
            return shape.masked(_whole_column(mbs, column, len(batch.loss_mask_R)))

        kl_R = distil_R = None
        if s.kl_coef:
            old, ref = (torch.from_numpy(whole(c)) for c in ("old_log_probs_R", "ref_log_probs_R"))
            kl_R = losses.kl(old, ref, s.kl_loss_type).numpy()
        if s.use_opd:
            distil_R = whole("old_log_probs_R") - whole("teacher_log_probs_R")
        values_R = whole("old_values_R") if self.critic else None
        if "advantage" in self.hooks:
            advantages_R, returns_R = self._custom_advantages(batch, shape, kl_R, values_R)
            advantages_R = advantages.conclude(s, advantages_R, shape, distil_R)
        else:
            advantages_R, returns_R = advantages.compute(
                s,
                batch.rewards_N,
                batch.group_index_N,
                shape,
                executions_N=batch.sample_index_N,
                kl_R=kl_R,
                values_R=values_R,
                distil_R=distil_R,
            )
        found = {}
        factor_R = None
        if s.corrected:
            custom = None
            if "tis" in self.hooks:
                custom = functools.partial(
                    user_weights.importance, self.hooks["tis"], self.hook_args, batch.lengths_N, shape=shape
                )
            correction = corrections.correct(
                s, whole("old_log_probs_R"), batch.rollout_log_probs_R, shape, custom, batch.sample_index_N
            )
            found = correction.metrics
            factor_R = correction.weights_R if s.use_tis or s.use_rs else None
        if "pg_loss_reducer" in self.hooks:
            factor_R = self._reducer_factor(batch, shape) * (1.0 if factor_R is None else factor_R)
        for mb in mbs:
            mb.advantages_R = mb.take(advantages_R)
            mb.returns_R = mb.take(returns_R)
            if factor_R is not None:
                mb.correction_R = mb.take(factor_R)
        if distil_R is not None:
            gap = distil_R[shape.mask_R] if shape.mask_R.any() else np.zeros(1)
            found |= {"opd_reverse_kl": float(gap.mean()), "opd_gap_abs": float(np.abs(gap).mean())}
        if kl_R is not None:
            found["reward_kl"] = float(kl_R[shape.mask_R].mean()) if shape.mask_R.any() else 0.0
        return found

    # -- hooks
    # -----------------------------------------------------------------------------------------------------------

    @property
    def hook_args(self) -> types.SimpleNamespace:
        """What a user's function gets as ``args``: Megatron's arguments, and over them the settings of this stage."""
        return types.SimpleNamespace(**(vars(self.args) | vars(self.settings)))

    def _reducer_factor(self, batch: TrainBatch, shape: advantages.Shape) -> np.ndarray:
        """What the policy loss of each token is multiplied by so that the mean becomes what a user's reducer makes of
        it, [R]."""
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
            ours_R = self._weights(batch, positions)[shape.owner_R[rows]]
            out_R[rows] = np.divide(weights_R / counted, ours_R, out=np.zeros_like(weights_R), where=ours_R > 0)
        return out_R

    def _custom_advantages(
        self, batch: TrainBatch, shape: advantages.Shape, kl_R, values_R
    ) -> tuple[np.ndarray, np.ndarray]:
        """``--custom-advantage-function-path``: sets ``advantages`` (and ``returns``, if it has a critic), both [R]."""
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
        self.hooks["advantage"](self.hook_args, data)
        try:
            advantages_R = np.asarray(data.get("advantages"), np.float64)
            returns_R = np.asarray(data.get("returns", advantages_R), np.float64)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"--custom-advantage-function-path left no column of numbers: {error}",
                "set one number a response token",
            ) from None
        for name, values_R in (("advantages", advantages_R), ("returns", returns_R)):
            if values_R.shape != shape.mask_R.shape:
                raise UsageError(
                    f"--custom-advantage-function-path left {name!r} of shape {values_R.shape}; one value for each of"
                    f" the {len(shape.mask_R)} response tokens is needed"
                )
            if not np.isfinite(shape.masked(values_R)).all():
                raise UsageError(
                    f"--custom-advantage-function-path left {name!r} that are not finite at trained tokens"
                )
        return shape.masked(advantages_R), shape.masked(returns_R)


def _untied(args):
    """A value head shares nothing with the embedding, and Megatron must not sum their gradients."""
    out = copy.copy(args)
    out.untie_embeddings_and_output_weights = True
    return out


def _whole_column(mbs: Part, name: str, size: int) -> np.ndarray:
    """A per-token column of this rank's micro-batches as a column of the whole batch, float64 [R].

    Collective over the data-parallel ranks of the last pipeline stage: each fills its own places, and the sum has them
    all.
    """
    out_R = torch.zeros(size, dtype=torch.float64)
    for mb in mbs:
        if len(mb.rows_R):
            out_R[torch.from_numpy(mb.rows_R)] = getattr(mb, name).double().cpu()
    out_R = out_R.to(mbs[0].tokens_T.device)
    torch.distributed.all_reduce(out_R, group=mpu.get_data_parallel_group(with_context_parallel=True))
    return out_R.cpu().numpy()
