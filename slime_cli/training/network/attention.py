"""Megatron's local layers made fit for packed sequences, on machines without Transformer Engine.

Stock local layers refuse packed sequences (DotProductAttention) and sequence parallelism (their RMSNorm). The classes
here are drop-ins for the same places of Megatron's layer spec; :func:`use` puts them in.

Attention over a pack is a kernel's that takes sequences of different lengths, where the device has one
(:func:`slime_cli.hardware.kernels.attention`). Elsewhere the pack's T tokens are regrouped into a few rectangles of
similar lengths (:class:`slime_cli.training.batching.packs.Rectangles`), and causal ``scaled_dot_product_attention``
runs on each, without a mask. Cost and memory follow the sum of squared lengths (or the tokens alone, with a flash
kernel), not T squared. Under context parallelism every rank gathers all keys and values and attends with its own
queries, in rectangles; their gradients go back summed.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import mpu, tensor_parallel
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch.distributed import ProcessGroup
from torch.nn.attention.bias import causal_lower_right

from slime_cli.hardware import kernels
from slime_cli.hardware.megatron import LatentAttention, become


class _Packed(RotaryEmbedding):
    """RoPE angles laid out token by token of a pack, from the positions that the pack carries."""

    _angles_T: torch.Tensor | None = None

    def get_rotary_seq_len(
        self,
        inference_context: Any,
        transformer: Any,
        transformer_input: Any,
        transformer_config: TransformerConfig,
        packed_seq_params: PackedSeqParams | None = None,
        *,
        inference_params: Any = None,
    ) -> int:
        self._angles_T = getattr(packed_seq_params, "angles_T", None)
        return super().get_rotary_seq_len(
            inference_context,
            transformer,
            transformer_input,
            transformer_config,
            packed_seq_params,
            inference_params=inference_params,
        )

    def _laid_out(self, angles: torch.Tensor) -> torch.Tensor:
        return angles if self._angles_T is None else angles[self._angles_T]


class PackedRotary(_Packed):
    def forward(  # pyright: ignore[reportIncompatibleVariableOverride]: Megatron's is cached
        self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: ProcessGroup | None = None
    ) -> torch.Tensor:
        return self._laid_out(super().forward(max_seq_len, offset, packed_seq, cp_group))


class PackedYarn(_Packed, YarnRotaryEmbedding):
    def forward(  # pyright: ignore[reportIncompatibleVariableOverride]: Megatron's is cached
        self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: ProcessGroup | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        angles, scale = super().forward(max_seq_len, offset, packed_seq, cp_group)
        return self._laid_out(angles), scale


def mark_sequence_parallel(parameter: Any, config: TransformerConfig) -> None:
    """Makes Megatron sum the parameter's gradient over sequence-parallel ranks."""
    parameter.sequence_parallel = config.sequence_parallel


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, with a weight that Megatron knows to be split by sequence parallelism; what it multiplies by is
    one more than the weight, where the model has it so (``--apply-layernorm-1p``)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        mark_sequence_parallel(self.weight, config)
        self.around_zero = config.layernorm_zero_centered_gamma
        if self.around_zero:
            torch.nn.init.zeros_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.around_zero:
            return super().forward(x)
        return F.rms_norm(x.float(), self.normalized_shape, 1 + self.weight.float(), self.eps).to(x.dtype)


