"""The engine's side of a sync through shared memory: SGLang calls :func:`load` for each bucket, as its
``--custom-weight-loader``.

SGLang's own format ``direct`` walks the model and makes a tensor for each place, for every bucket: on a GPU that takes
longer than the copies. Here the places of a bucket are read once; from then on, one call copies all tensors of a dtype.
This runs in the engine's process, so it imports nothing of the trainer's.
"""

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence

import torch


@dataclasses.dataclass(frozen=True)
class _Own:
    """A tensor of the engine, and where in its model it is: someone may have put another one there."""

    module: torch.nn.Module
    name: str
    tensor: torch.Tensor

    def is_there(self) -> bool:
        return self.module._parameters.get(self.name) is self.tensor


@dataclasses.dataclass
class _Copies:
    """Tensors of one dtype. ``own``: the engine's; ``sizes``: the buffer in elements, a gap and a tensor in turn."""

    dtype: torch.dtype
    own: list[torch.Tensor] = dataclasses.field(default_factory=list)
    sizes: list[int] = dataclasses.field(default_factory=list)
    size: int = 0
    """All of them together."""

    def add(self, own: torch.Tensor, begin: int, end: int) -> None:
        """``begin``, ``end``: its bytes in the buffer."""
        each = self.dtype.itemsize
        self.own.append(own.detach().view(-1) if own.is_contiguous() else own.detach())
        self.sizes += [begin // each - self.size, (end - begin) // each]
        self.size = end // each

    def do(self, buffer: torch.Tensor) -> None:
        parts = buffer[: self.size * self.dtype.itemsize].view(self.dtype).split(self.sizes)[1::2]
        shaped = [part if own.dim() == 1 else part.view(own.shape) for part, own in zip(parts, self.own, strict=True)]
        torch._foreach_copy_(self.own, shaped)  # pyright: ignore[reportPrivateImportUsage]


@dataclasses.dataclass(frozen=True)
class _Plan:
    places: list[_Own]
    copies: list[_Copies]


def described(places: Sequence[tuple[str, str, Sequence[int], int, int]]) -> str:
    """The text that :func:`load` reads. Each tensor has the engine's name, its dtype, its shape, and where its bytes
    begin and end in the buffer."""
    return json.dumps(places, separators=(",", ":"))


def load(model: torch.nn.Module, named: Sequence[tuple[str, torch.Tensor]]) -> None:
    """``named``: one pair, of what :func:`described` has said and the buffer, shape [bytes], uint8.

    Returns when the buffer is read. Raises ValueError for a tensor that the model has not, or not so: SGLang ends the
    engine then, as it does with its own formats."""
    ((text, buffer),) = named
    plan = _plan(model, text)
    if not all(own.is_there() for own in plan.places):
        _plan.cache_clear()
        plan = _plan(model, text)
    with torch.no_grad():
        for copies in plan.copies:
            copies.do(buffer)
    if buffer.is_cuda:
        torch.cuda.current_stream(buffer.device).synchronize()


@functools.lru_cache(maxsize=256)
def _plan(model: torch.nn.Module, text: str) -> _Plan:
    owns = _owns(model)
    places: list[_Own] = []
    by_dtype: dict[torch.dtype, _Copies] = {}
    for name, dtype, shape, begin, end in json.loads(text):
        own = owns.get(name)
        if own is None or list(own.tensor.shape) != shape or str(own.tensor.dtype) != f"torch.{dtype}":
            has = "none" if own is None else f"{own.tensor.dtype} {list(own.tensor.shape)}"
            raise ValueError(f"weights for {name}, {dtype} {shape}: the engine has {has}")
        places.append(own)
        by_dtype.setdefault(own.tensor.dtype, _Copies(own.tensor.dtype)).add(own.tensor, begin, end)
    return _Plan(places, list(by_dtype.values()))


def _owns(model: torch.nn.Module) -> Mapping[str, _Own]:
    """The model's parameters by every name that they have: tied ones have several."""
    found: dict[str, _Own] = {}
    for prefix, module in model.named_modules():
        for name, tensor in module.named_parameters(prefix="", recurse=False, remove_duplicate=False):
            found[f"{prefix}.{name}" if prefix else name] = _Own(module, name, tensor)
    return found
