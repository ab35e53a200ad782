"""megatron-bridge adapted on an instance: no class of its own is changed. Caller: :mod:`slime_cli.weights.bridge`.

Transformer Engine keeps a layer's experts in one grouped module, and for some architectures megatron-bridge knows those
names only; local layers keep each expert apart, so such a mapping gets a twin under the local name. It knows by itself
that local layers keep the norms apart, but not those inside of multi-token-prediction (MTP) layers. Of a model with
vision (Qwen3.5) the language model alone is built, so its mappings lose their prefix.
"""

import copy
import re
from collections.abc import Callable
from typing import Any

import torch
from megatron.bridge import AutoBridge
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.conversion.param_mapping import (
    AutoMapping,
    GatedMLPMapping,
    MegatronParamMapping,
    ReplicatedMapping,
    RMSNorm2ZeroCenteredRMSNormMapping,
)
from megatron.bridge.models.hf_pretrained.state import StateDict, StateSource
from megatron.bridge.models.minimax_m2.minimax_m2_bridge import _FullDimQKNormMapping
from megatron.bridge.models.qwen.qwen2_bridge import Qwen2Bridge
from megatron.core.models.gpt import GPTModel

from slime_cli.hardware import adaptations

GROUPED = re.compile(r"(.*\.mlp\.experts)\.(linear_fc[12])\.weight\*")
"""Megatron's name of a grouped expert's weight; its last wildcard is the expert's number."""

MTP_NORM = re.compile(r"(mtp\.layers\..*\.mtp_model_layer)\.(.*)\.layer_norm_weight")
"""Megatron's name of a norm in an MTP layer that Transformer Engine fuses into the linear layer behind it."""
MTP_NORMS = {
    "self_attention.linear_qkv": "input_layernorm",
    "self_attention.linear_q_up_proj": "self_attention.q_layernorm",
    "self_attention.linear_kv_up_proj": "self_attention.kv_layernorm",
    "mlp.linear_fc1": "pre_mlp_layernorm",
}
"""Such a linear layer -> the norm's own name in local layers."""


WHOLE = (RMSNorm2ZeroCenteredRMSNormMapping, _FullDimQKNormMapping)
"""Mappings of norms that slime's layers keep as HF does, whole on every rank: the delta net's, which is not around
zero, and those over all heads."""


@adaptations.EXPERTS_BY_LOCAL_NAMES.overrides("_model_bridge")
class LocalBridge(AutoBridge):
    """An AutoBridge whose mappings know local layers as well."""

    @property
    def _model_bridge(self) -> Any:
        """A new one at each call, as megatron-bridge makes it."""
        bridge = super()._model_bridge
        known = bridge.mapping_registry
        adaptations.EXPERTS_BY_LOCAL_NAMES.replace(bridge, mapping_registry=lambda: with_local_names(known()))
        return bridge

    def read_from(self, names: list[str], read: Callable[[str], torch.Tensor]) -> None:
        """The checkpoint's tensors are ``names``, and ``read`` gives each, whatever its files hold."""
        adaptations.QUANTISED_READ.replace(self.hf_pretrained, _state_dict_accessor=StateDict(_Read(names, read)))


class _Read(StateSource):
    """Tensors that a function gives."""

    def __init__(self, names: list[str], read: Callable[[str], torch.Tensor]) -> None:
        self._names = names
        self._tensor = read

    def get_all_keys(self) -> list[str]:
        return self._names

    def load_tensors(self, keys: list[str]) -> dict[str, torch.Tensor]:
        return {key: self._tensor(key) for key in keys}


def with_local_names(registry: MegatronMappingRegistry) -> MegatronMappingRegistry:
    mappings = of_language_model(list(registry.mappings))
    known = {mapping.megatron_param for mapping in mappings}
    for mapping in list(mappings):
        if type(mapping) in WHOLE:
            mappings[mappings.index(mapping)] = ReplicatedMapping(mapping.megatron_param, str(mapping.hf_param))
            continue
        twin = copy.copy(mapping)
        if found := GROUPED.fullmatch(mapping.megatron_param):
            twin.megatron_param = f"{found[1]}.local_experts.*.{found[2]}.weight"
        elif (found := MTP_NORM.fullmatch(mapping.megatron_param)) and found[2] in MTP_NORMS:
            twin.megatron_param = f"{found[1]}.{MTP_NORMS[found[2]]}.weight"
        if twin.megatron_param not in known:
            mappings.append(twin)
            known.add(twin.megatron_param)
    return MegatronMappingRegistry(*mappings)


AutoMapping.register_module_type("NormedLinear", "row")  # slime_cli.training.network.layers


def of_language_model(mappings: list[Any]) -> list[Any]:
    """A model with vision: those of its language model, under the names that they have in a model of text alone."""
    prefix = "language_model."
    inner = [mapping for mapping in mappings if mapping.megatron_param.startswith(prefix)]
    twins = [copy.copy(mapping) for mapping in inner]
    for twin in twins:
        twin.megatron_param = twin.megatron_param.removeprefix(prefix)
    return twins or mappings


class FusedGateMapping(MegatronParamMapping[torch.Tensor]):
    """One HF tensor that holds gate and up projection, the one above the other."""

    def __init__(self, megatron_param: str, hf_param: str) -> None:
        super().__init__(megatron_param, hf_param)
        self._apart = GatedMLPMapping(megatron_param, gate=f"{hf_param}:gate", up=f"{hf_param}:up")

    def hf_to_megatron(self, hf_weights: torch.Tensor, megatron_module: Any) -> torch.Tensor:
        gate, up = hf_weights.chunk(2)
        return self._apart.hf_to_megatron({"gate": gate, "up": up}, megatron_module)

    def megatron_to_hf(self, megatron_weights: Any, megatron_module: Any) -> dict[str, torch.Tensor]:
        found = self._apart.megatron_to_hf(megatron_weights, megatron_module)
        return {str(self.hf_param): torch.cat(list(found.values()))} if found else {}


@MegatronModelBridge.register_bridge(source="Glm4ForCausalLM", target=GPTModel, model_type="glm4")  # pyright: ignore
class Glm4Bridge(Qwen2Bridge):
    """Dense GLM-4, which megatron-bridge does not know: Qwen2's names but for a fused gate and two norms more."""

    def mapping_registry(self) -> MegatronMappingRegistry:
        kept = [m for m in super().mapping_registry().mappings if not isinstance(m, GatedMLPMapping)]
        layer = "decoder.layers.*"
        return MegatronMappingRegistry(
            *kept,
            FusedGateMapping(f"{layer}.mlp.linear_fc1.weight", "model.layers.*.mlp.gate_up_proj.weight"),
            ReplicatedMapping(
                f"{layer}.self_attention.linear_proj.post_layernorm.weight",
                "model.layers.*.post_self_attn_layernorm.weight",
            ),
            ReplicatedMapping(
                f"{layer}.mlp.linear_fc2.post_layernorm.weight", "model.layers.*.post_mlp_layernorm.weight"
            ),
        )
