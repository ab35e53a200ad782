"""LoRA adapters beside the layers of a model that is being built: megatron-bridge's, on Megatron's local layers and on
Transformer Engine's alike.

The model's own parameters are frozen, so that DDP and the optimizer never see them, and a checkpoint has the adapters
alone. Where tensor parallel ranks share a linear layer they share its adapter, which begins at zero: its B does.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from slime_cli import manifests
from slime_cli.errors import UsageError
from slime_cli.hardware import transformer_engine

ADAPTER = ".adapter."
"""What megatron-bridge's names of an adapter's parameters have in them, and no others."""


def of(provider: Callable[..., torch.nn.Module], adapter: manifests.Adapter | None) -> Callable[..., torch.nn.Module]:
    """``provider`` with the adapter beside its model's layers; all else is frozen. None: as it is."""
    if adapter is None:
        return provider

    def build(*arguments: Any, **named: Any) -> torch.nn.Module:
        module = provider(*arguments, **named)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kind = transformer_engine.lora()
        sizes = {"dim": adapter.rank, "alpha": adapter.alpha, "dropout": adapter.dropout}
        kind(target_modules=list(adapter.modules), **sizes)(module)
        if not any(ADAPTER in name for name, _ in module.named_parameters()):
            raise UsageError(
                f"--lora-target-modules: no layer of this rank's part of the model is one of {adapter.modules}",
                "leave it out, for all linear layers",
            )
        return module

    return build


def alone(found: Mapping[str, Any]) -> dict[str, Any]:
    """The adapters of a state dict; all of it where the model has none."""
    adapters = {key: value for key, value in found.items() if ADAPTER in key}
    return adapters or dict(found)
