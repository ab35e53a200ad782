"""Writes weights as a version: the model's other files, safetensors or what changed of them, and a manifest.

The trainer's ranks do it together: rank 0 makes the folder (:func:`prepare`), every rank writes its share of the
tensors (:func:`owned`) and describes it (:class:`Part`), rank 0 puts the manifest over all parts (:func:`seal`).
``slime sync`` and a conversion to HF are one rank (:func:`write`). The manifest is written last: the version is whole
when it is there.
"""

import os
import pathlib
import shutil
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import torch

from slime_cli import manifests
from slime_cli.errors import EngineError
from slime_cli.manifests import layout
from slime_cli.models import headers
from slime_cli.weights import shards
from slime_cli.weights.folder import remove
from slime_cli.weights.transport import BUFFER, Part

_LEFT_OUT = ("model.", "model-", "pytorch_model", layout.CHECKPOINT, layout.MANIFEST)
_ALONE = "model.safetensors"
"""The name that every loader knows without an index."""


def checksum(tensor: torch.Tensor) -> str:
    """First 8 bytes of SHA-256 over the tensor's bytes, in hex."""
    return shards.checksum(shards.content(tensor))


def copy_model_files(source: str | os.PathLike, target: pathlib.Path) -> None:
    """Config, tokenizer and template: everything of an HF checkpoint but its weights, in whatever format they are
    there.

    Who may read it is for the new folder to say: the source may be read-only.
    """
    target.mkdir(parents=True, exist_ok=True)
    for path in pathlib.Path(source).iterdir():
        if path.is_file() and path.suffix not in headers.SUFFIXES and not path.name.startswith(_LEFT_OUT):
            shutil.copyfile(path, target / path.name)


def prepare(target: pathlib.Path, hf_checkpoint: str, *, delta: bool = False) -> None:
    """A version without weights in place of what may be there. A delta's other files are those of its base."""
    if target.exists():
        remove(target)
    target.mkdir(parents=True)
    if not delta:
        copy_model_files(hf_checkpoint, target)


def owned(named: Iterable[tuple[str, torch.Tensor]], rank: int, ranks: int) -> Iterator[tuple[str, torch.Tensor]]:
    """This rank's share: each tensor goes to the rank that has the fewest bytes so far, which all ranks find alike, in
    every version."""
    sizes = [0] * ranks
    for name, tensor in named:
        least = sizes.index(min(sizes))
        sizes[least] += tensor.nbytes
        if least == rank:
            yield name, tensor


def write_part(
    named: Iterable[tuple[str, torch.Tensor]], target: pathlib.Path, *, prefix: str = "", buffer: int = BUFFER
) -> Part:
    """Full weights. ``prefix``: of this rank's files."""
    files = shards.Shards(target, f"model-{prefix}", buffer=buffer)
    for name, tensor in named:
        files.add(name, tensor)
    return Part(files.close())


def seal(target: pathlib.Path, parts: Sequence[Part], manifest: manifests.Weights) -> manifests.Weights:
    """``manifest`` with the tensors of all parts, written; raises EngineError where a rank wrote somewhere else."""
    tensors = {name: tensor for part in parts for name, tensor in part.tensors.items()}
    patches = {name: patch for part in parts for name, patch in part.patches.items()}
    files = sorted({tensor.file for tensor in tensors.values()} | {patch.file for patch in patches.values()} - {""})
    if lost := [file for file in files if file and not (target / file).is_file()]:
        raise EngineError(
            f"{target}: {lost[0]}, which a rank of the trainer has written, is not there",
            "a run over several machines needs its folder on a disk that all of them share",
        )
    if manifest.base is None and len(files) == 1:
        os.replace(target / files[0], target / _ALONE)
        tensors = {name: msgspec.structs.replace(tensor, file=_ALONE) for name, tensor in tensors.items()}
    elif manifest.base is None:
        index = {"metadata": {}, "weight_map": {name: tensor.file for name, tensor in tensors.items()}}
        manifests.write_json(target / headers.INDEX, index)
    manifest = msgspec.structs.replace(manifest, tensors=tensors, patches=patches)
    manifests.write(target / layout.MANIFEST, manifest)
    return manifest


def described(version: str, step: int, run: str) -> manifests.Weights:
    """A manifest of full weights without its tensors."""
    return manifests.Weights(version=version, base=None, encoding="full", tensors={}, training_step=step, run=run)


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
    prepare(target, hf_checkpoint)
    return seal(target, [write_part(named, target)], described(version, step, run))
