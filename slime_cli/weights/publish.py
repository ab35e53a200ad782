"""Writes weights as a version that engines can load: safetensors, the model's other files and a manifest.

Called by the trainer's rank 0, by ``slime sync`` and by a conversion to HF. The manifest is written last: the version
is whole when it is there.
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
from slime_cli.manifests import layout
from slime_cli.models import headers
from slime_cli.weights.transports.disk import remove
from slime_cli.weights.verification import shortened

SHARD_BYTES = 4 * 2**30
_LEFT_OUT = ("model.", "model-", "pytorch_model", layout.CHECKPOINT, layout.MANIFEST)


def checksum(tensor: torch.Tensor) -> str:
    """First 8 bytes of SHA-256 over the tensor's bytes, in hex: what SGLang's weight checker reports on a CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return shortened(hashlib.sha256(memoryview(flat)))


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
    if target.exists():
        remove(target)
    copy_model_files(hf_checkpoint, target)
    shards = _Shards(target)
    for name, tensor in named:
        shards.add(name, tensor.detach().cpu().contiguous())
    tensors = shards.close()
    manifest = manifests.Weights(
        version=version, base=None, encoding="full", tensors=tensors, training_step=step, run=run
    )
    manifests.write(target / layout.MANIFEST, manifest)
    return manifest


class _Shards:
    """Tensors into safetensors files of bounded size: one shard is in memory at a time."""

    def __init__(self, target: pathlib.Path):
        self.target = target
        self.tensors: dict[str, manifests.Tensor] = {}
        self._shard: dict[str, torch.Tensor] = {}
        self._size = 0
        self._written = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if self._shard and self._size + tensor.nbytes > SHARD_BYTES:
            self._flush()
        self._shard[name] = tensor
        self._size += tensor.nbytes
        self.tensors[name] = manifests.Tensor(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=list(tensor.shape),
            file=self._file(),
            checksum=checksum(tensor),
        )

    def _file(self) -> str:
        return f"model-{self._written:05d}.safetensors"

    def _flush(self) -> None:
        path = self.target / self._file()
        save_file(self._shard, path, metadata={"format": "pt"})
        path.chmod(0o644)  # safetensors gives a file to its owner alone; engines of others read it
        self._shard = {}
        self._size = 0
        self._written += 1

    def close(self) -> dict[str, manifests.Tensor]:
        """Where every tensor lies, when all are written."""
        only = self._file()
        self._flush()
        if self._written == 1:  # the name that every loader knows without an index
            os.replace(self.target / only, self.target / "model.safetensors")
            return {name: msgspec.structs.replace(t, file="model.safetensors") for name, t in self.tensors.items()}
        index = {"metadata": {}, "weight_map": {name: tensor.file for name, tensor in self.tensors.items()}}
        manifests.write_json(self.target / headers.INDEX, index)
        return self.tensors
