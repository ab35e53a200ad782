"""SGLang's ``torch_native`` attention with the sequences of a batch side by side.

Stock SGLang (0.5.16) attends to one sequence after the other, a dozen torch calls each in every layer, so that a batch
of a thousand short answers spends its time between calls. Here sequences of similar lengths are padded to one tensor,
and a mask leaves the padding out: the same numbers up to rounding. Registered by SGLang's own hooks around its two
methods, in an engine on a CPU; what is not plain causal attention, and long prompts, whose masks would be large, go the
stock way.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from slime_cli.hardware import adaptations

BACKEND = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
BYTES = 32 * 2**20
"""Keys, values, scores and mask of the sequences that are computed at once."""
LONGEST = 2048
"""Tokens of a sequence whose prompt is still computed here."""


def register() -> None:
    """Called when a server imports its kernels, before it loads its plugins and applies hooks."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    adaptations.ATTENTION_ON_CPU.rely_on(HookRegistry, "register", "apply_hooks")
    HookRegistry.register(f"{BACKEND}._run_sdpa_forward_decode", decode, HookType.AROUND)
    HookRegistry.register(f"{BACKEND}._run_sdpa_forward_extend", extend, HookType.AROUND)


def decode(
    stock: Callable[..., torch.Tensor],
    backend: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    encoder_lens: torch.Tensor | None = None,
    **more: Any,
) -> torch.Tensor:
    """One new token of each of N sequences: query and output ``[N, heads, dim]``, a sequence's length with it in
    ``seq_lens``, and where its keys and values are in ``req_to_token[req_pool_indices]``."""
    if _special(encoder_lens, more):
        return stock(
            backend, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, encoder_lens, **more
        )
    lengths_N = seq_lens.to(torch.long)
    width = 2 * k_cache.stride(0) + query.size(1)
    for n in _alike(torch.zeros_like(lengths_N), lengths_N, width * k_cache.element_size()):
        longest = int(lengths_N[n].max())
        seen_NK = torch.arange(longest) < lengths_N[n, None]
        at_NK = req_to_token[req_pool_indices[n], :longest].masked_fill(~seen_NK, 0)
        output[n] = _attend(query[n, None], k_cache[at_NK], v_cache[at_NK], seen_NK[:, None], more)[:, 0]
    return output


def extend(
    stock: Callable[..., torch.Tensor],
    backend: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_prefix_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    encoder_lens: torch.Tensor | None = None,
    **more: Any,
) -> torch.Tensor:
    """The last ``extend_seq_lens`` tokens of each of N sequences, one after the other in query and output; those before
    them are in the cache already."""
    if _special(encoder_lens, more) or not more.get("causal") or int(seq_lens.max()) > LONGEST:
        places = (req_to_token, req_pool_indices, seq_lens, extend_prefix_lens, extend_seq_lens, encoder_lens)
        return stock(backend, query, output, k_cache, v_cache, *places, **more)
    lengths_N = seq_lens.to(torch.long)
    new_N = extend_seq_lens.to(torch.long)
    before_N = extend_prefix_lens.to(torch.long)
    starts_N = new_N.cumsum(0) - new_N
    width = 2 * k_cache.stride(0) + query.size(1) * LONGEST // 4
    for n in _alike(new_N, lengths_N, width * k_cache.element_size()):
        keys, queries = int(lengths_N[n].max()), int(new_N[n].max())
        key_K, query_Q = torch.arange(keys), torch.arange(queries)
        real_NQ = query_Q < new_N[n, None]
        from_NQ = torch.where(real_NQ, starts_N[n, None] + query_Q, starts_N[n, None])
        seen_NQK = key_K <= (before_N[n, None] + query_Q)[..., None]
        seen_NQK &= (key_K < lengths_N[n, None])[:, None]
        at_NK = req_to_token[req_pool_indices[n], :keys].masked_fill(key_K >= lengths_N[n, None], 0)
        found = _attend(query[from_NQ], k_cache[at_NK], v_cache[at_NK], seen_NQK, more)
        output[from_NQ[real_NQ]] = found[real_NQ]
    return output


def _special(encoder_lens: torch.Tensor | None, more: dict[str, Any]) -> bool:
    """Attention to an encoder, or within a window."""
    return encoder_lens is not None or bool(more.get("is_cross_attn")) or more.get("sliding_window_size") is not None


def _alike(new_N: torch.Tensor, lengths_N: torch.Tensor, width: int) -> Iterator[torch.Tensor]:
    """Indices of sequences that are computed at once: of lengths up to the same power of two, as new tokens are, and of
    ``BYTES`` at most, at ``width`` bytes a token."""
    classes = torch.stack([new_N, lengths_N]).clamp(min=1).sub(1).double().log2().floor().clamp(min=-1)
    _, which_N = torch.unique(classes, dim=1, return_inverse=True)
    for each in range(int(which_N.max()) + 1):
        members = (which_N == each).nonzero()[:, 0]
        yield from members.split(max(1, BYTES // (int(lengths_N[members].max()) * width)))


def _attend(
    query_NQHD: torch.Tensor,
    key_NKGD: torch.Tensor,
    value_NKGD: torch.Tensor,
    seen_NQK: torch.Tensor,
    more: dict[str, Any],
) -> torch.Tensor:
    """[N, Q, heads, dim]."""
    q, k, v = (x.to(query_NQHD.dtype).transpose(1, 2) for x in (query_NQHD, key_NKGD, value_NKGD))
    if q.size(1) != k.size(1):  # the CPU's fused kernel takes as many keys as queries
        k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
    out = scaled_dot_product_attention(q, k, v, attn_mask=seen_NQK[:, None], scale=more.get("scaling"))
    return out.transpose(1, 2)
