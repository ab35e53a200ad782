"""Number formats of HF checkpoints: what is converted to which tensors, and what ``config.json`` says of it.

A :class:`Source` is a checkpoint that is read tensor by tensor, a :class:`Format` a direction of conversion. The
arithmetic is in :mod:`slime_cli.models.quantise`, the writing in :mod:`slime_cli.convert.requantise`.
"""

import abc
import collections
import dataclasses
import fnmatch
import os
import pathlib
import re
from typing import Any, ClassVar, Literal

import torch
from safetensors import SafetensorError, safe_open

from slime_cli.errors import DataError, UsageError
from slime_cli.models import architecture, headers, quantise, schemes
from slime_cli.models.headers import INDEX, STATE

FLOATS = {"F32", "F16", "BF16"}
KEPT = (
    "lm_head",
    "score",
    "shared_head",
    "*embed*",
    "wte",
    "wpe",
    "gate",
    "router",
    "shared_expert_gate",
    "eh_proj",
    "mtp.fc",
    "weights_proj",
    "in_proj_a",
    "in_proj_b",
    "in_proj_ba",
    "visual",
    "vision_tower",
    "vision_model",
    "multi_modal_projector",
)
"""Matrices that are not converted: heads, embeddings, routers, vision, and small ones that engines hold unquantised."""

Tensors = dict[str, torch.Tensor]


