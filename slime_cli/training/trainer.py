"""One rank's trainer: Megatron's model and optimizer, and the step that RL asks of them.

Created by the cluster's worker (one a process) and by the layout tests; every method is collective: all ranks call it with
the same arguments. The loss of a step is one number over the global batch, so its gradient does not depend on packing,
micro-batch count or layout.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator

import numpy as np
import torch
from megatron.core import mpu
from megatron.core.distributed import finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from megatron.training.training import get_megatron_optimizer_config, get_model, get_optimizer_param_scheduler

from slime_cli.buffer.batch import TrainBatch
from slime_cli.errors import EngineError
from slime_cli.training import advantages, losses, megatron, metrics, microbatch, packing
from slime_cli.training.logprobs import token_entropy, token_log_probs
from slime_cli.training.model import provider
from slime_cli.training.settings import Settings
from slime_cli.tracing.spans import Tracer


class Trainer:
    """Holds the model of this rank for one stage of a run."""

    def __init__(self, args, settings: Settings, tracer: Tracer):
        self.args, self.settings, self.tracer = args, settings, tracer
        megatron.begin_stage(args)
        with contextlib.redirect_stdout(None):
            self.model = get_model(provider, ModelType.encoder_or_decoder)
            config, _ = get_megatron_optimizer_config(args)
            self.optimizer = get_megatron_optimizer(config, self.model)
            self.scheduler = get_optimizer_param_scheduler(self.optimizer)
        self.config = get_model_config(self.model[0])
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.finalize_model_grads_func = finalize_model_grads
        self.device = next(self.model[0].parameters()).device
        self.reference: dict[str, torch.Tensor] | None = None
        self.step = 0

    # -- weights ---------------------------------------------------------------------------------------------------

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of everything that this rank holds, over virtual pipeline stages."""
        for chunk, module in enumerate(self.model):
            for name, parameter in module.named_parameters():
                yield f"{chunk}.{name}", parameter.data

    def keep_reference(self) -> None:
        """Host copies of the present weights become the reference policy."""
        self.reference = {name: tensor.detach().cpu().clone() for name, tensor in self.parameters()}

    @contextlib.contextmanager
    def _as_reference(self) -> Iterator[None]:
        """Reference weights in place of the policy's, which come back afterwards whatever happens."""
        kept = {name: tensor.detach().cpu().clone() for name, tensor in self.parameters()}
        try:
            for name, tensor in self.parameters():
                tensor.copy_(self.reference[name])
            yield
        finally:
            for name, tensor in self.parameters():
                tensor.copy_(kept[name])

    # -- a rollout ----------------------------------------------------------------------------------------------------

    def train(self, batch: TrainBatch) -> dict[str, float] | None:
        """Every optimizer step of one rollout. Metrics on the one rank that reports, None on the others."""
        s = self.settings
        with self.tracer.span("data"):
            advantages_N = np.zeros(len(batch))
            if s.policy:
                advantages_N = advantages.grpo(
                    batch.rewards_N, batch.group_index_N, normalise=s.normalise_rewards, divide_by_std=s.divide_by_std
                )
            parts = [self._micro_batches(batch, positions, advantages_N) for positions in packing.split_steps(len(batch), s.steps_per_rollout)]
        if s.policy and s.use_kl_loss:
            with self.tracer.span("ref_log_probs"), self._as_reference():
                for mbs, _ in parts:
                    self._keep_log_probs(mbs, "ref_log_probs_R")
        if s.policy and s.use_rollout_logprobs:
            for step, (mbs, _) in enumerate(parts):
                for mb in mbs:
                    mb.old_log_probs_R, mb.on_policy = mb.rollout_log_probs_R, step == 0
        elif s.policy and len(parts) > 1:
            # With one step a rollout the policy has not moved yet, so its own log-probabilities are the old ones.
            with self.tracer.span("log_probs"):
                for mbs, _ in parts:
                    self._keep_log_probs(mbs, "old_log_probs_R")
        reports = [self._optimizer_step(mbs, dropped) for mbs, dropped in parts]
        return metrics.over_steps(reports)

    def _micro_batches(self, batch: TrainBatch, positions: range, advantages_N) -> tuple[list[microbatch.MicroBatch], int]:
        s, args = self.settings, self.args
        plan = packing.schedule(
            list(positions), batch.lengths_N.tolist(), mpu.get_data_parallel_world_size(), max_tokens=s.max_tokens,
            micro_batch_size=args.micro_batch_size, oversize=s.oversize,
            multiple=args.pipeline_model_parallel_size if args.virtual_pipeline_model_parallel_size else 1,
        )  # fmt: skip
        trained_R = np.concatenate([[0], np.cumsum(batch.loss_mask_R, dtype=np.int64)])
        sums_N = trained_R[batch.response_starts_N + batch.response_lengths_N] - trained_R[batch.response_starts_N]
        weights_N = losses.sample_weights(torch.from_numpy(sums_N), len(positions), args.calculate_per_token_loss).numpy()
        if args.calculate_per_token_loss:
            weights_N = weights_N / max(int(sums_N[list(positions)].sum()), 1)
        multiple = args.tensor_model_parallel_size if args.sequence_parallel else 1
        build = functools.partial(microbatch.build, batch, multiple=multiple, device=self.device)
        mine = plan.per_rank[mpu.get_data_parallel_rank()]
        return [build(p, advantages_N, weights_N) for p in mine], len(plan.dropped)

    # -- passes through the model -----------------------------------------------------------------------------------

    def _pass(self, mbs: list[microbatch.MicroBatch], last: Callable, *, forward_only: bool) -> list:
        """Megatron's schedule over ``mbs``; ``last(mb, logits_RV)`` runs on the last pipeline stage. Its results there."""

        def forward_step(iterator, model):
            mb = next(iterator)
            out = model(mb.tokens_T[None], mb.pack.positions_T[None], None, packed_seq_params=mb.pack)

            def loss_func(output_tensor, non_loss_data=False):
                # Only the rows that predict a response token: the rest of the logits is never converted to float.
                return last(mb, output_tensor.squeeze(0)[mb.where_R])

            return out, loss_func

        for module in self.model:
            module.eval() if forward_only else module.train()
        iterators = [iter(mbs) for _ in self.model]
        with torch.no_grad() if forward_only else contextlib.nullcontext():
            return get_forward_backward_func()(
                forward_step_func=forward_step, data_iterator=iterators if len(iterators) > 1 else iterators[0], model=self.model,
                num_microbatches=len(mbs), seq_length=self.args.seq_length, micro_batch_size=1, forward_only=forward_only,
                collect_non_loss_data=forward_only,
            )  # fmt: skip

    def _keep_log_probs(self, mbs: list[microbatch.MicroBatch], column: str) -> None:
        def last(mb, logits_RV):
            return token_log_probs(logits_RV, mb.targets_R, self.settings.temperature)

        for mb, values_R in zip(mbs, self._pass(mbs, last, forward_only=True)):
            setattr(mb, column, values_R)

    def _optimizer_step(self, mbs: list[microbatch.MicroBatch], dropped: int) -> dict[str, torch.Tensor] | None:
        with self.tracer.span("forward_backward", micro_batches=len(mbs)):
            for module in self.model:
                module.zero_grad_buffer()
            self.optimizer.zero_grad()
            # Megatron divides by the micro-batch count and, unless --calculate-per-token-loss makes it add up, averages over
            # data-parallel ranks; the weights are global.
            ranks = 1 if self.args.calculate_per_token_loss else mpu.get_data_parallel_world_size(with_context_parallel=True)
            scale = len(mbs) * ranks
            reports = self._pass(mbs, functools.partial(self._loss, scale=scale), forward_only=False)
        with self.tracer.span("optimizer"):
            ok, grad_norm, _ = self.optimizer.step()
            self.scheduler.step(increment=self.args.global_batch_size)
        if not ok:
            raise EngineError(f"step {self.step + 1}: the gradient is not finite", "lower --lr or raise numeric precision")
        self.step += 1
        return metrics.over_ranks(reports, grad_norm=grad_norm, lr=self.optimizer.param_groups[0]["lr"], oversize_dropped=dropped)

    def _loss(self, mb: microbatch.MicroBatch, logits_RV: torch.Tensor, *, scale: float):
        s, mask_R = self.settings, mb.mask_R
        # Masked before anything is computed: 0 * nan is nan in a backward pass, so masking the loss alone is too late.
        log_probs_R = losses.masked(token_log_probs(logits_RV, mb.targets_R, s.temperature if s.policy else 1.0), mask_R)
        report = {}
        if s.policy:
            old_R = log_probs_R.detach() if mb.old_log_probs_R is None else losses.masked(mb.old_log_probs_R, mask_R)
            loss_R, clipped_R = losses.clipped_policy_loss(log_probs_R, old_R, mb.advantages_R, s.eps_clip, s.eps_clip_high)
            report |= {"pg_loss": (loss_R, mb.weight_R), "pg_clipfrac": clipped_R, "ppo_kl": old_R - log_probs_R}
            if mb.on_policy:
                before_R = log_probs_R if s.use_rollout_logprobs else old_R
                report["train_rollout_logprob_abs_diff"] = (before_R - mb.rollout_log_probs_R).abs()
            if s.use_kl_loss:
                kl_R = losses.kl(log_probs_R, losses.masked(mb.ref_log_probs_R, mask_R), s.kl_loss_type)
                report["kl_loss"] = (kl_R, mb.weight_R)
                loss_R = loss_R + s.kl_loss_coef * kl_R
            with torch.set_grad_enabled(s.entropy_coef != 0):
                entropy_R = token_entropy(logits_RV, s.temperature)
            report["entropy"] = entropy_R
            loss_R = loss_R - s.entropy_coef * entropy_R
        else:
            loss_R = -log_probs_R
        report |= {"loss": (loss_R, mb.weight_R), "log_probs": log_probs_R}
        loss = (losses.masked(loss_R, mask_R) * mb.weight_R).sum()
        return loss * scale, metrics.of_micro_batch(report, mask_R)
