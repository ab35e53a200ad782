"""Megatron adapted in this process where its options and hooks do not reach: see :mod:`.adaptations` for each reason.

Callers: :mod:`slime_cli.training.network`. Imported where Megatron is.
"""

import argparse
import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from slime_cli.hardware import adaptations, kernels


@contextlib.contextmanager
def command_line(argv: list[str]) -> Iterator[None]:
    """Megatron's parser reads ``argv`` meanwhile."""
    saved = sys.argv
    adaptations.COMMAND_LINE.replace(sys, argv=["megatron", *argv])
    try:
        yield
    finally:
        adaptations.COMMAND_LINE.replace(sys, argv=saved)


@contextlib.contextmanager
def async_save_kept(args: argparse.Namespace) -> Iterator[None]:
    """What is validated meanwhile leaves ``--async-save`` as it is given."""
    adaptations.ASYNC_SAVE.rely_on(args, "async_save")
    given = args.async_save
    yield
    args.async_save = given


def queue_for_results(*, another: bool) -> None:
    """Makes the queue that Megatron's next writer reports to. ``another``: while an earlier writer still has one."""
    adaptations.WRITER_QUEUE.rely_on(filesystem_async, "_results_queue", "get_write_results_queue")
    if another:
        adaptations.WRITER_QUEUE.replace(filesystem_async, _results_queue=None)
    filesystem_async.get_write_results_queue("fork")


def give_state(inner: Any) -> None:
    """The state that one of Megatron's optimizers begins with, where it has not stepped yet."""
    adaptations.OPTIMIZER_STATE.rely_on(inner, "init_state_fn")
    optimizer = inner.optimizer
    if inner.init_state_fn is None:
        return
    inner.init_state_fn(optimizer, inner.config)
    if isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        for state in optimizer.state.values():
            # Megatron leaves a step of 0 out of the checkpoint, and torch then refuses it. This one is not 0, and the
            # next is 1 exactly.
            state["step"] = torch.tensor(1e-30)


def give_state_to_load_into(inner: Any) -> None:
    """Tensors that a sharded load of one of Megatron's distributed optimizers fills, where it has none yet."""
    adaptations.OPTIMIZER_STATE.rely_on(inner, "_init_optimizer_states_with_dummy_values")
    inner._init_optimizer_states_with_dummy_values()


def step_with(inner: Any, optimizer: torch.optim.Optimizer, init_state: Any) -> None:
    """One of Megatron's optimizers steps with ``optimizer`` from now on."""
    adaptations.STATELESS_ADAM.replace(inner, optimizer=optimizer, init_state_fn=init_state)


def become(model: torch.nn.Module, kinds: Mapping[type, type]) -> None:
    """Every module of a kind that is a key becomes one of its subclass; what it holds stays as it is."""
    for module in model.modules():
        if kind := kinds.get(type(module)):
            if not issubclass(kind, type(module)):
                raise adaptations.PACKED_ROTARY.unfit(f"{kind.__name__} is no {type(module).__name__}")
            module.__class__ = kind


def fuse(config: Any, *, local: bool, angles: bool) -> None:
    """Turns on, in a config whose model is built next, what Megatron has a place for and this device has a kernel for.
    ``local``: the model gets local layers, not Transformer Engine's, which bring a fused RoPE. ``angles``: queries and
    keys are turned by angles alone (YaRN has a factor besides)."""
    device = kernels.here()
    config.gradient_accumulation_fusion = (
        config.gradient_accumulation_fusion and kernels.weight_gradients(device) is not None
    )
    other = config.multi_latent_attention or config.rotary_interleaved or not angles
    if not local:
        config.apply_rope_fusion = not other
        return
    rotary = None if other or config.context_parallel_size > 1 else kernels.rotary(device)
    if rotary is None:
        return

    def whole(t: torch.Tensor, freqs: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
        return rotary.rotate(t, freqs)

    def packed(t: torch.Tensor, cu_seqlens: torch.Tensor, freqs: torch.Tensor, **more: Any) -> torch.Tensor:
        return rotary.rotate(t, freqs)  # whose angles PackedRotary has laid out token by token

    adaptations.FUSED_ROTARY.replace(
        rope_utils, fused_apply_rotary_pos_emb=whole, fused_apply_rotary_pos_emb_thd=packed
    )
    config.apply_rope_fusion = True


def say_whether_tied(module: Any) -> None:
    """A tied model's output weight on the last pipeline stage would be left as it was initialised otherwise."""
    adaptations.TIED_OUTPUT.rely_on(module, "share_embeddings_and_output_weights")
    module.config.share_embeddings_and_output_weights = module.share_embeddings_and_output_weights


@adaptations.LATENT_ATTENTION.overrides("_resolve_qk_norm_config", "_qkv_down_projection")
class LatentAttention(MLASelfAttention):
    """Megatron's latent attention with two faults corrected.

    Queries that are not compressed are not normed (Moonlight), where Megatron wants a norm for queries and keys or for
    neither. And on tensor parallel ranks local layers gather the keys' rotary part, which all heads share, in a way
    that drops what the heads of other ranks add to its gradient.
    """

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        if self.config.q_lora_rank is not None:
            return super()._resolve_qk_norm_config(submodules)
        return {
            "linear_q_proj": submodules.linear_q_proj,
            "linear_q_up_proj": IdentityOp,
            "q_layernorm": IdentityOp,
            "linear_kv_up_proj": submodules.linear_kv_up_proj,
            "kv_layernorm": submodules.kv_layernorm,
        }

    def _qkv_down_projection(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q_compressed, kv_combined = super()._qkv_down_projection(hidden_states)
        widths = [self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim]
        if kv_combined.size(-1) == sum(widths):
            return q_compressed, kv_combined
        kv_combined = tensor_parallel.gather_from_tensor_model_parallel_region(kv_combined)
        if self.config.sequence_parallel:
            # Megatron's own code gathers the rotary part from here, and sums its gradient.
            return q_compressed, tensor_parallel.scatter_to_sequence_parallel_region(kv_combined)
        compressed, rotary = kv_combined.split(widths, dim=-1)
        whole = tensor_parallel.copy_to_tensor_model_parallel_region(rotary)
        return q_compressed, torch.cat([compressed, whole], dim=-1)