class PackedAttention(MegatronModule):
    """Causal attention in Megatron's ``core_attention`` place: packed ``[T, heads, dim]`` or plain ``[s, b, heads,
    dim]``."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: Any,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale
        self.kernel = None
        if config.context_parallel_size == 1:
            tp = config.tensor_model_parallel_size
            heads, groups = config.num_attention_heads // tp, max(1, (config.num_query_groups or 1) // tp)
            width, value_width = (n or config.kv_channels or 0 for n in (k_channels, v_channels))
            groups = groups if k_channels is None else heads  # latent attention has a key for every head
            shape = kernels.Shape(kernels.here(), config.params_dtype, heads, groups, width, value_width)
            self.kernel = kernels.attention(shape)
        if config.attention_dropout:
            raise ValueError("attention dropout is not supported by the packed attention: pass --attention-dropout 0")

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        **unused: Any,
    ) -> torch.Tensor:
        if packed_seq_params is None:
            out = self._causal(*(x.permute(1, 2, 0, 3) for x in (query, key, value)))
            return out.permute(2, 0, 1, 3).reshape(query.size(0), query.size(1), -1)
        query, key, value = (x.squeeze(1) if x.dim() == 4 else x for x in (query, key, value))
        if self.config.context_parallel_size > 1:
            group = mpu.get_context_parallel_group()
            key, value = (
                tensor_parallel.gather_from_sequence_parallel_region(x.contiguous(), group=group) for x in (key, value)
            )
        elif self.kernel is not None:
            pack = packed_seq_params
            return self.kernel(query, key, value, pack.ends_N1, pack.max_seqlen_q, self.scale).flatten(1)
        shape = packed_seq_params.rectangles
        parts = []
        for queries, keys in zip(shape.queries, shape.keys):
            q, k, v = (
                x[at].transpose(1, 2) for x, at in ((query, queries), (key, keys), (value, keys))
            )  # [n, heads, L, dim]
            parts.append(self._causal(q, k, v).transpose(1, 2).reshape(queries.numel(), -1))
        return torch.cat(parts)[shape.scatter_T]

    def _causal(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The last query sees every key. Memory is linear in the lengths on CUDA; on a CPU a chunk's mask against its
        keys is made."""
        later = k.size(2) != q.size(2)
        if (later or q.device.type == "cpu") and k.size(1) != q.size(1):  # kernels without grouped queries
            k, v = (x.repeat_interleave(q.size(1) // k.size(1), dim=1) for x in (k, v))
        if later:
            return F.scaled_dot_product_attention(q, k, v, causal_lower_right(q.size(2), k.size(2)), scale=self.scale)
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.scale, enable_gqa=k.size(1) != q.size(1)
        )


def use(spec: Any) -> Any:
    """Puts the classes above into a local layer or block spec, in place; returns it."""
    for layer in spec.layer_specs if hasattr(spec, "layer_specs") else [spec]:
        attention = layer.submodules.self_attention.submodules
        if hasattr(attention, "core_attention"):
            attention.core_attention = PackedAttention
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
        for norm in ("q_layernorm", "k_layernorm", "kv_layernorm"):
            if getattr(attention, norm, None) not in (None, IdentityOp):
                setattr(attention, norm, RMSNorm)
        layer.submodules.sharded_state_dict_keys_map = _checkpoint_names(layer.submodules)
    if hasattr(spec, "layer_specs"):
        spec.layer_norm = RMSNorm
    return spec


def use_latent_attention(spec: Any) -> None:
    for layer in spec.layer_specs:
        layer.submodules.self_attention.module = LatentAttention


def _checkpoint_names(layer: Any) -> dict[str, str]:
    """Local name -> Transformer Engine's, which fuses most norms into the linear that follows; checkpoints go by the
    latter, so that one written on either kind of layers loads on the other. Megatron's own table is for dense layers
    without latent attention.
    """
    if hasattr(layer.self_attention.submodules, "kv_layernorm"):
        out = {f"self_attention.{x}_layernorm.": f"self_attention.linear_{x}_up_proj.layer_norm_" for x in ("q", "kv")}
    else:
        linear = "in_proj" if hasattr(layer.self_attention.submodules, "in_proj") else "linear_qkv"
        out = {"input_layernorm.": f"self_attention.{linear}.layer_norm_"}
    if getattr(layer.mlp, "func", None) is not MoELayer:
        out["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    return out


def use_packed_rotary(model: torch.nn.Module) -> None:
    """Every rotary embedding of a built model takes its positions from the pack; modules and buffers stay as they
    are."""
    become(model, PACKED)


PACKED = {RotaryEmbedding: PackedRotary, YarnRotaryEmbedding: PackedYarn}
