"""Weights as a version that engines can load: a folder with safetensors, the model's other files and a manifest.

``weights/vNNNNNN/`` is complete when its ``manifest.json`` is there. Torch is needed to write one and to compute what
an
engine should report; :func:`slime_cli.weights.sync` sends it.
"""

import hashlib
import os
import pathlib
import shutil
from collections.abc import Iterable

import msgspec
import torch
from safetensors.torch import save_file

from slime_cli import manifests
from slime_cli.models import headers

SHARD_BYTES = 4 * 2**30
_LEFT_OUT = ("model.", "model-", "pytorch_model", "checkpoint.json", "manifest.json")


def checksum(tensor: torch.Tensor) -> str:
    """First 8 bytes of SHA-256 over the tensor's bytes, in hex: what SGLang's weight checker reports on a CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(memoryview(flat)).digest()[:8].hex()


def folder(run_dir: str | os.PathLike, version: int) -> pathlib.Path:
    return pathlib.Path(run_dir) / "weights" / f"v{version:06d}"


def copy_model_files(source: str | os.PathLike, target: pathlib.Path) -> None:
    """Config, tokenizer and template: everything of an HF checkpoint but its weights, in whatever format they are
    there.

    Who may read it is for the new folder to say: the source may be read-only.
    """
    target.mkdir(parents=True, exist_ok=True)
    for path in pathlib.Path(source).iterdir():
        if path.is_file() and path.suffix not in headers.SUFFIXES and not path.name.startswith(_LEFT_OUT):
            shutil.copyfile(path, target / path.name)


def write(
    named: Iterable[tuple[str, torch.Tensor]],
    target: pathlib.Path,
    *,
    hf_checkpoint: str,
    version: str,
    step: int,
    run: str,
) -> manifests.Weights:
    """Writes full weights into ``target`` and returns the manifest, which is written last."""
    shutil.rmtree(target, ignore_errors=True)
    copy_model_files(hf_checkpoint, target)
    tensors: dict[str, manifests.Tensor] = {}
    shard: dict[str, torch.Tensor] = {}
    shards = 0
    size = 0

    def flush():
        nonlocal shards, size
        path = target / f"model-{shards:05d}.safetensors"
        save_file(shard, path, metadata={"format": "pt"})
        path.chmod(0o644)  # safetensors gives a file to its owner alone; engines of others read it
        shard.clear()
        shards = shards + 1
        size = 0

    for name, tensor in named:
        tensor = tensor.detach().cpu().contiguous()
        if shard and size + tensor.nbytes > SHARD_BYTES:
            flush()
        shard[name] = tensor
        size += tensor.nbytes
        tensors[name] = manifests.Tensor(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=list(tensor.shape),
            file=f"model-{shards:05d}.safetensors",
            checksum=checksum(tensor),
        )
    flush()
    if shards == 1:  # the name that every loader knows without an index
        os.replace(target / "model-00000.safetensors", target / "model.safetensors")
        tensors = {name: msgspec.structs.replace(t, file="model.safetensors") for name, t in tensors.items()}
    else:
        index = {"metadata": {}, "weight_map": {name: t.file for name, t in tensors.items()}}
        manifests.write_json(target / "model.safetensors.index.json", index)
    manifest = manifests.Weights(
        version=version, base=None, encoding="full", tensors=tensors, training_step=step, run=run
    )
    manifests.write(target / "manifest.json", manifest)
    return manifest


FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""How SGLang's dense models name what HF keeps apart."""


def as_engine(named: dict[str, torch.Tensor], name: str, dtype: torch.dtype) -> torch.Tensor | None:
    """The tensor that one unsharded engine holds under ``name``; None when the name is not derivable from HF names."""
    for fused, parts in FUSED.items():
        if f".{fused}." in name:
            pieces = [named.get(name.replace(fused, part)) for part in parts]
            return None if any(p is None for p in pieces) else torch.cat(pieces).to(dtype)
    tensor = named.get(name)
    if tensor is None:
        return None
    if name.endswith(("embed_tokens.weight", "lm_head.weight")) and tensor.size(0) % 64:
        tensor = torch.nn.functional.pad(tensor, (0, 0, 0, -tensor.size(0) % 64))  # SGLang pads the vocabulary
    return tensor.to(dtype)


def remove(version_folder: pathlib.Path) -> None:
    """Takes an old version away, its manifest first so that it never looks complete."""
    (version_folder / "manifest.json").unlink(missing_ok=True)
    shutil.rmtree(version_folder)
