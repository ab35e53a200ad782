"""HF names <-> Megatron weights through megatron-bridge, for models built with local layers as well.

Transformer Engine fuses the two layer norms into the linears that follow them and megatron-bridge knows those names only;
local layers keep the norms apart, so each such mapping gets a twin under the local name.
"""

import contextlib
import logging
import warnings
from collections.abc import Iterator

import torch

FUSED_TO_LOCAL = {
    ".self_attention.linear_qkv.layer_norm_weight": ".input_layernorm.weight",
    ".mlp.linear_fc1.layer_norm_weight": ".pre_mlp_layernorm.weight",
}


def _with_local_names(bridge_class) -> None:
    if getattr(bridge_class, "_slime_local_names", False):
        return
    from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
    from megatron.bridge.models.conversion.param_mapping import AutoMapping

    original = bridge_class.mapping_registry

    def mapping_registry(self):
        mappings = list(original(self).mappings)
        for mapping in list(mappings):
            for fused, local in FUSED_TO_LOCAL.items():
                if mapping.megatron_param.startswith("decoder.") and mapping.megatron_param.endswith(fused):
                    name = mapping.megatron_param.replace(fused, local)
                    mappings.append(AutoMapping(megatron_param=name, hf_param=mapping.hf_param))
        return MegatronMappingRegistry(*mappings)

    bridge_class.mapping_registry = mapping_registry
    bridge_class._slime_local_names = True


def _say_whether_tied(model: list) -> None:
    """megatron-bridge asks the config, where its own providers put it; Megatron's own config does not say, and a tied model's
    output weight on the last pipeline stage would be left as it was initialised."""
    from megatron.core.utils import unwrap_model

    for module in unwrap_model(model):
        module.config.share_embeddings_and_output_weights = module.share_embeddings_and_output_weights


class Bridge:
    """Moves weights between a model on these ranks and an HF checkpoint folder. All ranks call every method."""

    def __init__(self, hf_checkpoint: str, dtype: torch.dtype):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from megatron.bridge import AutoBridge

            logging.getLogger("megatron.bridge").setLevel(logging.ERROR)
            self._bridge = AutoBridge.from_hf_pretrained(hf_checkpoint, torch_dtype=dtype)
        _with_local_names(type(self._bridge._model_bridge))

    def load(self, model: list) -> None:
        """HF weights into the model's parameters."""
        _say_whether_tied(model)
        with contextlib.redirect_stdout(None):
            self._bridge.load_hf_weights(model)

    def export(self, model: list) -> Iterator[tuple[str, torch.Tensor]]:
        """(HF name, whole tensor on the CPU) of every weight, gathered over tensor and pipeline ranks."""
        _say_whether_tied(model)
        yield from self._bridge.export_hf_weights(model, cpu=True, show_progress=False)
