# pyright: reportMissingParameterType=false
# Triton reads annotations of a kernel's parameters as its own.
"""Rotary embeddings in one reading and one writing, as a Triton kernel: Megatron's functions of that place.

The first ``R`` numbers of each head are turned, pairs ``(x[i], x[i + R / 2])``, by the angle of their token; the rest
stays. The angles come twice, for both of a pair, as Megatron's embeddings have them, and one table of cosines and sines
serves all layers of a pass.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import FunctionCtx


@triton.jit
def _rotate(
    x, table, out, heads, width, token_stride, head_stride, sign,
    HEADS: tl.constexpr, HALF: tl.constexpr, half, REST: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    place = tl.arange(0, HALF)[None, :]
    inside = (head < heads) & (place < half)
    cos = tl.load(table + token * 2 * half + place, mask=place < half, other=0.0)
    sin = tl.load(table + (token * 2 + 1) * half + place, mask=place < half, other=0.0) * sign
    start = x + token * token_stride + head * head_stride + place
    first = tl.load(start, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(start + half, mask=inside, other=0.0).to(tl.float32)
    to = out + (token * heads + head) * width + place
    tl.store(to, (first * cos - second * sin).to(out.dtype.element_ty), mask=inside)
    tl.store(to + half, (second * cos + first * sin).to(out.dtype.element_ty), mask=inside)
    if REST:
        column = tl.arange(0, REST)[None, :] + 2 * half
        kept = (head < heads) & (column < width)
        same = tl.load(x + token * token_stride + head * head_stride + column, mask=kept, other=0.0)
        tl.store(out + (token * heads + head) * width + column, same, mask=kept)


def _turned(x_THD: torch.Tensor, table_T2R: torch.Tensor, sign: float) -> torch.Tensor:
    tokens, heads, width = x_THD.shape
    if x_THD.stride(2) != 1:
        x_THD = x_THD.contiguous()
    out_THD = torch.empty(tokens, heads, width, dtype=x_THD.dtype, device=x_THD.device)
    half = table_T2R.size(-1)
    rest = width - 2 * half
    launch: Any = _rotate[(tokens,)]
    launch(
        x_THD,
        table_T2R,
        out_THD,
        heads,
        width,
        x_THD.stride(0),
        x_THD.stride(1),
        sign,
        HEADS=triton.next_power_of_2(heads),
        HALF=triton.next_power_of_2(half),
        half=half,
        REST=triton.next_power_of_2(rest) if rest else 0,
    )
    return out_THD


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x_THD: torch.Tensor, table_T2R: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(table_T2R)
        return _turned(x_THD, table_T2R, 1.0)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None]:
        (table_T2R,) = ctx.saved_tensors
        return _turned(grad_outputs[0], table_T2R, -1.0), None


def table(angles: torch.Tensor) -> torch.Tensor:
    """Cosines and sines [T, 2, R / 2] of angles [T, 1, 1, R], made once for a tensor of them."""
    kept: Any = angles
    if getattr(kept, "cos_sin", None) is None:
        half_TR = angles.flatten(1)[:, : angles.size(-1) // 2].float()
        kept.cos_sin = torch.stack([half_TR.cos(), half_TR.sin()], dim=1)
    return kept.cos_sin


def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """``x`` [T, ..., D], each token turned by its angles [T, 1, 1, R]."""
    return _Rotation.apply(x.reshape(x.size(0), -1, x.size(-1)), table(angles)).view(x.shape)
