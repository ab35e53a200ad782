"""Multi-token prediction (MTP): layers behind the model that predict tokens further ahead (DeepSeek-V3, arXiv
2412.19437, section 2.2). Engines draft with them; they are trained here beside the policy and never move it.

Depth k takes the hidden state of a place and the embedding of the token k places on, and predicts the token after that
one. Hidden states, embedding and output weight are cut from the graph first, so a loss of these layers has a gradient
for nothing else: the policy's is the same to the bit with and without them. Megatron clips their gradient by itself
(``mtp_detach_heads``). They run in passes that train alone.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
from megatron.core.transformer import TransformerConfig

from slime_cli.hardware import adaptations
from slime_cli.training.algorithm.losses import masked
from slime_cli.training.batching.microbatch import MicroBatch
from slime_cli.training.network import heads
from slime_cli.training.network.any_layers import Saved
from slime_cli.training.network.attention import RMSNorm


def block_spec(config: TransformerConfig, spec: Any, *, local: bool, vp_stage: int | None) -> Any:
    """The spec of the MTP layers on this rank, whose inner layer is the model's last; None where there are none."""
    block: Any = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=not local, vp_stage=vp_stage)
    if block is not None and local:
        for layer in block.layer_specs:
            layer.submodules.enorm = layer.submodules.hnorm = layer.submodules.layer_norm = RMSNorm
    return block


@adaptations.MTP.overrides("_postprocess")
class MultiTokenModel(Saved):
    """Megatron's model with MTP layers. ``output_processor_context`` is the micro-batch whose MTP losses are wanted."""

    def _postprocess(self, hidden_states: torch.Tensor, **given: Any) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        mb = given.get("output_processor_context")
        if self.mtp_process and mb is not None:
            mb.mtp_losses_D = self._losses(hidden_states.detach(), mb, given)
        with self._layers_left_out():
            return super()._postprocess(hidden_states, **given | {"mtp_in_postprocess": False})

    @contextlib.contextmanager
    def _layers_left_out(self) -> Iterator[None]:
        """Megatron's own code would take the hidden states for those of all depths, one after the other."""
        depths = self.config.mtp_num_layers
        self.config.mtp_num_layers = None
        try:
            yield
        finally:
            self.config.mtp_num_layers = depths

    def _losses(self, hidden_SBH: torch.Tensor, mb: MicroBatch, given: dict[str, Any]) -> torch.Tensor:
        """This micro-batch's part of each depth's loss, the negative log-likelihood of the trained tokens: [D]."""
        tied = self.share_embeddings_and_output_weights
        weight: Any = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        losses = []
        layers: Any = self.mtp.layers
        for layer, rows in zip(layers, mb.further, strict=True):
            hidden_SBH = layer.forward_single_position(
                hidden_SBH,
                rows.tokens_T[None],
                rows.tokens_T[None],  # positions, which a rotary model's embedding does not read
                self._embedding_cut,
                rotary_pos_emb=given["rotary_pos_emb"],
                packed_seq_params=given["packed_seq_params"],
            )
            log_probs_R, _ = heads.log_probs(
                rows,
                temperature=1.0,
                hidden_states=hidden_SBH,
                output_layer=self.output_layer,
                output_weight=weight.detach(),
                scale_logits=self._scale_logits,
                config=self.config,
            )
            losses.append((masked(-log_probs_R, rows.mask_R) * rows.weight_R).sum())
        return torch.stack(losses)

    def _embedding_cut(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return self.embedding(input_ids=input_ids, position_ids=position_ids).detach()
