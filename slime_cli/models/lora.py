"""Which adapter, over which base, a LoRA checkpoint is for. Torch-free."""

import pathlib

from slime_cli import manifests
from slime_cli.errors import DataError
from slime_cli.manifests import layout
from slime_cli.models import describe


def require(path: pathlib.Path, adapter: manifests.Adapter | None, hf_checkpoint: str | pathlib.Path) -> None:
    """Raises DataError unless the checkpoint in ``path`` fits a training of ``adapter`` (None: of whole weights) over
    the base ``hf_checkpoint``."""
    found = manifests.read(path / layout.CHECKPOINT, manifests.Checkpoint)
    if found.adapter is None and adapter is None:
        return
    if found.adapter is None:
        raise DataError(
            f"{path}: it holds whole weights, and --lora-rank trains an adapter over those of --hf-checkpoint",
            "slime convert dist-to-hf makes an HF model of it, for --hf-checkpoint",
        )
    if adapter is None:
        raise DataError(
            f"{path}: it holds a LoRA adapter alone, without the weights that it is for",
            f"give --lora-rank {found.adapter.rank} as the run that wrote it; slime convert dist-to-hf merges it into"
            " its base",
        )
    if (was := _of(found.adapter)) != (now := _of(adapter)):
        raise DataError(f"{path}: its adapter has {was}, this one has {now}", "give the options that it was made with")
    _require_base(path, found, pathlib.Path(hf_checkpoint))


def _of(adapter: manifests.Adapter) -> str:
    return f"rank {adapter.rank}, alpha {adapter.alpha} and layers {', '.join(adapter.modules)}"


def _require_base(path: pathlib.Path, found: manifests.Checkpoint, base: pathlib.Path) -> None:
    """Its files have the hashes that the checkpoint names."""
    hashes = describe.hashes(base)
    weights = {name: digest for name, digest in found.source_hashes.items() if name.endswith(".safetensors")}
    differing = [name for name, digest in weights.items() if hashes.get(name) != digest]
    if differing or not weights:
        what = f"{differing[0]} is another" if differing else "the checkpoint names no weights of its base"
        raise DataError(
            f"{path}: a LoRA adapter over {found.source}, and {base} is not that base: {what}",
            "give the base that it was trained over: an adapter means nothing beside other weights",
        )