class Source:
    """The tensors of an HF folder by name. Shapes come from the shards' headers; :meth:`read` reads one tensor."""

    def __init__(self, folder: str | os.PathLike):
        self.folder = pathlib.Path(folder).resolve()
        if (self.folder / STATE).exists():
            raise DataError(
                f"{self.folder}: its conversion has not ended ({STATE} is there)",
                "give the command that began it again",
            )
        self.config = architecture.read_config(str(self.folder))
        try:
            index = headers.index(self.folder)
            self.shards: dict[str, list[str]] = {
                name: [] for name in sorted(set(index.values())) or headers.files(self.folder)
            }
        except ValueError as error:
            raise DataError(f"{self.folder}: {error}", "download or export the checkpoint again") from None
        self.shape: dict[str, tuple[int, ...]] = {}
        self.dtype: dict[str, str] = {}
        self._shard_of: dict[str, str] = {}
        self._open: dict[str, Any] = {}
        for shard, names in self.shards.items():
            file = self._file(shard)
            for name in sorted(file.keys()):
                if name in self._shard_of:
                    raise DataError(
                        f"{self.folder}: {name} is in {self._shard_of[name]} and {shard}", "remove what does not belong"
                    )
                part = file.get_slice(name)
                self.shape[name], self.dtype[name] = tuple(part.get_shape()), part.get_dtype()
                self._shard_of[name] = shard
                names.append(name)
        self.close()
        missing = sorted(index.keys() - self.shape.keys())
        if missing:
            raise DataError(
                f"{self.folder}: {missing[0]} is in {INDEX} and in no shard", "download or export the checkpoint again"
            )

    def read(self, name: str) -> torch.Tensor:
        return self._file(self._shard_of[name]).get_tensor(name)

    def close(self) -> None:
        """Lets go of the files, whose pages count as this process's memory while they are mapped."""
        self._open.clear()

    def where(self, name: str) -> str:
        return f"{self.folder / self._shard_of[name]}: {name}"

    def _file(self, shard: str):
        if shard not in self._open:
            try:
                self._open[shard] = safe_open(self.folder / shard, framework="pt")
            except (SafetensorError, OSError) as error:
                raise DataError(
                    f"{self.folder / shard}: {error}", "the file is damaged or missing; download or export it again"
                ) from None
        return self._open[shard]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What becomes of each tensor; whatever is in neither set is copied."""

    converted: frozenset[str]
    dropped: frozenset[str] = frozenset()
    """Read together with a converted tensor, or without a meaning once that is converted."""
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Format(abc.ABC):
    """What a checkpoint is made into. The fields are the options that decide the bytes."""

    dtype: ClassVar[str] = "bfloat16"

    @abc.abstractmethod
    def plan(self, source: Source) -> Plan:
        """Which tensors are converted. Raises what makes the result unusable."""

    @abc.abstractmethod
    def convert(self, source: Source, name: str, device: str) -> Tensors:
        """What is stored for the converted tensor ``name``."""

    def configure(self, source: Source, plan: Plan) -> dict[str, Any]:
        """``config.json``."""
        return with_dtype(source.config, None)


# -- formats -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ToFp8(Format):
    """DeepSeek-V3's block format, or compressed-tensors' for one scale a row or a matrix."""

    strategy: Literal["block", "channel", "tensor"] = "block"
    block: tuple[int, int] = quantise.BLOCK
    scale_fmt: str | None = None
    ignore: tuple[str, ...] = ()
    dtype: ClassVar[str] = "float8_e4m3fn"

    def plan(self, source: Source) -> Plan:
        converted = _matrices(source, self.ignore)
        notes = _stack_note(source, converted) if self.strategy == "channel" else ()
        if self.strategy == "block":
            odd = [
                name
                for name in sorted(converted)
                if _PART.search(_module(name)) and source.shape[name][-2] % self.block[0]
            ]
            if odd:
                rows = f"{odd[0]} has {source.shape[odd[0]][-2]} rows, not a multiple of {self.block[0]}"
                notes = (f"{rows}: SGLang refuses that in q, k, v, gate and up projections",)
        return Plan(converted, notes=notes)

    def convert(self, source: Source, name: str, device: str) -> Tensors:
        suffix: Literal["_scale_inv", "_scale"] = "_scale_inv" if self.strategy == "block" else "_scale"
        scheme = schemes.Fp8(self.strategy, self.block, self.scale_fmt, suffix)
        return quantise.stored(name, source.read(name).to(device), scheme)

    def configure(self, source: Source, plan: Plan) -> dict[str, Any]:
        if self.strategy == "block":
            found = {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": list(self.block),
            }
            found |= {"scale_fmt": self.scale_fmt} if self.scale_fmt else {}
            return _quantised(source, found | {"modules_to_not_convert": _unconverted(source, plan)})
        common = {"num_bits": 8, "type": "float", "symmetric": True, "group_size": None}
        weights = common | {"strategy": self.strategy, "dynamic": False}
        inputs = common | {"strategy": "token" if self.strategy == "channel" else "tensor", "dynamic": True}
        return _quantised(source, _compressed(source, plan, "float-quantized", weights, inputs))


@dataclasses.dataclass(frozen=True)
class ToInt4(Format):
    """compressed-tensors' ``pack-quantized``, weights of 4 bits and activations of 16, rounded to nearest."""

    group: int = 32
    symmetric: bool = True
    ignore: tuple[str, ...] = ()
    dtype: ClassVar[str] = "int4"

    def plan(self, source: Source) -> Plan:
        converted = _matrices(source, self.ignore)
        for name in sorted(converted):
            if source.shape[name][-1] % self.group:
                said = (
                    f"{source.where(name)} has rows of {source.shape[name][-1]}, which groups of {self.group} do not"
                    " divide"
                )
                raise DataError(said, f"give a --group-size that does, or --ignore {_module(name)}")
        return Plan(converted, notes=_stack_note(source, converted))

    def convert(self, source: Source, name: str, device: str) -> Tensors:
        return quantise.stored(name, source.read(name).to(device), schemes.Int4(self.group, self.symmetric))

    def configure(self, source: Source, plan: Plan) -> dict[str, Any]:
        weights = {
            "num_bits": 4,
            "type": "int",
            "symmetric": self.symmetric,
            "strategy": "group",
            "group_size": self.group,
        }
        return _quantised(source, _compressed(source, plan, "pack-quantized", weights | {"dynamic": False}, None))


