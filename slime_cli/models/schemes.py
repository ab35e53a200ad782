"""How the weights of an HF checkpoint are quantised, by its ``config.json`` and its files' headers. Torch-free.

A run trains in floating point and publishes each version in the format of the checkpoint that its engines serve; what
of it can be made again from new weights is what :func:`of_config` knows. Formats with calibrated scales, an order of
columns or other bits are refused there, in words, before anything starts. The arithmetic is
:mod:`slime_cli.models.quantise`.
"""

import dataclasses
import os
from typing import Any, Literal

from slime_cli.errors import DataError
from slime_cli.models import headers

_FIX = (
    "`slime convert hf-to-fp8` and `hf-to-int4` make checkpoints that a run can serve; one of bfloat16 weights always"
    " works"
)


@dataclasses.dataclass(frozen=True)
class Fp8:
    """float8_e4m3fn with float scales."""

    strategy: Literal["block", "channel", "tensor"]
    block: tuple[int, int] = (128, 128)
    scale_fmt: str | None = None
    """``ue8m0``: scales are powers of two."""
    suffix: Literal["_scale_inv", "_scale"] = "_scale_inv"
    """The scale is called as its weight, with this behind it."""

    @property
    def words(self) -> str:
        rows, columns = self.block
        each = {"block": f"a block of {rows} x {columns}", "channel": "a row", "tensor": "a matrix"}
        return f"FP8, a scale {each[self.strategy]}"


@dataclasses.dataclass(frozen=True)
class Int4:
    """compressed-tensors' ``pack-quantized`` with 4 bits, rounded to nearest."""

    group: int
    symmetric: bool

    @property
    def words(self) -> str:
        return f"INT4 in groups of {self.group}" + ("" if self.symmetric else " with zero points")


Scheme = Fp8 | Int4


def settings(config: dict[str, Any]) -> dict[str, Any]:
    """The quantisation settings of ``config.json``, under whichever key they are; empty for a model without."""
    text = config.get("text_config") or {}
    return (
        config.get("quantization_config") or config.get("compression_config") or text.get("quantization_config") or {}
    )


def without(config: dict[str, Any]) -> dict[str, Any]:
    """``config`` of the same model in floating point."""
    out = {key: value for key, value in config.items() if key not in ("quantization_config", "compression_config")}
    if isinstance(out.get("text_config"), dict):
        out["text_config"] = without(out["text_config"])
    return out


def of_config(config: dict[str, Any]) -> Scheme | None:
    """None where nothing is quantised. Raises DataError for a format that cannot be made of new weights here."""
    found = settings(config)
    if not found:
        return None
    method = found.get("quant_method")
    if method == "fp8":
        return _fp8(found)
    if method == "compressed-tensors":
        return _compressed(found)
    raise _unknown(f"by {method}")


def _fp8(found: dict[str, Any]) -> Fp8:
    """DeepSeek's own format."""
    block, scheme = found.get("weight_block_size"), found.get("activation_scheme", "dynamic")
    if found.get("fmt", "e4m3") != "e4m3" or scheme != "dynamic" or not block:
        raise _unknown(f"by fp8 ({found.get('fmt', 'e4m3')}, {scheme} activations, blocks {block})")
    return Fp8("block", (int(block[0]), int(block[1])), _scale_fmt(found))


def _scale_fmt(found: dict[str, Any]) -> str | None:
    scale_fmt = found.get("scale_fmt")
    if scale_fmt not in (None, "float", "ue8m0"):
        raise _unknown(f"with scales in {scale_fmt}")
    return "ue8m0" if scale_fmt == "ue8m0" else None


def _compressed(found: dict[str, Any]) -> Scheme:
    form, groups = found.get("format"), list((found.get("config_groups") or {}).values())
    if len(groups) != 1 or found.get("kv_cache_scheme"):
        raise _unknown(f"by compressed-tensors in {len(groups)} groups or with a cache of its own")
    weights, inputs = groups[0].get("weights") or {}, groups[0].get("input_activations") or {}
    said = f"by compressed-tensors ({form}, {weights.get('num_bits')} bits, {weights.get('strategy')})"
    if weights.get("actorder") or inputs and not inputs.get("dynamic"):
        raise _unknown(f"{said} with an order of columns or calibrated activations")
    if form == "float-quantized" and weights.get("num_bits") == 8 and weights.get("type") == "float":
        strategy = weights.get("strategy")
        if strategy in ("channel", "tensor"):
            return Fp8(strategy, suffix="_scale")
        if strategy == "block" and (block := weights.get("block_structure")):
            return Fp8("block", (int(block[0]), int(block[1])), _scale_fmt(found), suffix="_scale")
    if (form, weights.get("num_bits"), weights.get("type")) == ("pack-quantized", 4, "int") and not inputs:
        if weights.get("strategy") == "group" and isinstance(weights.get("group_size"), int):
            return Int4(weights["group_size"], bool(weights.get("symmetric", True)))
    raise _unknown(said)


def _unknown(how: str) -> DataError:
    return DataError(f"config.json: the weights are quantised {how}, and new weights cannot be made so here", _FIX)


def converted(folder: str | os.PathLike, scheme: Scheme) -> frozenset[str]:
    """Names of the weights that the checkpoint in ``folder`` holds in ``scheme``, as a model in floating point has
    them. Raises DataError for weights that are not as the config says."""
    try:
        held = headers.read(folder).tensors
    except ValueError as error:
        raise DataError(f"{folder}: {error}", "download or convert the checkpoint again") from None
    if isinstance(scheme, Int4):
        names = {name.removesuffix("_packed") for name in held if name.endswith("_packed")}
        lost = [f"{name}_scale" for name in sorted(names) if f"{name}_scale" not in held]
    else:
        names = {name for name, tensor in held.items() if tensor.dtype == "F8_E4M3"}
        lost = [f"{name}{scheme.suffix}" for name in sorted(names) if f"{name}{scheme.suffix}" not in held]
    if lost or not names:
        raise DataError(
            f"{folder}: config.json says {scheme.words}, and {lost[0] if lost else 'any such tensor'} is missing",
            "download or convert the checkpoint again",
        )
    return frozenset(names)


def check_served(folder: str | os.PathLike, scheme: Scheme) -> None:
    """Raises DataError for a checkpoint whose weights engines could not be asked for: SGLang's weight checker (0.5.16)
    takes blocks of FP8 for squares that divide a weight's width."""
    if not isinstance(scheme, Fp8) or (scheme.strategy, scheme.suffix) != ("block", "_scale_inv"):
        return
    names, held = converted(folder, scheme), headers.read(folder).tensors
    shapes = {name: held[name].shape for name in sorted(names)}
    rows, columns = scheme.block
    odd = next((name for name, shape in shapes.items() if rows != columns or shape[-1] % columns), None)
    if odd is not None:
        raise DataError(
            f"{folder}: {odd} is {' x '.join(map(str, shapes[odd]))} in blocks of {rows} x {columns}, which SGLang"
            " cannot sum up: no version could be proven",
            "slime convert hf-to-fp8 with a square --block-size that divides the widths, or --strategy channel",
        )
