"""The model: Megatron's GPTModel, in Transformer Engine's layers where they are installed, else in local ones."""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.global_vars import get_args

from slime_cli.errors import UsageError
from slime_cli.hardware.megatron import become, fuse
from slime_cli.hooks.kinds import accepted
from slime_cli.training.network import any_layers, attention, delta_net, layers, mtp
from slime_cli.training.network.attention import mark_sequence_parallel


def provider(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: TransformerConfig | None = None,
    pg_collection: Any = None,
) -> GPTModel:
    """Builds this rank's part of the model from Megatron's current arguments (the signature that Megatron calls)."""
    args: Any = get_args()
    config = config or core_transformer_config_from_args(args)
    variant = config.experimental_attention_variant
    if variant not in (None, "gated_delta_net"):
        raise UsageError(
            f"attention variant {variant}: Megatron has it on Transformer Engine's layers only",
            "slime does not train or convert this architecture yet",
        )
    if config.multi_latent_attention:
        _yarn(config, args)
    local = args.transformer_impl == "local"
    fuse(config, local=local, angles=args.position_embedding_type == "rope")
    config.experimental_attention_variant = None  # Megatron's specs of local layers have none
    spec: Any = get_gpt_decoder_block_spec(config, use_transformer_engine=not local, vp_stage=vp_stage)
    config.experimental_attention_variant = variant
    if variant:
        config.hetereogenous_dist_checkpoint = True
        delta_net.use(spec, config, vp_stage)
    if local:
        attention.use(spec)
        layers.use(spec, config, args)
    if config.multi_latent_attention and (local or getattr(config, "q_lora_rank", None) is None):
        attention.use_latent_attention(spec)
    depths = None
    if config.mtp_num_layers:
        config.mtp_detach_heads = True
        depths = mtp.block_spec(config, spec, local=local, vp_stage=vp_stage)
    model: Any = GPTModel(
        config,
        spec,
        args.padded_vocab_size,
        args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=False,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        mtp_block_spec=depths,
        vp_stage=vp_stage,
    )
    if local:
        attention.use_packed_rotary(model)
    any_layers.checkpoints(model)
    if config.mtp_num_layers:
        become(model, {any_layers.Saved: mtp.MultiTokenModel})
    return model


def _yarn(config: TransformerConfig, args: argparse.Namespace) -> None:
    """Megatron's command line sets these of the plain attention only; latent attention has them under other names."""
    for name in ("original_max_position_embeddings", "beta_fast", "beta_slow"):
        value = getattr(args, f"yarn_{name}")
        if value is not None:
            setattr(config, name, value)


class ValueHead(torch.nn.Module):
    """One number a token in the place of the output layer: PPO's critic reads it off the last hidden state.

    The weight is whole on every tensor-parallel rank. With sequence parallelism a rank sees a slice of the sequence, so
    the values are gathered, and Megatron sums the weight's gradient over those ranks because of the mark on it.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        mark_sequence_parallel(self.weight, config)
        self.sequence_parallel = config.sequence_parallel

    def forward(
        self,
        hidden_SBH: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[torch.Tensor, None]:
        """Values [S, B, 1] and no bias, as Megatron's output layer answers. ``weight``: a tied embedding, unused."""
        values_SB1 = torch.nn.functional.linear(hidden_SBH, self.weight)
        if self.sequence_parallel:
            values_SB1 = gather_from_sequence_parallel_region(values_SB1, tensor_parallel_output_grad=False)
        return values_SB1, None


def users(hook: Callable[..., torch.nn.Module]) -> Callable[..., GPTModel]:
    """A provider that asks ``--custom-model-provider-path``. UsageError for anything but a GPTModel."""

    def build(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None, **_: Any) -> GPTModel:
        model = hook(pre_process, post_process, **accepted(hook, vp_stage=vp_stage))
        if not isinstance(model, GPTModel):
            raise UsageError(
                f"--custom-model-provider-path returned {type(model).__name__}, not Megatron's GPTModel",
                "change what slime_cli.training.network.model.provider(pre_process, post_process) returns",
            )
        return any_layers.checkpoints(model)

    return build


def critics(build: Callable[..., GPTModel]) -> Callable[..., GPTModel]:
    """``build`` with a value head, which begins at zero: the first advantages are those of no critic at all."""

    def critic(pre_process: bool = True, post_process: bool = True, **more: Any) -> GPTModel:
        model: Any = build(pre_process=pre_process, post_process=post_process, **more)
        if post_process:
            head = ValueHead(model.config)
            head.to(next(model.parameters()).device)
            model.output_layer = head
        return model

    return critic