@dataclasses.dataclass(frozen=True)
class FromFp8(Format):
    """FP8 of any of the strategies, whether the scales are called ``weight_scale_inv`` or ``weight_scale``."""

    def plan(self, source: Source) -> Plan:
        converted = {name for name, dtype in source.dtype.items() if dtype == "F8_E4M3"}
        if not converted:
            raise DataError(f"{source.folder}: no tensor in float8_e4m3fn", "there is nothing to convert")
        scales = {self._scale(source, name) for name in converted}
        scales |= {f"{_module(name)}.input_scale" for name in converted} & source.shape.keys()
        return Plan(frozenset(converted), frozenset(scales))

    def convert(self, source: Source, name: str, device: str) -> Tensors:
        found = schemes.settings(source.config)
        groups = [
            (group.get("weights") or {}).get("block_structure") for group in (found.get("config_groups") or {}).values()
        ]
        rows, columns = found.get("weight_block_size") or next(filter(None, groups), quantise.BLOCK)
        scale = source.read(self._scale(source, name)).to(device)
        return {name: quantise.dequantise_fp8(source.read(name).to(device), scale, (rows, columns))}

    @staticmethod
    def _scale(source: Source, name: str) -> str:
        for scale in (f"{name}_scale_inv", f"{name}_scale"):
            if source.dtype.get(scale) in FLOATS | {"F8_E8M0"}:
                return scale
        fix = "the checkpoint is incomplete, or of a format that is not read (mxfp8)"
        raise DataError(f"{source.where(name)} is float8_e4m3fn without a float ..._scale_inv or ..._scale", fix)


@dataclasses.dataclass(frozen=True)
class FromInt4(Format):
    """compressed-tensors' ``pack-quantized`` with 4 bits."""

    def plan(self, source: Source) -> Plan:
        converted = frozenset(
            name for name, dtype in source.dtype.items() if name.endswith("_packed") and dtype == "I32"
        )
        if not converted:
            raise DataError(
                f"{source.folder}: no int32 tensor named ..._packed", "nothing to convert: only pack-quantized is read"
            )
        dropped = set()
        for name in converted:
            stem = name.removesuffix("_packed")
            if f"{stem}_g_idx" in source.shape:
                raise DataError(
                    f"{source.where(f'{stem}_g_idx')}: the columns are in another order",
                    "export without actorder=group",
                )
            missing = [part for part in (f"{stem}_scale", f"{stem}_shape") if part not in source.shape]
            if missing:
                raise DataError(f"{source.where(name)} is there, {missing[0]} is not", "the checkpoint is incomplete")
            dropped |= {f"{stem}_scale", f"{stem}_shape", f"{stem}_zero_point"} & source.shape.keys()
        return Plan(converted, frozenset(dropped))

    def convert(self, source: Source, name: str, device: str) -> Tensors:
        stem = name.removesuffix("_packed")
        shape = tuple(source.read(f"{stem}_shape").tolist())
        packed, scale = (source.read(f"{stem}_{part}").to(device) for part in ("packed", "scale"))
        point = f"{stem}_zero_point"
        zero = source.read(point).to(device) if point in source.shape else None
        return {stem: quantise.dequantise_int4(packed, scale, shape, zero)}


# -- which tensors -----------------------------------------------------------------------------------------------------


