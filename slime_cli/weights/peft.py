"""A LoRA adapter in the format of HF's PEFT, which SGLang and others load: ``adapter_config.json`` and one file of
tensors; a published one has a probe beside it, by which engines are compared with the trainer.

Callers: conversions, and the trainer's ranks.
"""

import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors.torch import save_file

from slime_cli import manifests
from slime_cli.manifests import layout
from slime_cli.options import adapters
from slime_cli.weights import publish
from slime_cli.weights.transport import Part

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
PROBED = 48
"""Tokens of a probe."""
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
    tensors = {
        PREFIX + name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in named
    }
    save_file(tensors, target / TENSORS, {"format": "pt"})
    (target / TENSORS).chmod(0o644)  # engines of other users read it
    manifests.write_json(target / CONFIG, config(adapter, base))
    return {name: _described(tensor) for name, tensor in tensors.items()}


def probe(rows: int, longest: int) -> list[int]:
    """Tokens of a vocabulary of ``rows``, the same ones in every run; ``longest`` at most."""
    return np.random.default_rng(0).integers(0, rows, min(PROBED, longest)).tolist()


def seal(target: pathlib.Path, parts: Sequence[Part], tokens: list[int], manifest: manifests.Weights) -> None:
    """The probe and ``manifest`` of an adapter in ``target``, which makes it whole. ``parts``: of all ranks."""
    found = {place: value for part in parts for place, value in part.log_probs.items()}
    log_probs = [found[place] for place in range(1, len(tokens))]
    manifests.write(target / layout.PROBE, manifests.Probe(tokens=tokens, log_probs=log_probs))
    tensors = {name: tensor for part in parts for name, tensor in part.tensors.items()}
    manifests.write(target / layout.MANIFEST, msgspec.structs.replace(manifest, tensors=tensors, encoding="adapter"))


def _described(tensor: torch.Tensor) -> manifests.Tensor:
    return manifests.Tensor(
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=list(tensor.shape),
        file=TENSORS,
        checksum=publish.checksum(tensor),
    )
