"""Causal attention over a pack of sequences, by kernels that torch brings.

cuDNN's own kernel for packs is left out: it gives gradients of NaN for grouped queries, or ends the process (torch
2.11, H200).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn

DENSE_FROM = 512
"""Sequences that are all equally long, and at least so long, are stacked: torch has a kernel for that which takes half
the time (docs/measurements/step.md; shorter ones have not been measured)."""


def packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: torch.Tensor,
    longest: int,
    scale: float | None,
) -> torch.Tensor:
    """Queries ``[T, heads, D]``, keys ``[T, groups, D]`` and values ``[T, groups, D']`` -> ``[T, heads, D']``.

    ``ends``: where the sequences end, with the 0 first, int32 on the device. ``longest``: the longest one's length.
    ``scale``: None is one over the root of D.
    """
    count = len(ends) - 1
    if longest >= DENSE_FROM and count * longest == len(query):
        return stacked(query, key, value, count, scale)
    width = value.size(-1)  # the kernel's heads are equally wide
    wide = value if width == query.size(-1) else F.pad(value, (0, query.size(-1) - width))
    out: Any = varlen_attn(query, key, wide, ends, ends, longest, longest, scale=scale, window_size=(-1, 0))
    return out[..., :width]


def stacked(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, count: int, scale: float | None
) -> torch.Tensor:
    """The same of ``count`` sequences of one length."""
    q, k, v = (x.unflatten(0, (count, -1)).transpose(1, 2) for x in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=k.size(1) != q.size(1))
    return out.transpose(1, 2).flatten(0, 1)
