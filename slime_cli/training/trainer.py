"""One rank's trainer: what RL asks of Megatron for one rollout, from log-probabilities to optimizer steps.

Created by the cluster's worker (one a process) and by the layout tests; every method is collective: all ranks call it
with the same arguments. The loss of a step is one number over the global batch, and everything that is decided before a
step (:mod:`slime_cli.training.preparation`) is computed over the whole batch on every rank that needs it, so the
gradient does not depend on packing, micro-batch count or layout.
"""

import argparse
import copy
import functools
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from slime_cli import manifests
from slime_cli.buffer.columns import TrainBatch
from slime_cli.errors import DataError
from slime_cli.hardware import peak
from slime_cli.manifests import layout
from slime_cli.tracing.spans import Tracer
from slime_cli.training import metrics
from slime_cli.training.algorithm import objective, versions
from slime_cli.training.batching.microbatch import MicroBatch
from slime_cli.training.batching.parts import Part, Splitter
from slime_cli.training.network import checkpoint, freezing, heads, lora, megatron, model, routing
from slime_cli.training.network.network import Network
from slime_cli.training.preparation import OLD_ACTOR, Preparation
from slime_cli.training.settings import Settings

Loss = Callable[[Settings, MicroBatch, torch.Tensor], tuple[torch.Tensor, metrics.Report]]


