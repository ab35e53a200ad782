"""The engine's side of a quantised version: SGLang calls :func:`load`, as its ``--custom-weight-loader``.

Once an engine has loaded quantised weights it transposes, repacks or rescales them for its kernels, and what the
checkpoint's tensors would be loaded into is gone: stock SGLang (0.5.16) fails to load most formats a second time, and
its INT4 experts take nothing new without a word. So each layer gets empty weights as at the start, from its own
``create_weights``, loads them, has its own ``process_weights_after_loading`` prepare them, and their values go into the
tensors that were there: CUDA graphs know those by their addresses. One layer of the model at a time, which bounds the
memory. This runs in the engine's process, so it imports nothing of the trainer's.
"""

import collections
import contextlib
import json
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_NEEDED = re.compile(r".*weight(_packed|_scale|_scale_inv|_zero_point)?")
"""A layer's tensors that a checkpoint always holds; others (an order of columns) are made."""


def described(folder: str) -> str:
    """The text that :func:`load` reads. ``folder``: an HF checkpoint that the engine sees under this path."""
    return json.dumps({"folder": folder})


def load(model: torch.nn.Module, named: Sequence[tuple[str, torch.Tensor]]) -> None:
    """``named``: one pair, of what :func:`described` has said and any tensor.

    Raises ValueError where the checkpoint lacks a layer's weights or a layer does not become what it was: SGLang ends
    the engine then."""
    ((text, _),) = named
    files = _by_layer(pathlib.Path(json.loads(text)["folder"]))
    layers: dict[int, list[_Layer]] = collections.defaultdict(list)
    for name, module in model.named_modules():
        if _is_quantised(module):
            layers[_number(f"{name}.")].append(_Layer(name, module))
    with torch.no_grad():
        for number in sorted(files.keys() | layers.keys()):
            _load(model, layers[number], files[number])
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _load(model: Any, layers: "Sequence[_Layer]", files: "_Files") -> None:
    for layer in layers:
        layer.empty()
    model.load_weights(_read(files))
    for layer in layers:
        layer.fill()


_Files = dict[pathlib.Path, list[str]]
"""Names of tensors by the file that holds them."""


def _by_layer(folder: pathlib.Path) -> dict[int, _Files]:
    """For each layer of the model, -1 for what is in none, the names of its tensors by file."""
    from safetensors import safe_open

    found: dict[int, _Files] = collections.defaultdict(lambda: collections.defaultdict(list))
    index = folder / "model.safetensors.index.json"
    listed = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else None
    for path in sorted(folder.glob("*.safetensors")):
        if listed is not None and path.name not in listed:
            continue  # some models' folders hold the weights a second time, in another form
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                found[_number(name)][path].append(name)
    if not found:
        raise ValueError(f"{folder}: no *.safetensors there")
    return found


def _number(name: str) -> int:
    found = _LAYER.search(name)
    return int(found[1]) if found else -1


def _read(files: _Files) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    for path, names in files.items():
        with safe_open(path, framework="pt") as file:
            for name in names:
                yield name, file.get_tensor(name)


def _is_quantised(module: torch.nn.Module) -> bool:
    from sglang.srt.layers.linear import LinearBase
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    method = getattr(module, "quant_method", None)
    return isinstance(module, LinearBase | FusedMoE) and not type(method).__name__.startswith("Unquantized")


