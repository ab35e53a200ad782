"""Buffers that the engines of this machine open by themselves: memory of the CPU, or of the GPU that they share.

A bucket goes to a stock SGLang engine (``/update_weights_from_tensor``, 0.5.16) as a pickle, of which its unpickler
takes what torch and Python make tensors with. So the pickle says how to open the buffer, and no tensor's bytes are in
it:

* On a CPU the buffer is memory without a name (``memfd``), opened through this process's ``/proc/PID/fd``: nothing of
  it is left when the process ends, however it does. Both must be of one user and see each other's processes.
* On a GPU it is a CUDA IPC handle. The handle is made once for a buffer: torch keeps a record of each that it makes for
  as long as the buffer lives. What orders reads and writes is :meth:`Shared.written` before an engine is told, and the
  engine's answer, which comes after it has closed the buffer.
"""

import base64
import functools
import math
import os
import pickle
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from slime_cli.weights import loading, reloading
from slime_cli.weights.buckets import Bucket, Place
from slime_cli.weights.loading import Announced
from slime_cli.weights.opened import Opening


class Shared:
    """A buffer of ``size`` bytes that other processes can open. ``device``: torch's; the CPU, or a CUDA device."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            self.flat = torch.empty(size, dtype=torch.uint8, device=device)
            self.opening = _on_gpu(self.flat)
        else:
            file = os.memfd_create("slime-weights")
            weakref.finalize(self, os.close, file)
            os.ftruncate(file, size)
            opened = functools.partial(torch.from_file, shared=True, size=size, dtype=torch.uint8)
            self.flat = opened(f"/proc/self/fd/{file}")
            self.opening = (opened, (f"/proc/{os.getpid()}/fd/{file}",))

    def written(self) -> None:
        """Returns when the bytes are there for others."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


def _on_gpu(flat: torch.Tensor) -> Opening:
    from torch.multiprocessing import reductions

    rebuild, arguments = reductions.reduce_tensor(flat)
    assert rebuild is reductions.rebuild_cuda_tensor
    where = list(arguments)
    # Processes may number the GPUs in other ways, so SGLang takes its UUID in the number's place.
    where[_DEVICE] = str(torch.cuda.get_device_properties(flat.device).uuid)
    return rebuild, tuple(where)


_DEVICE = 6
"""Which argument of torch's ``rebuild_cuda_tensor`` is the device."""


class _Made:
    """Pickled, it is what an engine makes of a function and its arguments; once, however often it occurs."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.made = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.made


def flattened(opening: Opening, bucket: Bucket[Any]) -> str:
    """The bucket in SGLang's format ``flattened_bucket``, as JSON takes it. ``opening``: of the buffer that the rank
    of the engine can reach. The engine finds out which tensors of its own the parts belong to."""
    described = [
        types.SimpleNamespace(
            name=place.name,
            shape=torch.Size(place.shape),
            dtype=place.dtype,
            start_idx=place.begin,
            end_idx=place.end,
            numel=place.end - place.begin,
        )
        for place in bucket.places
    ]
    return _text({"flattened_tensor": _Made(*opening), "metadata": described})


def direct(opening: Opening, bucket: Bucket[Any]) -> str:
    """The same in its format ``direct``: the engine's own tensors by their own names, which it copies and no more.

    One that it has not, or of another shape, ends the engine."""
    buffer = _Made(*opening)
    typed = {place.dtype: _Made(torch.Tensor.view, (buffer, place.dtype)) for place in bucket.places}
    named = []
    for place in bucket.places:
        strides = [math.prod(place.shape[axis + 1 :]) for axis in range(len(place.shape))]
        where = place.begin // place.dtype.itemsize
        made = _Made(torch.as_strided, (typed[place.dtype], place.shape, tuple(strides), where))
        named.append((place.name, made))
    return _text(named)


def placed(opening: Opening, described: str, announced: Announced | None = None) -> str:
    """The same for :func:`slime_cli.weights.loading.load`, of engines that were started with it. ``described``: what
    :func:`described` says of the bucket; ``announced``: how far it is written, where it is not yet. The loader opens
    the buffer: where SGLang's unpickler does and cannot, since the trainer was killed, the engine ends."""
    return _text([((described, opening, announced), _Made(torch.empty, (0,)))])


def described(places: Sequence[Place]) -> str:
    """What a bucket has, as the loader reads it."""
    return loading.described([(p.name, str(p.dtype).removeprefix("torch."), p.shape, p.begin, p.end) for p in places])


def folder(path: str) -> str:
    """A checkpoint's folder for :func:`slime_cli.weights.reloading.load`. SGLang wants a tensor beside the text."""
    return _text([(reloading.described(path), _Made(torch.zeros, (1,)))])


def _text(payload: object) -> str:
    return base64.b64encode(pickle.dumps(payload)).decode()
