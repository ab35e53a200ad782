"""Tensor maths of two quantised checkpoint formats, there and back. No files; called by ``requantise``, and by the
trainer's ranks, which read such checkpoints and publish them.

A weight is ``[out, in]`` or a stack of experts ``[experts, out, in]``, of which every expert is treated as a matrix of
its own. What a format stores beside a weight is keyed by the suffix that its name gets: ``X.weight`` and
``X.weight_scale_inv``.

FP8 (``float8_e4m3fn``): weight = q * scale, one float32 scale for each rectangle of the matrix. DeepSeek-V3's format
has 128x128 blocks and calls the scales ``weight_scale_inv`` (README_WEIGHTS.md of its repository); compressed-tensors'
``float-quantized`` has one a row (``channel``) or one a matrix (``tensor``) and calls them ``weight_scale``.

INT4 (compressed-tensors' ``pack-quantized``): weight = (q - zero) * scale, q and zero in -8..7, one scale and zero for
each ``group`` of neighbours in a row. q + 8 is stored as a nibble, eight to an int32 with the first in the lowest bits.

Every function raises :class:`DataError` with a message that continues a tensor's name.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from slime_cli.errors import DataError
from slime_cli.models.schemes import Int4, Scheme

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
BLOCK = (128, 128)
STRATEGIES = ("block", "channel", "tensor")

_SMALLEST_SCALE = {torch.float32: 2.0**-126, torch.bfloat16: 2.0**-126, torch.float16: 2.0**-24}
"""By a scale's dtype. Below the smallest normal number a division may flush to zero; float16 starts so high that its
subnormal numbers are needed."""


# -- by scheme ---------------------------------------------------------------------------------------------------------


def stored(name: str, weight: torch.Tensor, scheme: Scheme) -> dict[str, torch.Tensor]:
    """The tensors, by name, that a checkpoint of ``scheme`` stores for the weight ``name``."""
    if isinstance(scheme, Int4):
        return {name + suffix: part for suffix, part in quantise_int4(weight, scheme.group, scheme.symmetric).items()}
    values, scale = quantise_fp8(weight, scheme.strategy, scheme.block, scheme.scale_fmt)
    return {name: values, name + scheme.suffix: scale}


def restored(name: str, read: Callable[[str], torch.Tensor | None], scheme: Scheme) -> torch.Tensor:
    """The bfloat16 weight ``name`` of what a checkpoint of ``scheme`` holds. ``read``: a tensor by its name there, None
    where there is none."""
    if isinstance(scheme, Int4):
        shape = tuple(_there(read, f"{name}_shape").tolist())
        packed, scale = _there(read, f"{name}_packed"), _there(read, f"{name}_scale")
        return dequantise_int4(packed, scale, shape, read(f"{name}_zero_point"))
    return dequantise_fp8(_there(read, name), _there(read, name + scheme.suffix), scheme.block)


def _there(read: Callable[[str], torch.Tensor | None], name: str) -> torch.Tensor:
    if (found := read(name)) is None:
        raise DataError(f"needs {name}, which is not there", "the checkpoint is incomplete")
    return found


# -- FP8 ---------------------------------------------------------------------------------------------------------------


def quantise_fp8(
    weight: torch.Tensor, strategy: str = "block", block: tuple[int, int] = BLOCK, scale_fmt: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 values of ``weight``'s shape, and their float32 scales.

    scale = max |weight| / 448 over a rectangle, 1 where that is zero; with ``scale_fmt="ue8m0"`` rounded up to a power
    of two. Scales have shape ``[ceil(out / block[0]), ceil(in / block[1])]`` for ``block``, ``[out, 1]`` for
    ``channel`` and ``[1]`` for ``tensor``; of a stack of experts, ``[experts, rows, columns]`` of the same. A rectangle
    at the edge may be smaller: it counts as padded with zeros that are not stored. An element is off by at most 2**-4
    of its own size, or by 2**-10 of the scale where it is tiny. Raises DataError for NaN and infinity.
    """
    if weight.dim() == 3:
        pairs = [_fp8_matrix(expert, strategy, block, scale_fmt) for expert in weight]
        return torch.stack([values for values, _ in pairs]), torch.stack([scale for _, scale in pairs])
    values, scale = _fp8_matrix(weight, strategy, block, scale_fmt)
    return values, scale.reshape(1) if strategy == "tensor" else scale


