"""The gated delta rule over a pack of sequences, in plain torch (Gated Delta Networks, arXiv 2412.06464).

A head's state S [dk, dv] begins at zero in each sequence. With decay ``exp(g_t)``, key ``k_t``, value ``v_t``, strength
``beta_t`` and query ``q_t``:

    S <- exp(g_t) S;   S <- S + k_t (beta_t (v_t - S^T k_t))^T;   o_t = S^T q_t

Sequences are cut into chunks, and a chunk is matrix products (arXiv 2406.06484, section 3): with G the running sum of
g in it and ``A_ij = beta_i (k_i . k_j) exp(G_i - G_j)`` for j < i, the vectors that the chunk adds to the state are
``(1 + A)^-1 beta (v - exp(G) S^T k)``. All chunks are prepared at once, and the states go through the n-th chunks of
all sequences together. Computed in float32 whatever goes in.
"""

import dataclasses

import numpy as np
import torch
import torch.nn.functional as F

LENGTH = 64
"""Tokens of a chunk."""


@dataclasses.dataclass(frozen=True)
class Chunks:
    """The chunks of a pack: the first ones of all sequences, the longest first, then the second ones, and so on."""

    places_NC: torch.Tensor
    """The place in the pack of each token; the pack's length where a chunk has none."""
    counts: list[int]
    """How many sequences have a first chunk, a second one, ..."""
    scatter_T: torch.Tensor
    """Where each token of the pack is in the flattened chunks."""

    @classmethod
    def of(cls, lengths: np.ndarray, device: torch.device | None) -> "Chunks":
        """``lengths``: of the sequences of a pack, in order."""
        lengths = np.asarray(lengths, np.int64)
        chunks = -(-lengths // LENGTH)
        starts = np.cumsum(lengths) - lengths
        longest_first = np.argsort(-chunks, kind="stable")
        counts = [int((chunks > step).sum()) for step in range(int(chunks.max(initial=0)))]
        total = int(lengths.sum())
        rows = [
            np.where(at < lengths[own], starts[own] + at, total)
            for step, count in enumerate(counts)
            for own in [longest_first[:count][:, None]]
            for at in [step * LENGTH + np.arange(LENGTH)[None]]
        ]
        places = np.concatenate(rows) if rows else np.zeros((0, LENGTH), np.int64)
        scatter = np.empty(total + 1, np.int64)
        scatter[places.ravel()] = np.arange(places.size)
        return cls(torch.from_numpy(places).to(device), counts, torch.from_numpy(scatter[:total]).to(device))

    def cut(self, x: torch.Tensor) -> torch.Tensor:
        """[T, heads, ...] -> [N, heads, C, ...], zeros where a chunk has no token."""
        padded = F.pad(x, (0, 0) * (x.dim() - 1) + (0, 1))
        return padded[self.places_NC].transpose(1, 2)

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """[N, heads, C, d] -> [T, heads, d]."""
        return x.transpose(1, 2).flatten(0, 1)[self.scatter_T]


def gated_delta_rule(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, chunks: Chunks
) -> torch.Tensor:
    """Outputs [T, heads, dv] in float32. ``query`` and ``key`` [T, heads, dk], which the caller has normed; the query
    is scaled here by 1 / sqrt(dk). ``value`` [T, heads, dv]; ``g`` (log decay, not above 0) and ``beta`` [T, heads]."""
    q, k, v = (chunks.cut(x.float()) for x in (query * query.size(-1) ** -0.5, key, value))  # [N, h, C, d]
    decay, strength = (chunks.cut(x.float()) for x in (g, beta))  # [N, h, C]
    total = decay.cumsum(-1)
    grown = total.exp()[..., None]
    later = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=q.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()  # 1 on the diagonal
    by_strength = strength[..., None] * k
    mixed = (by_strength @ k.transpose(-1, -2) * between).tril(-1)
    added = torch.cat([strength[..., None] * v, by_strength * grown], -1)
    added = torch.linalg.solve_triangular(mixed, added, upper=False, unitriangular=True)
    values, keys = added.split([v.size(-1), k.size(-1)], -1)
    seen = q @ k.transpose(-1, -2) * between
    kept = k * (total[..., -1:] - total).exp()[..., None]
    end = grown[..., -1:, :]
    steps = zip(*(x.split(chunks.counts) for x in (q * grown, seen, values, keys, kept, end)), strict=True)
    state = q.new_zeros(max(chunks.counts, default=0), q.size(1), k.size(-1), v.size(-1))
    out = []
    for q_n, seen_n, values_n, keys_n, kept_n, end_n in steps:
        state = state[: len(q_n)]
        new = values_n - keys_n @ state
        out.append(q_n @ state + seen_n @ new)
        state = state * end_n + kept_n.transpose(-1, -2) @ new
    return chunks.join(torch.cat(out))
