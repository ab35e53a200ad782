"""A LoRA adapter in the format of HF's PEFT, which SGLang and others load: ``adapter_config.json`` and one file of
tensors. Callers: conversions, and the trainer's ranks."""

import pathlib
from collections.abc import Iterable
from typing import Any

import torch
from safetensors.torch import save_file

from slime_cli import manifests
from slime_cli.options import adapters
from slime_cli.weights import publish

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""PEFT wraps a model twice, and its names say so."""


def config(adapter: manifests.Adapter, base: str) -> dict[str, Any]:
    """The fields of :data:`CONFIG` by which loaders understand the tensors."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": adapter.dropout,
        "target_modules": adapters.in_hf(adapter.modules),
        "bias": "none",
        "inference_mode": True,
    }


def write(
    named: Iterable[tuple[str, torch.Tensor]], target: pathlib.Path, adapter: manifests.Adapter, base: str
) -> dict[str, manifests.Tensor]:
    """The adapter in ``target``, a folder; what is written of each tensor. ``named``: by HF's names."""
    target.mkdir(parents=True, exist_ok=True)
    # Copies: projections that have one A would share its memory, which safetensors refuses.
    tensors = {PREFIX + name: tensor.detach().cpu().clone() for name, tensor in named}
    save_file(tensors, target / TENSORS, {"format": "pt"})
    (target / TENSORS).chmod(0o644)  # engines of other users read it
    manifests.write_json(target / CONFIG, config(adapter, base))
    return {name: _described(tensor) for name, tensor in tensors.items()}


def _described(tensor: torch.Tensor) -> manifests.Tensor:
    return manifests.Tensor(
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=list(tensor.shape),
        file=TENSORS,
        checksum=publish.checksum(tensor),
    )