class _Layer:
    """A layer of quantised weights: :meth:`empty`, then what the model's own loader puts in, then :meth:`fill`."""

    def __init__(self, name: str, module: Any) -> None:
        self.name = name
        self.module = module
        self._before: list[tuple[dict[str, Any], dict[str, torch.Tensor]]] = []
        self._loaded: set[int] = set()

    def empty(self) -> None:
        """Weights as the layer has them before anything is loaded."""
        self._before = [(place, _tensors(place)) for place in self._places()]
        if hasattr(self.module, "is_marlin_converted"):
            self.module.is_marlin_converted = False  # SGLang would prepare nothing
        loader = self._loader()

        def seen(parameter: torch.nn.Parameter, *args: Any, **kwargs: Any) -> Any:
            self._loaded.add(id(parameter))
            return loader(parameter, *args, **kwargs)

        with _as_at_the_start(self._device(), self.module):
            self.module.quant_method.create_weights(layer=self.module, weight_loader=seen, **self._sizes())

    def fill(self) -> None:
        """The prepared values of what was loaded, in the tensors that were there before."""
        new = {n: p for n, p in self.module._parameters.items() if p is not None and not self._is_old(p)}
        lost = [n for n, p in new.items() if _NEEDED.fullmatch(n) and id(p) not in self._loaded]
        if lost:
            raise ValueError(f"the checkpoint holds nothing for {self.name}.{lost[0]}")
        with _as_at_the_start(self._device(), self.module):
            self.module.quant_method.process_weights_after_loading(self.module)
        for place, old in self._before:
            now = _tensors(place)
            if now.keys() != old.keys():
                raise ValueError(f"{self.name} had {sorted(old)} and has {sorted(now)} after loading")
            for name, tensor in old.items():
                _into(tensor, now[name], f"{self.name}.{name}")
                place[name] = tensor
        self._before, self._loaded = [], set()

    def _places(self) -> list[dict[str, Any]]:
        """Where a layer and the method of its format keep tensors."""
        owners = [self.module, self.module.quant_method, getattr(self.module, "scheme", None)]
        return [self.module._parameters, self.module._buffers, *(vars(owner) for owner in owners if owner is not None)]

    def _is_old(self, parameter: torch.Tensor) -> bool:
        return any(parameter is tensor for tensor in self._before[0][1].values())

    def _device(self) -> torch.device:
        return next(iter(self._before[0][1].values())).device

    def _loader(self) -> Callable[..., Any]:
        """The function that cuts a tensor of the checkpoint for this rank, as the layer's constructor chooses it."""
        from sglang.srt.layers.linear import WEIGHT_LOADER_V2_SUPPORTED

        newer = getattr(self.module, "weight_loader_v2", None)
        named = type(self.module.quant_method).__name__ in WEIGHT_LOADER_V2_SUPPORTED
        return newer if newer is not None and named else self.module.weight_loader

    def _sizes(self) -> dict[str, Any]:
        """The other arguments of ``create_weights``, as the layer's constructor gives them."""
        module = self.module
        if hasattr(module, "num_local_experts"):
            width = module.intermediate_size_per_partition
            return {
                "num_experts": module.num_local_experts,
                "hidden_size": module.hidden_size,
                "intermediate_size_per_partition": width,
                "params_dtype": module.moe_runner_config.params_dtype,
                "with_bias": module.with_bias,
                "moe_intermediate_size": width * module.moe_tp_size,
            }
        return {
            "input_size_per_partition": getattr(module, "input_size_per_partition", module.input_size),
            "output_partition_sizes": getattr(module, "output_partition_sizes", [module.output_size]),
            "input_size": module.input_size,
            "output_size": module.output_size,
            "params_dtype": module.params_dtype,
            "skip_block_quant_check": True,  # they were checked at the start
        }


def _tensors(place: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in place.items() if isinstance(value, torch.Tensor)}


def _into(old: torch.Tensor, new: torch.Tensor, name: str) -> None:
    if old is new:
        return
    if (old.shape, old.dtype) != (new.shape, new.dtype):
        was, now = ((tensor.dtype, list(tensor.shape)) for tensor in (old, new))
        raise ValueError(f"{name} was {was[0]} {was[1]} and is {now[0]} {now[1]} after loading")
    old.data.copy_(new.data)


@contextlib.contextmanager
def _as_at_the_start(device: torch.device, module: Any) -> Iterator[None]:
    """New tensors are made on the engine's device and in the model's dtype, as SGLang's own loader sees to it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(module, "moe_runner_config", module).params_dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)