class Trainer:
    """Holds the networks of this rank for one phase of a run. ``hooks``: users' functions by kind."""

    def __init__(
        self,
        args: argparse.Namespace,
        settings: Settings,
        tracer: Tracer,
        hooks: Mapping[str, Callable] | None = None,
        critic_args: argparse.Namespace | None = None,
    ) -> None:
        self.args = args
        self.settings = settings
        self.tracer = tracer
        self.hooks = hooks or {}
        if not settings.enable_mtp_training:
            args.mtp_num_layers = None
        megatron.begin_phase(args)
        skip_nan = settings.on_nan_gradient == "skip"
        network = functools.partial(Network, skip_nan=skip_nan, stateless_optimizer=settings.use_stateless_adam)
        trained = freezing.Trained(settings.only_train_params_name_list, settings.freeze_params_name_list)
        provider = model.users(self.hooks["model_provider"]) if "model_provider" in self.hooks else model.provider
        self.policy = network(args, lora.of(trained.of(provider), settings.adapter))
        trained.check(self.policy.device)
        self.critic = None
        if settings.critic:
            self.critic = network(_untied(critic_args or args), model.critics(provider), "critic")
            self.policy.activate()
        self.splitter = Splitter(args, settings, self.policy.device)
        self.log_prob_head = functools.partial(
            heads.log_probs, chunk=settings.log_probs_chunk_size, room=heads.room(self.policy.device)
        )
        self.step = 0
        """Optimizer steps of this phase, over all attempts, which the policy's weights are of; those that trained the
        critic alone count."""
        self._kept_steps: dict[str, int] = {}
        self._saving: list[tuple[pathlib.Path, manifests.Checkpoint]] = []

    # -- weights and checkpoints ---------------------------------------------------------------------------------------

    def begin(self) -> None:
        """The policy has its weights: the optimizer takes them over, and the critic begins as the policy does."""
        self.policy.optimizer.reload_model_params()
        if self.critic:
            self.critic.take_weights(self.policy)

    def keep(self, name: str, path: str | None = None) -> None:
        """Keeps the policy's present weights, or those of a checkpoint, as ``name``: reference, teacher or
        old_actor."""
        if path is None:
            self.policy.keep(name)
            self._kept_steps[name] = self.step
        else:
            self.policy.keep_checkpoint(name, path)

    def save(self, root: str, manifest: manifests.Checkpoint) -> pathlib.Path:
        """Everything as of :attr:`step`; the folder. With ``--async-save`` it is complete once :meth:`saved` says
        so."""
        if self.critic:
            critics = layout.critic(layout.checkpoint(root, self.step)).parent
            self._saving.append((self.critic.start_saving(critics, self.step), manifest))
        self._saving.append((self.policy.start_saving(root, self.step), manifest))
        self.saved(wait=not self.args.async_save)
        return layout.checkpoint(root, self.step)

    def saved(self, wait: bool) -> bool:
        """Whether all that was saved is complete and durable; it can be waited for. The policy's manifest is written
        last: complete means that the critic's checkpoint is too."""
        if not checkpoint.written(wait):
            return False
        while self._saving:
            checkpoint.finish(*self._saving.pop(0))
        return True

    def load(self, path: str, *, weights_only: bool) -> int:
        """A checkpoint folder: all of it, to resume, or the policy's weights alone, to start from; the step."""
        self.step = self.policy.load(path, weights_only=weights_only)
        if weights_only:
            self.step = 0
            self.begin()
        elif self.critic:
            self.critic.load(layout.critic(path), weights_only=False)
            self.policy.activate()
        return self.step

    def log_probs(self, tokens: Sequence[int]) -> dict[int, float]:
        """The policy's present log-probability of each token but the first, given those before it, by its place in
        ``tokens``: those that this rank computes. Other ranks may have others, or the same."""
        n = len(tokens) - 1
        one = np.zeros(1, dtype=np.int64)
        batch = TrainBatch(
            sample_index_N=one,
            group_index_N=one,
            lengths_N=one + n + 1,
            response_lengths_N=one + n,
            rewards_N=np.zeros(1),
            truncated_N=np.zeros(1, bool),
            tokens_T=np.asarray(tokens),
            loss_mask_R=np.ones(n, np.uint8),
            rollout_log_probs_R=None,
        )
        mbs, _ = self.splitter.micro_batches(batch, [0])
        head = functools.partial(self.log_prob_head, temperature=1.0)
        found: dict[int, float] = {}
        for mb, out_2R in zip(mbs, self.policy.forward(mbs, head)):
            if len(mb.rows_R):
                found |= dict(zip((mb.rows_R + 1).tolist(), out_2R[0].tolist(), strict=True))
        return found

    # -- a rollout -----------------------------------------------------------------------------------------------------

    def train(self, batch: TrainBatch) -> dict[str, float] | None:
        """Every optimizer step of one rollout. Metrics on the one rank that reports, None on the others."""
        s = self.settings
        if s.policy:
            self._check(batch)
        with self.tracer.span("data"):
            parts, dropped = self._parts(batch)
        found = self._preparation(batch, parts).run() if s.policy else {}
        if s.reset_optimizer_states:
            for network in filter(None, (self.policy, self.critic)):
                network.forget()
        reports = []
        of_critic = []
        if self.critic:
            of_critic = [self._step(self.critic, mbs, heads.values, objective.value) for mbs in parts]
        if not self.critic or self.step >= s.num_critic_only_steps * s.num_steps_per_rollout:
            head, loss = self._objective()
            how = routing.mode(s.replays_routing)
            for step_id, (mbs, n) in enumerate(zip(parts, dropped, strict=True)):
                self._announce(step_id)
                reports.append(self._step(self.policy, mbs, head, loss, how, oversize_dropped=n))
        self.step += len(parts)
        out: dict[str, float] = {}
        for steps in filter(None, (of_critic, reports)):
            reported = metrics.over_steps(steps)
            if reported is None:
                return None
            out |= reported
        return out | found

    def _check(self, batch: TrainBatch) -> None:
        """Raises DataError for a column that the settings need and the samples lack."""
        columns = {
            "rollout_log_probs": batch.rollout_log_probs_R,
            "rollout_top_p_token_ids": batch.kept_ids_K,
            "rollout_routed_experts": batch.routed_experts_TLK,
            "teacher_log_probs": batch.teacher_log_probs_R,
        }
        for name in self.settings.columns:
            if columns[name] is None:
                raise DataError(
                    f"the samples have no {name}, which the options need", "a custom generate function must fill it in"
                )

    def _parts(self, batch: TrainBatch) -> tuple[list[Part], list[int]]:
        """This rank's micro-batches of each optimizer step, and how many samples each step dropped."""
        parts, dropped = self.splitter.parts(batch)
        if self.settings.policy and self.settings.use_rollout_routing_replay:
            for part in parts:
                for mb in part:
                    self.policy.routers.take(mb)
        return parts, dropped

    def _preparation(self, batch: TrainBatch, parts: list[Part]) -> Preparation:
        return Preparation(
            policy=self.policy,
            critic=self.critic,
            splitter=self.splitter,
            settings=self.settings,
            args=self.args,
            hooks=self.hooks,
            head=functools.partial(self.log_prob_head, temperature=self.settings.rollout_temperature),
            tracer=self.tracer,
            batch=batch,
            parts=parts,
            writers=self._writers(batch),
            rollout_id=self._rollout_id,
        )

    @property
    def _rollout_id(self) -> int:
        """The rollout that is trained next: the step counts whole ones."""
        return self.step // self.settings.num_steps_per_rollout

    def _announce(self, step_id: int) -> None:
        """``--custom-megatron-before-train-step-hook-path``, before a step of the policy."""
        if "before_train_step" in self.hooks:
            args = self.settings.for_users(self.args)
            policy = self.policy
            self.hooks["before_train_step"](
                args, self._rollout_id, step_id, policy.model, policy.optimizer, policy.scheduler
            )

    def _writers(self, batch: TrainBatch) -> versions.Writers:
        """Which tokens the policy's present weights wrote, and which the kept ones."""
        s = self.settings
        kept = self._kept_steps.get(OLD_ACTOR) if s.keep_old_actor and not s.use_rollout_logprobs else None
        untold = {"present": self.step, "kept": kept, "unknown": None}[s.untold_version]
        mask_R = batch.loss_mask_R.astype(bool)
        return versions.writers(batch.versions_R, mask_R, present=self.step, kept=kept, untold=untold)

    # -- a step --------------------------------------------------------------------------------------------------------

    def _objective(self) -> tuple[Callable[..., torch.Tensor], Loss]:
        """The policy's head and loss."""
        s = self.settings
        if "loss" in self.hooks:
            users = functools.partial(objective.custom, self.hooks["loss"], s.for_users(self.args))
            return heads.logits, lambda s, mb, logits_RV: users(mb, logits_RV)
        head = self.log_prob_head
        if not s.policy:
            return functools.partial(head, temperature=1.0), objective.supervised
        # It is measured in the same reading of the logits, so the metric costs next to nothing.
        entropy = "gradient" if s.entropy_coef else "value"
        return functools.partial(head, temperature=s.rollout_temperature, entropy=entropy), objective.policy

    def _step(
        self,
        network: Network,
        mbs: Part,
        head: Callable[..., torch.Tensor],
        loss: Loss,
        how: str = routing.FREE,
        **counts: float,
    ) -> dict[str, float] | None:
        def reported(mb: MicroBatch, out: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            value, report = loss(self.settings, mb, out)
            found = metrics.of_micro_batch(report, mb.mask_R)
            if mb.mtp_losses_D is not None:
                found |= metrics.of_depths(mb.mtp_losses_D)
            return value, found

        span = self.tracer.span
        with span("forward_backward", network=network.name, micro_batches=len(mbs)) as about, peak.during(about):
            reports = network.backward(mbs, head, reported, how)
        with span("optimizer", network=network.name) as about, peak.during(about):
            grad_norm = network.step()
        prefix = "" if network is self.policy else f"{network.name}_"
        if not math.isfinite(grad_norm):
            counts |= {f"{prefix}skipped_steps": 1}
            grad_norm = 0.0
        scalars = {f"{prefix}grad_norm": grad_norm, f"{prefix}lr": network.lr, f"{prefix}skipped_steps": 0} | counts
        return metrics.over_ranks(reports, **scalars)


def _untied(args: argparse.Namespace) -> argparse.Namespace:
    """A value head shares nothing with the embedding, and Megatron must not sum their gradients; nor does a critic
    predict tokens."""
    out = copy.copy(args)
    out.untie_embeddings_and_output_weights = True
    out.mtp_num_layers = None
    return out
