"""Qwen3-Next's and Qwen3.5's linear attention, the gated delta net (arXiv 2412.06464), in Megatron's local layers.

Megatron's own class wants flash-linear-attention and a GPU; this one has its parameters, names and checkpoints and
computes a pack with :mod:`slime_cli.training.network.delta_rule`, on any device. The convolution and the state begin
anew in each sequence. Tensor parallel ranks have heads of their own. Context parallel ranks swap: each gets all tokens
for its share of the heads, in the sequences' own order, and gives the outputs back.
"""

import copy
import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import mpu, tensor_parallel
from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_linear_attention_pattern
from megatron.core.ssm import gated_delta_net
from megatron.core.tensor_parallel.mappings import all_to_all
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from slime_cli.training.batching.packs import Pack
from slime_cli.training.network import delta_rule


def use(spec: Any, config: TransformerConfig, vp_stage: int | None) -> None:
    """Puts linear attention into the layers of a local block spec that have it, in place."""
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    linear = get_linear_attention_pattern(config)[first:]
    for number, layer in enumerate(spec.layer_specs):
        if linear[number]:
            old = layer.submodules.self_attention.submodules
            parts = gated_delta_net.GatedDeltaNetSubmodules(in_proj=old.linear_qkv, out_proj=old.linear_proj)
            spec.layer_specs[number] = copy.copy(layer)
            spec.layer_specs[number].submodules = dataclasses.replace(
                layer.submodules, self_attention=ModuleSpec(module=GatedDeltaNet, submodules=parts)
            )


