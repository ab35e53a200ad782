"""Local layers that some families need and Megatron has not: norms behind attention and feed-forward (GLM-4), and norms
of queries and keys over all heads at once (MiniMax-M2)."""

import functools
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer import TransformerConfig
from torch.distributed.nn.functional import all_reduce

from slime_cli.training.network.attention import RMSNorm


class NormedLinear(RowParallelLinear):
    """The last linear layer of attention or feed-forward, whose output is normed before the residual is added."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **more: Any) -> None:
        super().__init__(input_size, output_size, config=config, **more)
        self.post_layernorm = RMSNorm(config, output_size, config.layernorm_epsilon)

    def forward(self, input_: torch.Tensor) -> Any:
        """The output, and the bias that was not added: none."""
        out, bias = super().forward(input_)
        if bias is not None:
            raise ValueError("a bias behind the norm is not what such a model has")
        return self.post_layernorm(out), None


class NormOverHeads(torch.nn.Module):
    """RMSNorm of all queries or all keys of a token. The weight [heads x dim] is whole on every tensor parallel rank,
    which has the gradient of its own heads' part; Megatron adds them up, as it does for any norm of queries and keys.
    """

    def __init__(self, heads: int, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(heads * hidden_size, dtype=config.params_dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [..., this rank's heads, dim]."""
        squares = x.float().square().sum((-2, -1), keepdim=True)
        if mpu.get_tensor_model_parallel_world_size() > 1:
            group: Any = mpu.get_tensor_model_parallel_group()
            squares = all_reduce(squares, group=group)
        own = self.weight.view(-1, *x.shape[-2:])[mpu.get_tensor_model_parallel_rank()]
        return own * (x.float() * torch.rsqrt(squares / self.weight.numel() + self.eps)).to(x.dtype)


def use(spec: Any, config: TransformerConfig, args: Any) -> None:
    """Puts into a local block spec what the options ask for, in place."""
    for layer in spec.layer_specs:
        attention = layer.submodules.self_attention.submodules
        if args.post_self_attn_layernorm:
            attention.linear_proj = NormedLinear
        if args.post_mlp_layernorm:
            layer.submodules.mlp.keywords["submodules"].linear_fc2 = NormedLinear
        if args.qk_layernorm_over_heads:
            heads = (config.num_attention_heads, config.num_query_groups or config.num_attention_heads)
            attention.q_layernorm, attention.k_layernorm = (functools.partial(NormOverHeads, n) for n in heads)
