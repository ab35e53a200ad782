"""Genuine Megatron on a machine without a GPU.

Megatron asks torch for "cuda" in about 150 places, and those requests are answered at the torch boundary: a function
mode maps CUDA devices to the CPU; ``torch.cuda`` answers for the CPU; streams and events, which have no meaning there,
are always up to date; collectives take what NCCL takes and gloo does not. In Megatron itself two functions that reach
below that boundary are replaced (the generator's state, and lists of expert splits). :func:`install` runs once a
process, before a model is built, and does nothing where CUDA works. The mode is per thread: a thread that runs Megatron
code enters :class:`CudaToCpu`.
"""

import contextlib
import os
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from slime_cli.hardware import adaptations, transformer_engine

_CPU = torch.device("cpu")


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.split(":")[0] == "cuda"


class CudaToCpu(TorchFunctionMode):
    """Sends every request for a CUDA device to the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda or func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.record_stream:
            return None
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Megatron's optimizers tell parameters apart by the legacy type name "torch.cuda.FloatTensor".
            name = func(args[0])
            return name if ".cuda." in name else name.replace("torch.", "torch.cuda.", 1)
        if kwargs:
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = _CPU
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        return func(*args, **kwargs)


class _Stream:
    """A stream or event on a device that runs everything at once: always up to date."""

    priority_range = staticmethod(lambda: (0, 0))
    cuda_stream = 0
    device = _CPU

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, *args: Any) -> None:
        pass

    wait_event = synchronize = record = wait = wait_stream

    def record_event(self, *args: Any) -> "_Stream":
        return _Stream()

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: "_Stream") -> float:
        return 0.0


_installed = False


def install() -> None:
    """Redirects this process. Idempotent; a no-op where CUDA is available."""
    global _installed
    if torch.cuda.is_available() or _installed:
        return
    _installed = True
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # Megatron's jit_fuser is torch.compile: slow and useless here
    import megatron.core.tensor_parallel.random as megatron_random  # imports torch._dynamo, which must precede the rest

    _answer_for_cuda()
    CudaToCpu().__enter__()
    barrier = torch.distributed.barrier
    adaptations.BARRIER_ON_CPU.replace(
        torch.distributed, barrier=lambda group=None, async_op=False, device_ids=None: barrier(group, async_op)
    )
    adaptations.RANDOM_STATE_ON_CPU.replace(
        megatron_random,
        _get_cuda_rng_state=lambda device="cpu", clone=False, graph_safe=False: torch.get_rng_state(),
        _set_cuda_rng_state=lambda state, device=-1, graph_safe=False: torch.set_rng_state(state),
    )
    _lists_for_moe()
    _parts_of_unequal_length()
    transformer_engine.stand_in()


def _answer_for_cuda() -> None:
    stream = _Stream()

    def zero(*args: Any, **kwargs: Any) -> int:
        return 0

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    adaptations.CUDA_ON_CPU.replace(torch.cuda.nvtx, range_push=nothing, range_pop=nothing)
    adaptations.CUDA_ON_CPU.replace(
        torch.cuda,
        current_device=lambda: _CPU,
        set_device=nothing,
        synchronize=nothing,
        empty_cache=nothing,
        set_stream=nothing,
        manual_seed=torch.default_generator.manual_seed,
        manual_seed_all=nothing,  # torch.manual_seed calls it
        get_rng_state=lambda *args, **kwargs: torch.get_rng_state(),
        set_rng_state=lambda state, *args, **kwargs: torch.set_rng_state(state),
        Stream=_Stream,
        Event=_Stream,
        ExternalStream=_Stream,
        current_stream=lambda *args, **kwargs: stream,
        default_stream=lambda *args, **kwargs: stream,
        stream=lambda *args, **kwargs: contextlib.nullcontext(),
        is_current_stream_capturing=lambda: False,
        memory_allocated=zero,
        max_memory_allocated=zero,
        memory_reserved=zero,
        max_memory_reserved=zero,
        device_memory_used=zero,
        reset_peak_memory_stats=nothing,
        memory_stats=lambda *args, **kwargs: {},
        mem_get_info=lambda *args, **kwargs: (0, 0),
        # Older architectures than this make validate_args demand CUDA_DEVICE_MAX_CONNECTIONS=1.
        get_device_capability=lambda *args, **kwargs: (10, 0),
        get_device_properties=lambda *args, **kwargs: types.SimpleNamespace(
            name="cpu", major=10, minor=0, total_memory=0
        ),
    )


def _lists_for_moe() -> None:
    """The MoE dispatcher turns split sizes into numpy only when it copies them off a GPU."""
    import megatron.core.transformer.moe.token_dispatcher as dispatcher

    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    adaptations.EXPERT_SPLITS_ON_CPU.replace(dispatcher, maybe_move_tensor_to_cpu=maybe_move_tensor_to_cpu)


def _parts_of_unequal_length() -> None:
    """Each part is padded with zeros to the longest; all ranks see the same lengths, so all of them pad."""
    distributed = torch.distributed
    gather, scatter = distributed.all_gather, distributed.reduce_scatter

    def all_gather(tensor_list: list[Any], tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        longest = _longest(tensor_list)
        if longest is None:
            return gather(tensor_list, tensor, group, async_op)
        own = _padded(tensor, longest)
        parts = [torch.empty_like(own) for _ in tensor_list]
        gather(parts, own, group)
        for target, part in zip(tensor_list, parts):
            target.copy_(part[: len(target)])
        return None

    def reduce_scatter(
        output: Any,
        input_list: list[Any],
        op: Any = distributed.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        longest = _longest(input_list)
        if longest is None:
            return scatter(output, input_list, op, group, async_op)
        own = _padded(output, longest)
        scatter(own, [_padded(part, longest) for part in input_list], op, group)
        output.copy_(own[: len(output)])
        return None

    adaptations.UNEVEN_PARTS_ON_CPU.replace(distributed, all_gather=all_gather, reduce_scatter=reduce_scatter)


def _longest(tensors: list[torch.Tensor]) -> int | None:
    """The most rows of any; None where all have the same shape."""
    return max(len(t) for t in tensors) if len({t.shape for t in tensors}) > 1 else None


def _padded(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """[rows, ...], zeros behind its own."""
    out = tensor.new_zeros(rows, *tensor.shape[1:])
    out[: len(tensor)] = tensor
    return out
