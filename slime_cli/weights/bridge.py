"""HF names <-> Megatron weights through megatron-bridge, for models built with local layers as well
(:mod:`slime_cli.hardware.megatron_bridge`). Called by the trainer's ranks and by conversions."""

import contextlib
import logging
import math
import warnings
from collections.abc import Iterator

import torch

from slime_cli.errors import DataError
from slime_cli.models import architecture, schemes
from slime_cli.weights.quantised import Restored


def _know_mimo() -> None:
    """transformers has no MiMo, whose config is Qwen2's and the number of multi-token-prediction (MTP) layers."""
    from transformers import AutoConfig, Qwen2Config

    class MiMoConfig(Qwen2Config):
        model_type = "mimo"

    AutoConfig.register("mimo", MiMoConfig, exist_ok=True)


def _say_whether_tied(model: list) -> None:
    from megatron.core.utils import unwrap_model

    from slime_cli.hardware import megatron

    for module in unwrap_model(model):
        megatron.say_whether_tied(module)


def _parameters(model: list) -> Iterator[tuple[str, torch.Tensor]]:
    """This rank's parameters, without what Transformer Engine keeps in a type of its own (FP8) and without LoRA
    adapters, which no HF model has. A router's bias is a buffer and begins at zero; :mod:`slime_cli.models.whole`
    checks that a checkpoint holds it where the model has one.
    """
    from megatron.core.utils import unwrap_model

    for module in unwrap_model(model):
        for name, parameter in module.named_parameters():
            if type(parameter.data) is torch.Tensor and ".adapter." not in name:
                yield name, parameter.data


def _on_any_rank(names: list[str]) -> list[str]:
    """The names of all ranks: they must fail together, or the others would wait for the one that failed."""
    if not torch.distributed.is_initialized():
        return names
    found: list = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, names)
    return [name for of_rank in found for name in of_rank]


class Bridge:
    """Moves weights between a model on these ranks and an HF checkpoint folder, whose tensors may be quantised. All
    ranks call every method."""

    def __init__(self, hf_checkpoint: str, dtype: torch.dtype):
        self._source = hf_checkpoint
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from slime_cli.hardware.megatron_bridge import LocalBridge

            logging.getLogger("megatron.bridge").setLevel(logging.ERROR)
            _know_mimo()
            self._bridge = LocalBridge.from_hf_pretrained(hf_checkpoint, torch_dtype=dtype)
        if (scheme := schemes.of_config(architecture.read_config(hf_checkpoint))) is not None:
            restored = Restored(hf_checkpoint, scheme)
            self._bridge.read_from(restored.names(), restored.read)

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

    def export(self, model: list, *, cpu: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """(HF name, whole tensor) of every weight, gathered over tensor and pipeline ranks, LoRA adapters merged into
        those that they are beside. ``cpu``: there, whatever device the model is on."""
        _say_whether_tied(model)
        yield from self._bridge.export_hf_weights(model, cpu=cpu, show_progress=False)

    def export_adapter(self, model: list, *, cpu: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """(HF name, whole tensor) of every A and B of the model's LoRA adapters: ``LAYER.lora_A.weight`` [rank, inputs]
        and ``LAYER.lora_B.weight`` [outputs, rank]. Projections that are one layer of Megatron's have one A."""
        yield from self._bridge.export_adapter_weights(model, cpu=cpu, show_progress=False)
