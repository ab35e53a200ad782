"""What ``checkpoint.json`` says about the HF model that a checkpoint came from. Torch-free."""

import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Iterable
from typing import Any

from slime_cli import manifests
from slime_cli.models import architecture


def file_hash(path: pathlib.Path) -> str:
    stat = path.stat()
    return _hash_of(path, stat.st_size, stat.st_mtime_ns)


@functools.cache  # every save of a run describes the same model
def _hash_of(path: pathlib.Path, size: int, mtime: int) -> str:
    return manifests.file_hash(path)


def _chat_template(folder: pathlib.Path) -> str:
    """The chat template's text, empty when there is none."""
    if (folder / "chat_template.jinja").exists():
        return (folder / "chat_template.jinja").read_text()
    config = folder / "tokenizer_config.json"
    return str(json.loads(config.read_text()).get("chat_template") or "") if config.exists() else ""


def identity(folder: pathlib.Path, config: dict[str, Any], weights: Iterable[str]) -> dict[str, Any]:
    """What tells one HF folder from another: architecture, and hashes of config, weights, tokenizer and template."""
    tokenizer = folder / "tokenizer.json"
    return {
        "source": str(folder.resolve()),
        "source_hashes": {name: file_hash(folder / name) for name in ("config.json", *weights)},
        "architecture": architecture.name(config),
        "tokenizer_hash": file_hash(tokenizer) if tokenizer.exists() else "",
        "chat_template_hash": hashlib.sha256(_chat_template(folder).encode()).hexdigest(),
    }


def hashes(folder: pathlib.Path) -> dict[str, str]:
    """SHA-256 of each file with weights in an HF folder."""
    return {path.name: file_hash(path) for path in sorted(folder.glob("*.safetensors"))}


def describe_hf(path: str | os.PathLike) -> dict[str, Any]:
    """Fields of :class:`slime_cli.manifests.Checkpoint` that follow from the HF folder."""
    folder = pathlib.Path(path)
    config = architecture.read_config(str(folder))
    weights = sorted(path.name for path in folder.glob("*.safetensors"))
    return {"megatron_args": architecture.megatron_args(config) or {}} | identity(folder, config, weights)


def checkpoint_manifest(
    hf_checkpoint: str | os.PathLike, *, iteration: int, dtype: str, layout: dict[str, int], format: str = "torch_dist"
) -> manifests.Checkpoint:
    """The manifest of a checkpoint whose weights began as ``hf_checkpoint``."""
    return manifests.Checkpoint(
        format=format, iteration=iteration, dtype=dtype, layout=layout, **describe_hf(hf_checkpoint)
    )