def dequantise_fp8(values: torch.Tensor, scale: torch.Tensor, block: tuple[int, int] = BLOCK) -> torch.Tensor:
    """The bfloat16 weight. ``scale`` is as :func:`quantise_fp8` returns it, in float32 or a shorter float.

    Which strategy it was follows from the scales' shape. Raises DataError when that fits none, or when the result is
    not finite.
    """
    if values.dim() == 3:
        experts = values.shape[0]
        scale = scale.reshape(experts, 1, 1) if scale.numel() == experts else scale
        if scale.dim() != 3 or scale.shape[0] != experts:
            raise _unfitting(values, scale, block)
        return torch.stack([dequantise_fp8(v, s, block) for v, s in zip(values, scale, strict=True)])
    rows, columns = values.shape
    grid = tuple(scale.shape) if scale.numel() > 1 else (1, 1)
    shapes = [_rectangle(strategy, (rows, columns), block) for strategy in STRATEGIES]
    shape = next((shape for shape in shapes if grid == _grid((rows, columns), shape)), None)
    if shape is None:
        raise _unfitting(values, scale, block)
    tiles = _tiles(values.float(), shape) * scale.float().reshape(grid[0], 1, grid[1], 1)
    return _finite(_untiled(tiles, (rows, columns)).to(torch.bfloat16))