def _matrices(source: Source, ignore: tuple[str, ...]) -> frozenset[str]:
    """Weights of linear layers and of stacked experts, less those of ``KEPT`` and ``ignore``. Raises what makes the
    result unusable."""
    if schemes.settings(source.config):
        raise DataError(
            f"{source.folder / 'config.json'}: the model is quantised",
            "convert it back first: fp8-to-bf16 or int4-to-bf16",
        )
    able = [name for name, shape in source.shape.items() if _is_matrix(name, shape)]
    for pattern in ignore:
        if not any(_matches(name, (pattern,)) for name in able):
            fix = "a pattern is whole parts of a module's name, as mlp.gate or layers.0; * stands for anything"
            raise UsageError(f"--ignore {pattern}: no weight matrix has such a name", fix)
    converted = frozenset(name for name in able if not _matches(name, KEPT + ignore))
    for name in sorted(converted):
        if source.dtype[name] not in FLOATS:
            raise DataError(
                f"{source.where(name)} is {source.dtype[name]}",
                "only float32, float16 and bfloat16 weights are quantised",
            )
    layers = collections.defaultdict(set)
    for name in able:
        layers[_layer(name)].add(name in converted)
    torn = next((layer for layer, fates in layers.items() if len(fates) > 1), None)
    if torn:
        raise UsageError(
            f"--ignore leaves out a part of {torn}, which engines load as one", "leave out all of its parts or none"
        )
    if not converted:
        fix = f"{len(able)} are left out by name" if able else "give a folder with a model's weights"
        raise DataError(f"{source.folder}: no weight matrix to convert", fix)
    return converted


def _is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    if 0 in shape:
        return False
    return (len(shape) == 2 and name.endswith(".weight")) or (
        len(shape) == 3 and ".experts." in f".{name}" and not name.endswith("bias")
    )


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    """A pattern is some whole parts of a module's name, ``*`` is anything: ``mlp.gate`` is not in ``mlp.gate_proj``."""
    path = f".{name.removesuffix('.weight')}."
    return any(fnmatch.fnmatchcase(path, f"*.{pattern}.*") for pattern in patterns)


def _module(name: str) -> str:
    """The module that holds a tensor; stacked experts are parameters of the module ``experts`` itself."""
    return name.rpartition(".")[0]


def _layer(name: str) -> str:
    """The layer that engines make of a tensor's module and its neighbours."""
    module = _PART.sub(lambda match: ".qkv_proj" if match[1] in "qkv" else ".gate_up_proj", _module(name))
    return re.sub(r"(^|\.)experts\..*", r"\1experts", module)


_PART = re.compile(r"\.(q|k|v|gate|up)_proj$")
"""A module that engines fuse with others into one layer."""


def _unconverted(source: Source, plan: Plan) -> list[str]:
    """Modules with a weight that stays as it was. SGLang and transformers match these at the dots of a name."""
    stacked = [name for name, shape in source.shape.items() if len(shape) == 3 and _is_matrix(name, shape)]
    names = {name for name in source.shape if name.endswith(".weight")} | set(stacked)
    return sorted({_module(name) for name in names - plan.converted})


def _stack_note(source: Source, converted: frozenset[str]) -> tuple[str, ...]:
    stacked = sorted(name for name in converted if len(source.shape[name]) == 3)
    if not stacked:
        return ()
    return (
        (
            f"{stacked[0]} is a stack of experts, taken as experts x out x in: SGLang loads this format from a tensor"
            " an expert"
        ),
    )


# -- config.json -------------------------------------------------------------------------------------------------------


def _compressed(source: Source, plan: Plan, form: str, weights: dict, inputs: dict | None) -> dict[str, Any]:
    """compressed-tensors' settings. Its ``ignore`` is exact names, which SGLang also finds inside longer ones: there a
    regex helps."""
    modules = {_module(name) for name in plan.converted}
    kept = [
        f"re:{re.escape(name)}$" if any(name in other for other in modules) else name
        for name in _unconverted(source, plan)
    ]
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": kept,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _quantised(source: Source, found: dict[str, Any]) -> dict[str, Any]:
    """What is left of a float32 model is to be computed in bfloat16, for which the scales are made; SGLang would take
    float16."""
    return with_dtype(source.config, "float32") | {"quantization_config": found}


def with_dtype(config: dict[str, Any], only: str | None) -> dict[str, Any]:
    """``config`` without quantisation, with bfloat16 for the dtype ``only`` (None: for any), in a nested text model as
    well."""
    out = schemes.without(config)
    for key in ("dtype", "torch_dtype"):
        if key in out and only in (None, out[key]):
            out[key] = "bfloat16"
    if isinstance(out.get("text_config"), dict):
        out["text_config"] = with_dtype(out["text_config"], only)
    return out
