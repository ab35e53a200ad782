"""The model: Megatron's GPTModel, in Transformer Engine's layers where they are installed, else in local ones."""

import importlib.util

from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.global_vars import get_args

from slime_cli.training import attention


def has_transformer_engine() -> bool:
    """True where the genuine package is installed (the CPU stand-in has no file)."""
    spec = importlib.util.find_spec("transformer_engine")
    return spec is not None and spec.origin is not None


def provider(pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None):
    """Builds this rank's part of the model from Megatron's current arguments (the signature that Megatron calls)."""
    args = get_args()
    config = config or core_transformer_config_from_args(args)
    local = args.transformer_impl == "local"
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=not local, vp_stage=vp_stage)
    if local:
        attention.use(spec)
    model = GPTModel(
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
        vp_stage=vp_stage,
    )
    if local:
        model.rotary_pos_emb.__class__ = attention.PackedRotary  # same module and buffers, positions from the pack
    return model
