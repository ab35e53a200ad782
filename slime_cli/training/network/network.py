"""A Megatron model on these ranks with its optimizer, and the two passes through it that training is made of.

The policy is one, PPO's critic another. Every method is collective: all ranks call it with the same arguments.
"""

import argparse
import contextlib
import functools
import math
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.distributed import finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config, unwrap_model
from megatron.training.global_vars import set_args
from megatron.training.training import get_megatron_optimizer_config, get_model, get_optimizer_param_scheduler

from slime_cli.errors import EngineError
from slime_cli.training.batching.microbatch import MicroBatch, filled
from slime_cli.training.network import chained, checkpoint, lora, stateless_adam
from slime_cli.training.network.routing import FREE, Routers

Head = Callable[..., torch.Tensor]
"""``head(mb, **given)``: what is read off the last hidden states (:mod:`slime_cli.training.network.heads`)."""
Loss = Callable[[MicroBatch, torch.Tensor], tuple[torch.Tensor, Any]]
"""``loss(mb, head's output)``: the micro-batch's part of the loss, and a report of it."""


class Network:
    """``provider`` builds the model from Megatron's arguments; ``name`` is what messages and spans call it."""

    def __init__(
        self,
        args: argparse.Namespace,
        provider: Callable[..., torch.nn.Module],
        name: str = "policy",
        *,
        skip_nan: bool = False,
        stateless_optimizer: bool = False,
    ) -> None:
        self.args = args
        self.name = name
        self.skip_nan = skip_nan
        if skip_nan:
            args.check_for_nan_in_loss_and_grad = False  # Megatron's own check ends the process
        self.activate()
        with contextlib.redirect_stdout(None):
            self.model = get_model(provider, ModelType.encoder_or_decoder)
            made: Any = get_megatron_optimizer_config(args)
            self.optimizer: Any = get_megatron_optimizer(made[0], self.model)
            if stateless_optimizer:
                args.dist_ckpt_optim_fully_reshardable = False  # that format asks for moments by name
                stateless_adam.take_over(chained.inner_optimizers(self.optimizer))
            self.scheduler = get_optimizer_param_scheduler(self.optimizer)
        self.config = get_model_config(self.model[0])
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.finalize_model_grads_func = finalize_model_grads
        self.device = next(self.model[0].parameters()).device
        self.routers = Routers(self.model, args.sequence_parallel)
        self._kept: dict[str, dict[str, torch.Tensor]] = {}

    def activate(self) -> None:
        """Makes this network's arguments the ones that Megatron's global functions read: building, saving and
        loading."""
        set_args(self.args)

    # -- weights ---------------------------------------------------------------------------------------------------

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of all weights that this rank holds, over virtual pipeline stages: parameters, and the buffers
        that a checkpoint has too (the bias by which a router chooses experts)."""
        for chunk, module in enumerate(self.model):
            for name, parameter in module.named_parameters():
                yield f"{chunk}.{name}", parameter.data
            for path, part in module.named_modules():
                for name, buffer in part.named_buffers(recurse=False):
                    if name not in part._non_persistent_buffers_set:
                        yield f"{chunk}.{path}.{name}", buffer

    def _changing(self) -> Iterator[tuple[str, torch.Tensor]]:
        """:meth:`parameters`; of a model with LoRA adapters these alone, since its other weights never change."""
        yield from lora.alone(dict(self.parameters())).items()

    def keep(self, name: str) -> None:
        """Host copies of the present weights, to be put back with :meth:`as_kept`."""
        self._kept[name] = self._copies()

    def keep_checkpoint(self, name: str, path: str | os.PathLike) -> None:
        """The weights of a checkpoint folder kept as ``name``; the present ones stay."""
        present = self._copies()
        self.load(path, weights_only=True)
        self.keep(name)
        self._put(present)
        self.optimizer.reload_model_params()

    @contextlib.contextmanager
    def as_kept(self, name: str) -> Iterator[None]:
        """The weights kept as ``name`` in place of the present ones, which come back afterwards whatever happens."""
        present = self._copies()
        self._put(self._kept[name])
        try:
            yield
        finally:
            self._put(present)

    def take_weights(self, other: "Network") -> None:
        """Copies every weight that both networks have; their layout is the same."""
        theirs = dict(other.parameters())
        for name, tensor in self.parameters():
            if name in theirs and theirs[name].shape == tensor.shape:
                tensor.copy_(theirs[name])
        self.optimizer.reload_model_params()

    def _copies(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().cpu().clone() for name, tensor in self._changing()}

    def _put(self, weights: dict[str, torch.Tensor]) -> None:
        for name, tensor in self._changing():
            tensor.copy_(weights[name])

    def start_saving(self, root: str | os.PathLike, iteration: int) -> pathlib.Path:
        """A checkpoint under ``root``: its folder, see :func:`slime_cli.training.network.checkpoint.start`."""
        self.activate()
        return checkpoint.start(self.args, str(root), iteration, self.model, self.optimizer, self.scheduler)

    def load(self, path: str | os.PathLike, *, weights_only: bool) -> int:
        """A checkpoint folder: all of it, to resume from, or its weights alone, to begin with. Its iteration."""
        self.activate()
        return checkpoint.load(self.args, path, self.model, self.optimizer, self.scheduler, weights_only=weights_only)

    # -- passes ------------------------------------------------------------------------------------------------------

    def forward(self, mbs: list[MicroBatch], head: Head, routing: str = FREE) -> list[torch.Tensor]:
        """What ``head`` reads off every micro-batch, without gradients; on the last pipeline stage."""
        return self._pass(mbs, head, lambda mb, out: out, routing, forward_only=True)

    def backward(self, mbs: list[MicroBatch], head: Head, loss: Loss, routing: str = FREE) -> list:
        """The gradient of the sum of ``loss(mb, head's output)`` over micro-batches and data-parallel ranks; the
        losses' reports, on the last stage. ``routing``: see :mod:`slime_cli.training.network.routing`."""
        # Megatron divides by the micro-batch count, multiplies by the context parallel ranks and, unless
        # --calculate-per-token-loss makes it add up, averages over these and the data-parallel ones; the weights in the
        # loss are global.
        ranks = (
            1 / self.args.context_parallel_size
            if self.args.calculate_per_token_loss
            else mpu.get_data_parallel_world_size()
        )
        scale = len(mbs) * ranks

        def scaled(mb: MicroBatch, out: torch.Tensor) -> tuple[torch.Tensor, Any]:
            value, report = loss(mb, out)
            if not value.requires_grad:  # Megatron would step with no gradient, or a pipeline wait for one forever
                raise RuntimeError(f"the loss of {self.name} does not depend on the network: it has no gradient")
            if mb.mtp_losses_D is not None:
                value = value + self.config.mtp_loss_scaling_factor * mb.mtp_losses_D.mean()
                mb.mtp_losses_D = None
            return value * scale, report

        self._scale_auxiliary_losses(mbs)
        for module in self.model:
            module.zero_grad_buffer()
        self.optimizer.zero_grad()
        return self._pass(mbs, head, scaled, routing, forward_only=False)

    def step(self) -> float:
        """One optimizer step along the gradient of :meth:`backward`; its norm before clipping."""
        grad_norm = self._apply()
        self.scheduler.step(increment=self.args.global_batch_size)
        return grad_norm

    def _scale_auxiliary_losses(self, mbs: list[MicroBatch]) -> None:
        """With --calculate-per-token-loss Megatron's routers multiply their load-balancing losses by the token count,
        for a division by all tokens of the step that Megatron would make later. The weights in slime's loss are divided
        already, so the factor is made here. Otherwise the losses are means over micro-batches and ranks by themselves.
        """
        if not (self.args.calculate_per_token_loss and self.config.num_moe_experts):
            return
        tokens = torch.tensor(float(sum(len(mb.tokens_T) for mb in mbs)), device=self.device)
        torch.distributed.all_reduce(tokens, group=mpu.get_data_parallel_group(with_context_parallel=True))
        self.config.moe_grad_scale_func = lambda: self.optimizer.scale_loss(1.0 / tokens)

    def _apply(self) -> float:
        """The optimizer's step; the gradient's norm before clipping. Nothing moves when it is not finite and is to be
        skipped."""
        before = math.nan
        if self.skip_nan or not self.args.clip_grad:  # Megatron gives the norm only where it clips
            self.optimizer.prepare_grads()
            before = float(self.optimizer.get_grad_norm())
            if self.skip_nan and not math.isfinite(before):
                return before
        ok, norm, _ = self.optimizer.step()
        norm = before if norm is None else norm
        if not ok or not math.isfinite(norm):
            raise EngineError(
                f"{self.name}: the gradient's norm is {norm}",
                "look at the rewards and log-probabilities of the last rollout; --on-nan-gradient skip leaves such"
                " steps out",
            )
        return norm

    def forget(self) -> None:
        """Adam's moments and step count as before the first step."""
        for inner in chained.inner_optimizers(self.optimizer):
            for group in inner.optimizer.param_groups:
                group.pop("step", None)
            for state in inner.optimizer.state.values():
                for value in state.values():
                    value.zero_()

    @property
    def lr(self) -> float:
        return self.optimizer.param_groups[0]["lr"]

    def _padding(self, mb: MicroBatch, model: Any) -> dict[str, torch.Tensor]:
        """Tells routers which tokens are padding: balancing the experts is about the others.

        Not with --calculate-per-token-loss, where Megatron then counts the tokens of all tensor and context parallel
        ranks for each of them (its all-reduce is in place, core 0.19.2), and not with an expert bias, where its shapes
        do not fit; a few tokens of padding count there.
        """
        if (
            not self.config.num_moe_experts
            or self.args.calculate_per_token_loss
            or self.config.moe_router_enable_expert_bias
        ):
            return {}
        padding_T = mb.padding_T
        inner: Any = unwrap_model(model)
        if self.args.sequence_parallel and not inner.pre_process:  # the first stage splits it by itself
            padding_T = padding_T.chunk(self.args.tensor_model_parallel_size)[mpu.get_tensor_model_parallel_rank()]
        return {"padding_mask": padding_T[None]}

    def _pass(self, mbs: list[MicroBatch], head: Head, last: Callable, routing: str, *, forward_only: bool) -> list:
        def forward_step(iterator: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
            mb = next(iterator)
            with self.routers.during(mb, self.model.index(model), routing):
                out = model(
                    mb.tokens_T[None],
                    filled(mb.pack.positions_T)[None],
                    None,
                    packed_seq_params=mb.pack,
                    output_processor=functools.partial(head, mb),
                    output_processor_context=None if forward_only or not mb.further else mb,
                    **self._padding(mb, model),
                )
            return out, lambda output, non_loss_data=False: last(mb, output)

        for module in self.model:
            module.eval() if forward_only else module.train()
        iterators = [iter(mbs) for _ in self.model]
        with torch.no_grad() if forward_only else contextlib.nullcontext():
            found = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iterators if len(iterators) > 1 else iterators[0],
                model=self.model,
                num_microbatches=len(mbs),
                seq_length=self.args.seq_length,
                micro_batch_size=1,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
            )
        self.routers.forget()
        return found
