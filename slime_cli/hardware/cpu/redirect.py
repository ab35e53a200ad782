"""Genuine Megatron on a machine without a GPU.

Megatron asks torch for "cuda" in about 150 places. Nothing in Megatron is patched: those requests are answered at the
torch boundary instead. A function mode maps CUDA devices to the CPU; ``torch.cuda`` answers for the CPU; streams and
events, which have no meaning there, are always up to date. :func:`install` runs once a process, before a model is
built,
and does nothing where CUDA works. The mode is per thread: a thread that runs Megatron code enters :class:`CudaToCpu`.
"""

import contextlib
import importlib.machinery
import importlib.util
import os
import sys
import types

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.split(":")[0] == "cuda"


class CudaToCpu(TorchFunctionMode):
    """Sends every request for a CUDA device to the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
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

    def __init__(self, *args, **kwargs):
        pass

    def wait_stream(self, *args):
        pass

    wait_event = synchronize = record = wait = wait_stream

    def record_event(self, *args):
        return _Stream()

    def query(self):
        return True

    def elapsed_time(self, other):
        return 0.0


def install() -> None:
    """Redirects this process. Idempotent; a no-op where CUDA is available."""
    if torch.cuda.is_available() or getattr(torch.cuda, "_slime_redirect", False):
        return
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # Megatron's jit_fuser is torch.compile: slow and useless here
    import megatron.core.tensor_parallel.random as megatron_random  # imports torch._dynamo, which must precede the rest

    _answer_for_cuda()
    CudaToCpu().__enter__()
    barrier = torch.distributed.barrier
    # device_ids means something to nccl only, and gloo refuses it.
    torch.distributed.barrier = lambda group=None, async_op=False, device_ids=None: barrier(group, async_op)
    megatron_random._get_cuda_rng_state = lambda device="cpu", clone=False, graph_safe=False: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    _lists_for_moe()
    stand_in_for_transformer_engine()


def _answer_for_cuda() -> None:
    cuda = torch.cuda
    stream = _Stream()

    def zero(*args, **kwargs):
        return 0

    def nothing(*args, **kwargs):
        return None

    cuda._slime_redirect = True
    cuda.current_device = lambda: _CPU
    cuda.set_device = cuda.synchronize = cuda.empty_cache = cuda.set_stream = nothing
    cuda.manual_seed = torch.default_generator.manual_seed
    cuda.manual_seed_all = nothing  # torch.manual_seed calls it
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda.Stream = cuda.Event = cuda.ExternalStream = _Stream
    cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: stream
    cuda.stream = lambda *args, **kwargs: contextlib.nullcontext()
    cuda.is_current_stream_capturing = lambda: False
    cuda.memory_allocated = cuda.max_memory_allocated = cuda.memory_reserved = cuda.max_memory_reserved = zero
    cuda.device_memory_used = zero
    cuda.reset_peak_memory_stats = nothing
    cuda.memory_stats = lambda *args, **kwargs: {}
    cuda.mem_get_info = lambda *args, **kwargs: (0, 0)
    cuda.nvtx.range_push = cuda.nvtx.range_pop = nothing
    # Older architectures than this make validate_args demand CUDA_DEVICE_MAX_CONNECTIONS=1.
    cuda.get_device_capability = lambda *args, **kwargs: (10, 0)
    properties = types.SimpleNamespace(name="cpu", major=10, minor=0, total_memory=0)
    cuda.get_device_properties = lambda *args, **kwargs: properties


def _lists_for_moe() -> None:
    """The MoE dispatcher turns split sizes into numpy only when it copies them off a GPU."""
    import megatron.core.transformer.moe.token_dispatcher as dispatcher

    def maybe_move_tensor_to_cpu(tensor, as_numpy=False, record_stream=False):
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    dispatcher.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu


class _AnyModule(type):
    """A class whose every attribute is another empty module class."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyModule(name, (torch.nn.Module,), {})


class _AnyPackage(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyModule(name, (torch.nn.Module,), {})


def stand_in_for_transformer_engine() -> None:
    """megatron.bridge imports transformer_engine for its LoRA layers; those are the only users of this stand-in.

    Megatron decides whether it has Transformer Engine when it is first imported, so that import comes first; a package
    that does not load is hidden from it.
    """
    sys.modules.setdefault("transformer_engine", None)  # type: ignore[arg-type]
    import megatron.core.models.gpt
    import megatron.core.transformer.transformer_layer  # noqa: F401

    if sys.modules["transformer_engine"] is not None:
        return  # this stand-in
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        package = _AnyPackage(name)
        package.__spec__ = importlib.machinery.ModuleSpec(name, None)
        package.__path__ = []
        package.__version__ = "0.0.0"
        sys.modules[name] = package
    sys.modules["transformer_engine"].pytorch = sys.modules["transformer_engine.pytorch"]