def _fp8_matrix(
    weight_OI: torch.Tensor, strategy: str, block: tuple[int, int], scale_fmt: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = weight_OI.shape
    tiles = _tiles(weight_OI.float(), _rectangle(strategy, (rows, columns), block))
    largest = _finite(tiles.abs().amax(dim=(1, 3), keepdim=True))
    scale = (largest / FP8_MAX).clamp(min=_SMALLEST_SCALE[torch.float32])
    scale = torch.where(largest > 0, scale, 1.0)
    if scale_fmt == "ue8m0":
        scale = _power_of_two_above(scale)
    values = (tiles / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)  # the cast makes NaN of what rounds to more than 448
    return _untiled(values, (rows, columns)).contiguous(), scale[:, 0, :, 0].contiguous()


def _rectangle(strategy: str, shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    return {"block": tuple(block), "channel": (1, shape[1]), "tensor": shape}[strategy]


def _grid(shape: tuple[int, int], rectangle: tuple[int, int]) -> tuple[int, int]:
    return math.ceil(shape[0] / rectangle[0]), math.ceil(shape[1] / rectangle[1])


def _tiles(matrix: torch.Tensor, rectangle: tuple[int, int]) -> torch.Tensor:
    """``[grid rows, rows, grid columns, columns]``, padded with zeros."""
    rows, columns = matrix.shape
    down, across = _grid((rows, columns), rectangle)
    padding = (0, across * rectangle[1] - columns, 0, down * rectangle[0] - rows)
    padded = F.pad(matrix, padding) if any(padding) else matrix
    return padded.reshape(down, rectangle[0], across, rectangle[1])


def _untiled(tiles: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    down, rows, across, columns = tiles.shape
    return tiles.reshape(down * rows, across * columns)[: shape[0], : shape[1]]


def _power_of_two_above(scale: torch.Tensor) -> torch.Tensor:
    """The smallest powers of two that are not below positive normal float32 numbers; on the bits, where it is exact."""
    return ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def _unfitting(values: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> DataError:
    return DataError(
        f"has shape {list(values.shape)} and scales of shape {list(scale.shape)}, which are neither one a block of "
        f"{block[0]}x{block[1]}, nor one a row, nor one a matrix",
        "the block size is read from quantization_config in config.json: it must be the one that made the checkpoint",
    )


# -- INT4 --------------------------------------------------------------------------------------------------------------


def quantise_int4(weight: torch.Tensor, group: int, symmetric: bool) -> dict[str, torch.Tensor]:
    """What is stored of ``weight``, by suffix: ``_packed``, ``_scale``, ``_shape``, and ``_zero_point`` unless
    symmetric.

    Rounds to nearest. Symmetric: scale = max |weight| / 7.5. Asymmetric: scale = (max - min) / 15 over the group and
    zero, and the zero point is where 0.0 falls, so that zeros stay exact. The scale has the weight's dtype (bfloat16
    for float32: an engine computes in 16 bits), rounded up, which keeps every element within half a stored scale. A
    group of zeros has scale 1.

    ``_packed``: int32 ``[out, ceil(in / 8)]``. ``_scale``: ``[out, in / group]``. ``_shape``: int64, the weight's.
    ``_zero_point``: int32 ``[ceil(out / 8), in / group]``, packed along the rows. A stack of experts has one more
    dimension in front. Raises DataError for NaN and infinity, and for rows that ``group`` does not divide.
    """
    if weight.shape[-1] % group:
        raise DataError(
            f"has rows of {weight.shape[-1]}, which groups of {group} do not divide",
            "give a --group-size that does, or --ignore it",
        )
    matrices = list(weight) if weight.dim() == 3 else [weight]
    stored = [_int4_matrix(matrix, group, symmetric) for matrix in matrices]
    out = {
        suffix: torch.stack([one[suffix] for one in stored]) if weight.dim() == 3 else stored[0][suffix]
        for suffix in stored[0]
    }
    return out | {"_shape": torch.tensor(weight.shape, dtype=torch.int64)}


def dequantise_int4(
    packed: torch.Tensor, scale: torch.Tensor, shape: tuple[int, ...], zero_point: torch.Tensor | None = None
) -> torch.Tensor:
    """The bfloat16 weight of shape ``shape``; the arguments are what :func:`quantise_int4` returns.

    Raises DataError when they do not fit together (values of 8 bits have another packed width), or the result is not
    finite.
    """
    rows, columns = shape[-2:]
    groups = scale.shape[-1] if scale.dim() else 0
    leading = tuple(shape[:-2])
    fits = groups and columns % groups == 0 and tuple(scale.shape) == (*leading, rows, groups)
    fits = fits and tuple(packed.shape) == (*leading, rows, math.ceil(columns / 8))
    fits = fits and (zero_point is None or tuple(zero_point.shape) == (*leading, math.ceil(rows / 8), groups))
    if not fits:
        zero = "" if zero_point is None else f", zero points {list(zero_point.shape)}"
        raise DataError(
            f"has shape {list(shape)}, packed {list(packed.shape)}, scales {list(scale.shape)}{zero}: that is not 4"
            " bits by group",
            "only pack-quantized checkpoints of 4 bits are read",
        )
    if leading:
        zeros = [None] * shape[0] if zero_point is None else list(zero_point)
        parts = zip(packed, scale, zeros, strict=True)
        return torch.stack([dequantise_int4(p, s, shape[1:], z) for p, s, z in parts])
    values = unpack_int4(packed, columns).float()
    zeros = 0.0 if zero_point is None else unpack_int4(zero_point.t(), rows).t().float().unsqueeze(-1)
    weight = (values.unflatten(-1, (groups, -1)) - zeros) * scale.float().unsqueeze(-1)
    return _finite(weight.flatten(-2).to(torch.bfloat16))


def pack_int4(values: torch.Tensor) -> torch.Tensor:
    """Integers in -8..7 of shape ``[..., n]`` as int32 ``[..., ceil(n / 8)]``; what is left of the last word is zero
    bits."""
    nibbles = F.pad((values + 8).to(torch.uint8), (0, -values.shape[-1] % 8)).unflatten(-1, (-1, 2))
    return (
        (nibbles[..., 0] | nibbles[..., 1] << 4).contiguous().view(torch.int32)
    )  # little-endian, as all that torch runs on


def unpack_int4(packed: torch.Tensor, count: int) -> torch.Tensor:
    """The inverse of :func:`pack_int4`: int8 ``[..., count]``."""
    pairs = packed.contiguous().view(torch.uint8)
    return torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(-2)[..., :count].to(torch.int8) - 8


def _int4_matrix(weight_OI: torch.Tensor, group: int, symmetric: bool) -> dict[str, torch.Tensor]:
    groups_OGg = weight_OI.float().unflatten(-1, (-1, group))
    low_OG = _finite(groups_OGg.amin(-1)).clamp(max=0)
    high_OG = _finite(groups_OGg.amax(-1)).clamp(min=0)
    step_OG = (
        torch.maximum(-low_OG, high_OG) / 7.5 if symmetric else high_OG / 15 - low_OG / 15
    )  # not the difference: it may overflow
    scale_OG = _rounded_up(step_OG, torch.float16 if weight_OI.dtype == torch.float16 else torch.bfloat16)
    scale_OG = torch.where((low_OG < 0) | (high_OG > 0), scale_OG, torch.ones_like(scale_OG))
    step_OG = scale_OG.float()
    zero_OG = torch.zeros_like(step_OG) if symmetric else (-8 - low_OG / step_OG).round().clamp(-8, 7)
    values_OGg = (groups_OGg / step_OG.unsqueeze(-1) + zero_OG.unsqueeze(-1)).round().clamp(-8, 7)
    out = {"_packed": pack_int4(values_OGg.flatten(-2).to(torch.int8)), "_scale": scale_OG}
    if not symmetric:
        out["_zero_point"] = pack_int4(zero_OG.t().to(torch.int8)).t().contiguous()
    return out


def _rounded_up(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The smallest numbers of a 16-bit ``dtype`` that are not below ``exact``, which is not negative."""
    exact = exact.clamp(min=_SMALLEST_SCALE[dtype])
    near = exact.to(dtype)
    return torch.where(near.float() < exact, (near.view(torch.int16) + 1).view(dtype), near)


def _finite(tensor: torch.Tensor) -> torch.Tensor:
    if not bool(torch.isfinite(tensor).all()):
        raise DataError(
            "holds NaN or infinity", "the checkpoint is damaged, or its training diverged: nothing can be made of it"
        )
    return tensor
