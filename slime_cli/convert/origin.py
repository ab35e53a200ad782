"""What of a model's original files a checkpoint takes over when Megatron's weights are written as HF again."""

import pathlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from slime_cli.errors import DataError
from slime_cli.models import tensors
from slime_cli.models.whole import OF_QUANTISATION

if TYPE_CHECKING:
    import torch


def dtypes(folder: pathlib.Path) -> dict[str, str]:
    """The safetensors dtype of every tensor of the model: a router's bias may be float32 in a bfloat16 model."""
    from safetensors import safe_open

    out = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="numpy") as file:
            out |= {name: file.get_slice(name).get_dtype() for name in file.keys()}
    return out


COPIES = {"model.embed_tokens.weight": "embed_tokens.weight", "lm_head.weight": "shared_head.head.weight"}
"""Tensor -> the name of its copies in multi-token-prediction (MTP) layers, which share it."""


def copies(name: str, missing: set[str], layers: int) -> list[str]:
    """Those of ``missing`` that repeat the tensor ``name``."""
    suffix = COPIES.get(name)
    return [copy for copy in sorted(missing) if suffix and copy.endswith(suffix) and tensors.further(copy, layers)]


def kept(
    source: pathlib.Path, missing: set[str], layers: int, say: Callable[[str], None]
) -> "Iterator[tuple[str, torch.Tensor]]":
    """Multi-token-prediction (MTP) layers and what sees images among ``missing``, the tensors that Megatron's model has
    no place for.

    They are not trained, so they are copied unchanged. Raises DataError when others are missing, but for what can be
    computed anew: rotary frequencies, scales and packed values of weights that were quantised, a tied output weight.
    """
    from safetensors import safe_open

    further = {name for name in missing if tensors.further(name, layers)}
    vision = {name for name in missing if tensors.vision(name)}
    lost = sorted(
        name for name in missing - further - vision if not tensors.computed(name) and not name.endswith(OF_QUANTISATION)
    )
    if lost:
        what = f"Megatron's model has no place for {len(lost)} tensors, the first: {lost[0]}"
        raise DataError(f"{source}: {what}", "this variant of the architecture is not supported")
    if any(name.endswith(OF_QUANTISATION) for name in further):
        say("the quantised multi-token-prediction (MTP) layers are left out")
        further = set()
    if further:
        say(f"{len(further)} tensors of multi-token-prediction (MTP) layers are copied from {source}")
    if vision:
        say(f"{len(vision)} tensors of the vision part are copied from {source}")
    for path in sorted(source.glob("*.safetensors")) if further | vision else ():
        with safe_open(path, framework="pt") as file:
            for name in sorted((further | vision) & set(file.keys())):
                yield name, file.get_tensor(name)
