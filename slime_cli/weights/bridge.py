"""HF names <-> Megatron weights through megatron-bridge, for models built with local layers as well.

Transformer Engine keeps a layer's experts in one grouped module, and for some architectures megatron-bridge knows those
names only. Local layers keep each expert apart, so such a mapping gets a twin under the local name. (megatron-bridge
knows by itself that local layers keep the norms apart.) Called by the trainer's ranks and by conversions.
"""

import contextlib
import copy
import logging
import math
import re
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from slime_cli.errors import DataError

GROUPED = re.compile(r"(.*\.mlp\.experts)\.(linear_fc[12])\.weight\*")
"""Megatron's name of a grouped expert's weight; its last wildcard is the expert's number."""


def _with_local_names(bridge_class: type[Any]) -> None:
    """Changes the class for this process: megatron-bridge makes a new instance for every load and export."""
    if getattr(bridge_class, "_slime_local_names", False):
        return
    from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry

    original = bridge_class.mapping_registry

    def mapping_registry(self: Any) -> MegatronMappingRegistry:
        mappings = list(original(self).mappings)
        known = {mapping.megatron_param for mapping in mappings}
        for mapping in list(mappings):
            if found := GROUPED.fullmatch(mapping.megatron_param):
                twin = copy.copy(mapping)
                twin.megatron_param = f"{found[1]}.local_experts.*.{found[2]}.weight"
                if twin.megatron_param not in known:
                    mappings.append(twin)
        return MegatronMappingRegistry(*mappings)

    bridge_class.mapping_registry = mapping_registry
    bridge_class._slime_local_names = True


def _know_mimo() -> None:
    """transformers has no MiMo, whose config is Qwen2's and the number of layers that predict further tokens."""
    from transformers import AutoConfig, Qwen2Config

    class MiMoConfig(Qwen2Config):
        model_type = "mimo"

    AutoConfig.register("mimo", MiMoConfig, exist_ok=True)


def _say_whether_tied(model: list) -> None:
    """megatron-bridge asks the config, where its own providers put it. Megatron's own config does not say it, and a tied
    model's output weight on the last pipeline stage would be left as it was initialised."""
    from megatron.core.utils import unwrap_model

    for module in unwrap_model(model):
        module.config.share_embeddings_and_output_weights = module.share_embeddings_and_output_weights


def _parameters(model: list) -> Iterator[tuple[str, torch.Tensor]]:
    """This rank's parameters, without what Transformer Engine keeps in a type of its own (FP8). A router's bias is a
    buffer and begins at zero; :mod:`slime_cli.models.whole` checks that a checkpoint holds it where the model has one.
    """
    from megatron.core.utils import unwrap_model

    for module in unwrap_model(model):
        yield from ((name, p.data) for name, p in module.named_parameters() if type(p.data) is torch.Tensor)


def _on_any_rank(names: list[str]) -> list[str]:
    """The names of all ranks: they must fail together, or the others would wait for the one that failed."""
    if not torch.distributed.is_initialized():
        return names
    found: list = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, names)
    return [name for of_rank in found for name in of_rank]


class Bridge:
    """Moves weights between a model on these ranks and an HF checkpoint folder. All ranks call every method."""

    def __init__(self, hf_checkpoint: str, dtype: torch.dtype):
        self._source = hf_checkpoint
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from megatron.bridge import AutoBridge

            logging.getLogger("megatron.bridge").setLevel(logging.ERROR)
            _know_mimo()
            self._bridge = AutoBridge.from_hf_pretrained(hf_checkpoint, torch_dtype=dtype)
        _with_local_names(type(self._bridge._model_bridge))

    def load(self, model: list) -> None:
        """HF weights into the model's parameters. Raises DataError for one that no tensor of the checkpoint gave:
        megatron-bridge passes over what is not there, and the parameter would keep its random initial values.
        """
        _say_whether_tied(model)
        parameters = list(_parameters(model))
        for _, tensor in parameters:
            tensor.fill_(math.nan)
        with contextlib.redirect_stdout(None):
            self._bridge.load_hf_weights(model)
        lost = _on_any_rank([name for name, tensor in parameters if tensor.isnan().any()])
        if lost:
            raise DataError(
                f"{self._source}: no tensor gave Megatron's {lost[0]}"
                + (f" and {len(lost) - 1} more" if lost[1:] else "")
                + ", or what gave it is not a number",
                "slime doctor --hf-checkpoint DIR says what is missing",
            )

    def export(self, model: list) -> Iterator[tuple[str, torch.Tensor]]:
        """(HF name, whole tensor on the CPU) of every weight, gathered over tensor and pipeline ranks."""
        _say_whether_tied(model)
        yield from self._bridge.export_hf_weights(model, cpu=True, show_progress=False)