class GatedDeltaNet(gated_delta_net.GatedDeltaNet):
    """In the place of a layer's ``self_attention``. megatron-bridge knows it by its name."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: gated_delta_net.GatedDeltaNetSubmodules,
        layer_number: int,
        pg_collection: Any,
        **unused: Any,
    ) -> None:
        MegatronModule.__init__(self, config)  # the class above would look for flash-linear-attention
        self.layer_number = layer_number
        self.pg_collection = pg_collection
        self.tp_size = config.tensor_model_parallel_size
        self.cp_size = config.context_parallel_size
        self.conv_bias = False
        self.heads = (config.linear_num_value_heads or 0) // self.tp_size
        self.groups = (config.linear_num_key_heads or 0) // self.tp_size
        self.key_dim, self.value_dim = (x or 0 for x in (config.linear_key_head_dim, config.linear_value_head_dim))
        self.qk_dim_local_tp = self.groups * self.key_dim
        self.v_dim_local_tp = self.heads * self.value_dim
        self.conv_dim_local_tp = 2 * self.qk_dim_local_tp + self.v_dim_local_tp
        self.in_proj_split_names = ["query", "key", "value", "z", "beta", "alpha"]
        qk, v = self.qk_dim_local_tp, self.v_dim_local_tp
        self.in_proj_split_sections = (qk, qk, v, v, self.heads, self.heads)
        self.in_proj_dim = sum(self.in_proj_split_sections) * self.tp_size
        self._build(config, submodules)

    def _build(self, config: TransformerConfig, submodules: gated_delta_net.GatedDeltaNetSubmodules) -> None:
        def linear(kind: Any, rows: int, columns: int, init: Any, **more: Any) -> Any:
            return kind(
                rows,
                columns,
                config=config,
                init_method=init,
                bias=False,
                is_expert=False,
                tp_group=self.pg_collection.tp,
                **more,
            )

        self.in_proj = linear(
            submodules.in_proj,
            config.hidden_size,
            self.in_proj_dim,
            config.init_method,
            gather_output=False,
            skip_bias_add=False,
        )
        self.out_proj = linear(
            submodules.out_proj,
            self.v_dim_local_tp * self.tp_size,
            config.hidden_size,
            config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
        )
        device = self.in_proj.weight.device
        channels = self.conv_dim_local_tp
        width = config.linear_conv_kernel_dim or 0
        made = dict(device=device, dtype=config.params_dtype)
        self.out_norm = torch.nn.RMSNorm(self.value_dim, eps=config.layernorm_epsilon, **made)
        self.conv1d = torch.nn.Conv1d(channels, channels, width, groups=channels, bias=False, **made)
        self.dt_bias = torch.nn.Parameter(torch.ones(self.heads, **made))
        self.A_log = torch.nn.Parameter(torch.empty(self.heads, **made).uniform_(1, 16).log())
        for parameter in (self.conv1d.weight, self.dt_bias, self.A_log):
            tensor_parallel.set_tensor_model_parallel_attributes(parameter, True, 0, 1)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]: what it does not read is not named
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        packed_seq_params: Pack | None = None,
        **unused: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``hidden_states`` [T, 1, H] of a pack -> the same, and the bias, which there is none of."""
        if packed_seq_params is None:
            raise ValueError("the gated delta net takes packed sequences")
        whole = packed_seq_params.whole
        mixed, _ = self.in_proj(hidden_states)
        mixed_TF = self._to_heads(mixed.squeeze(1))[whole.order_T]
        sections = [size // self.cp_size for size in self.in_proj_split_sections]
        q, k, v, z, b, a = mixed_TF.split(sections, -1)
        q, k, v = self._convolved(torch.cat([q, k, v], -1), whole.positions_T).split(sections[:3], -1)
        share = slice(*self._share(self.heads))
        g_TN = -self.A_log[share].float().exp() * F.softplus(a.float() + self.dt_bias[share].float())
        each = self.heads // self.groups
        q, k = (_normed(x.unflatten(-1, (-1, self.key_dim))).repeat_interleave(each, dim=1) for x in (q, k))
        v = v.unflatten(-1, (-1, self.value_dim))
        out = delta_rule.gated_delta_rule(q, k, v, g_TN, b.float().sigmoid(), whole.chunks)
        back = self._to_tokens(self._gated(out.to(v.dtype), z.view_as(v))[whole.inverse_T])
        return self.out_proj(back[:, None])

    def _gated(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Normed over each head, with a weight that the heads of all tensor parallel ranks share, times the gate."""
        weight = tensor_parallel.copy_to_tensor_model_parallel_region(self.out_norm.weight).float()
        normed = F.rms_norm(out.float(), (self.value_dim,), weight, self.out_norm.eps)
        return (normed * F.silu(gate.float())).to(out.dtype).flatten(1)

    def _share(self, size: int) -> tuple[int, int]:
        """The part of ``size`` channels or heads that this context parallel rank computes: first and end."""
        each = size // self.cp_size
        rank = mpu.get_context_parallel_rank()
        return rank * each, (rank + 1) * each

    def _convolved(self, x_TF: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        """SiLU of the causal convolution, whose window ends where the sequence begins. ``x_TF``: q, k and v."""
        sizes = self.in_proj_split_sections[:3]
        parts = self.conv1d.weight.squeeze(1).split(sizes)
        weight_FK = torch.cat([part[slice(*self._share(len(part)))] for part in parts])
        width = weight_FK.size(1)
        out_TF = x_TF * weight_FK[:, -1]
        for back in range(1, width):
            earlier_TF = F.pad(x_TF, (0, 0, back, 0))[: len(x_TF)]
            inside_T1 = (positions_T >= back)[:, None]
            out_TF = out_TF + torch.where(inside_T1, earlier_TF, 0) * weight_FK[:, width - 1 - back]
        return F.silu(out_TF)

    def _to_heads(self, x_TF: torch.Tensor) -> torch.Tensor:
        """From this rank's tokens with all channels of its tensor parallel part to all ranks' tokens, one rank's after
        the other's, with its share of each section."""
        if self.cp_size == 1:
            return x_TF
        parts = [x.unflatten(-1, (self.cp_size, -1)) for x in x_TF.split(self.in_proj_split_sections, -1)]
        by_rank = torch.cat(parts, -1).transpose(0, 1).flatten(0, 1)
        return all_to_all(self.pg_collection.cp, by_rank.contiguous())

    def _to_tokens(self, x_TF: torch.Tensor) -> torch.Tensor:
        """The way back: this rank's tokens with all its heads' outputs."""
        if self.cp_size == 1:
            return x_TF
        by_rank = all_to_all(self.pg_collection.cp, x_TF.contiguous()).unflatten(0, (self.cp_size, -1))
        return by_rank.transpose(0, 1).flatten(1)


def _normed(x: torch.Tensor) -> torch.Tensor:
    """Scaled to length 1, in float32; the epsilon is transformers' and flash-linear-attention's."""
    x = x.float()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
