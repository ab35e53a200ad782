"""megatron-bridge adapted on an instance: no class of its own is changed. Caller: :mod:`slime_cli.weights.bridge`.

Transformer Engine keeps a layer's experts in one grouped module, and for some architectures megatron-bridge knows those
names only; local layers keep each expert apart, so such a mapping gets a twin under the local name. It knows by itself
that local layers keep the norms apart, but not those inside of multi-token-prediction (MTP) layers.
"""

import copy
import re
from typing import Any

from megatron.bridge import AutoBridge
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry

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


def with_local_names(registry: MegatronMappingRegistry) -> MegatronMappingRegistry:
    mappings = list(registry.mappings)
    known = {mapping.megatron_param for mapping in mappings}
    for mapping in list(mappings):
        twin = copy.copy(mapping)
        if found := GROUPED.fullmatch(mapping.megatron_param):
            twin.megatron_param = f"{found[1]}.local_experts.*.{found[2]}.weight"
        elif (found := MTP_NORM.fullmatch(mapping.megatron_param)) and found[2] in MTP_NORMS:
            twin.megatron_param = f"{found[1]}.{MTP_NORMS[found[2]]}.weight"
        if twin.megatron_param not in known:
            mappings.append(twin)
            known.add(twin.megatron_param)
    return MegatronMappingRegistry(*mappings)
