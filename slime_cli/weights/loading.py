"""The engine's side of a sync through shared memory: SGLang calls :func:`load` for each bucket, as its
``--custom-weight-loader``.

SGLang's own format ``direct`` walks the model and makes a tensor for each place, for every bucket: on a GPU that takes
longer than the copies. Here the places of a bucket are read once; from then on, one call copies all tensors of a dtype.
This runs in the engine's process, so it imports nothing of the trainer's.
"""

import dataclasses
import functools
import json
import logging
from collections.abc import Callable, Mapping, Sequence

import torch

from slime_cli.weights import progress
from slime_cli.weights.opened import Opened, Opening

_buffers = Opened()
_log = logging.getLogger(__name__)


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
    parts: list[list[_Copies]]


Announced = tuple[str, int, int | None, tuple[int, ...]]
"""Where the writer's counts are, which of its engines this one is, and how many parts there were before this bucket
(:mod:`slime_cli.weights.progress`), None where all of it is written; and for each of its parts, how many tensors are in
it and in those before."""
Described = tuple[str, Opening, Announced | None]
"""What :func:`described` says of a bucket, its buffer, and how far it is written; None: all of it is, and the writer
has no counts."""


def described(places: Sequence[tuple[str, str, Sequence[int], int, int]]) -> str:
    """The text that :func:`load` reads. Each tensor has the engine's name, its dtype, its shape, and where its bytes
    begin and end in the buffer."""
    return json.dumps(places, separators=(",", ":"))


def load(model: torch.nn.Module, named: Sequence[tuple[Described, torch.Tensor]]) -> None:
    """``named``: one pair, of what is to be loaded, and of nothing: SGLang wants a tensor.

    Returns when the buffer is read. Raises ValueError for a tensor that the model has not, or not so: SGLang ends the
    engine then, as it does with its own formats. A bucket that was announced ends no engine: where it does not fit or
    will not be written, the log says so, and the sender sees that it was not counted as loaded."""
    (((text, (opened, arguments), announced), _),) = named
    path, engine, before, ends = announced or ("", 0, None, ())
    if before is None:
        _copy(_planned(model, text, ()), opened(*arguments), lambda part: None)
        if path:
            progress.come(path, engine)
        return
    try:
        plan = _planned(model, text, ends)
        with progress.Waiting(path, engine, before, len(plan.parts)) as waiting:
            with _buffers.open((opened, arguments), path, engine) as buffer:
                _copy(plan, buffer, waiting.part)
            waiting.loaded()
    except (progress.NotWritten, ValueError) as error:
        _log.warning("a bucket of weights was announced and is not loaded: %s", error)


def _copy(plan: _Plan, buffer: torch.Tensor, ready: Callable[[int], None]) -> None:
    """All parts in order, each when ``ready`` returns; when this does, however, the buffer is read no more."""
    try:
        with torch.no_grad():
            for number, part in enumerate(plan.parts, 1):
                ready(number)
                for copies in part:
                    copies.do(buffer)
    finally:
        if buffer.is_cuda:
            torch.cuda.current_stream(buffer.device).synchronize()


def _planned(model: torch.nn.Module, text: str, ends: tuple[int, ...]) -> _Plan:
    """The plan of a bucket, for the tensors that the model has now."""
    plan = _plan(model, text, ends)
    if not all(own.is_there() for own in plan.places):
        _plan.cache_clear()
        plan = _plan(model, text, ends)
    return plan


@functools.lru_cache(maxsize=256)
def _plan(model: torch.nn.Module, text: str, ends: tuple[int, ...]) -> _Plan:
    """``ends``: of the parts; empty: there is one."""
    owns = _owns(model)
    places: list[_Own] = []
    parts: list[list[_Copies]] = []
    by_dtype: dict[torch.dtype, _Copies] = {}
    described = json.loads(text)
    for number, (name, dtype, shape, begin, end) in enumerate(described, 1):
        own = owns.get(name)
        if own is None or list(own.tensor.shape) != shape or str(own.tensor.dtype) != f"torch.{dtype}":
            has = "none" if own is None else f"{own.tensor.dtype} {list(own.tensor.shape)}"
            raise ValueError(f"weights for {name}, {dtype} {shape}: the engine has {has}")
        places.append(own)
        by_dtype.setdefault(own.tensor.dtype, _Copies(own.tensor.dtype)).add(own.tensor, begin, end)
        if number in (ends or (len(described),)):
            parts.append(list(by_dtype.values()))
            by_dtype = {}
    return _Plan(places, parts)


def _owns(model: torch.nn.Module) -> Mapping[str, _Own]:
    """The model's parameters by every name that they have: tied ones have several."""
    found: dict[str, _Own] = {}
    for prefix, module in model.named_modules():
        for name, tensor in module.named_parameters(prefix="", recurse=False, remove_duplicate=False):
            found[f"{prefix}.{name}" if prefix else name] = _Own(module, name, tensor)
    return found
