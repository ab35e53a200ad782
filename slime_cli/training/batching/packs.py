"""A pack of sequences as Megatron's layers see it: lengths, positions, and where attention finds each token.

Context parallelism cuts every sequence into ``2 * size`` equal chunks and gives rank r chunks r and
``2 * size - 1 - r``, so that causal attention costs every rank the same (the zigzag of Llama 3, arXiv 2407.21783,
section 3.3.2; Transformer Engine's cut too). A sequence is padded on its right to whole chunks: no token before the
padding ever sees it.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from slime_cli.training.batching import packing
from slime_cli.training.network.delta_rule import Chunks

FP8_BLOCK = 128
"""Transformer Engine scales blocks of so many tokens in FP8, and takes no part of one."""
Lengths = Sequence[int] | np.ndarray


@dataclasses.dataclass(frozen=True)
class Cut:
    """Which part of every sequence a rank holds."""

    rank: int = 0
    size: int = 1
    """Context parallel ranks."""
    multiple: int = 1
    """Every rank's token count is a multiple of this (sequence parallelism splits it)."""
    local: bool = True
    """For Megatron's local layers, else for Transformer Engine's."""

    @property
    def tokens_multiple(self) -> int:
        """Tokens of a rank come in multiples of this: two chunks a sequence where there are chunks."""
        return self.multiple if self.size == 1 else math.lcm(self.multiple, 2)

    def chunks(self, lengths_N: Lengths) -> np.ndarray:
        """Tokens of a chunk of each sequence, the padding of its last ones included, [N]."""
        return -(-np.asarray(lengths_N, np.int64) // (2 * self.size))

    def whole(self, lengths_N: Lengths) -> np.ndarray:
        """Length of each sequence with its padding, over all ranks, [N]."""
        return packing.padded(np.asarray(lengths_N, np.int64), self.size)


@dataclasses.dataclass
class Rectangles:
    """Sequences stacked by length for attention: each rectangle is n rows of queries [n, Q] and of keys [n, K].

    The last query of a row sees all its keys, the one before all but the last, and so on. Queries are places in this
    rank's part of the pack, keys places in the parts of all context parallel ranks, one after the other.
    """

    queries: list[torch.Tensor]
    keys: list[torch.Tensor]
    scatter_T: torch.Tensor
    """Where each token of the pack sits in the concatenated, flattened queries."""


@dataclasses.dataclass(frozen=True)
class Whole:
    """The pack's sequences one after the other and each in order, as layers with a state go through them."""

    order_T: torch.Tensor | slice
    """Where each of their tokens is in the parts of all context parallel ranks, one part after the other."""
    inverse_T: torch.Tensor | slice
    positions_T: torch.Tensor
    chunks: Chunks


@dataclasses.dataclass
class Pack(PackedSeqParams):
    """Megatron's packed-sequence parameters with what the local layers need besides.

    For local layers ``cu_seqlens_q_padded`` is [0, T] on purpose: Megatron's RoPE slices angles by it, and with angles
    already laid out token by token (:class:`slime_cli.training.network.attention.PackedRotary`) one slice replaces a
    Python loop over sequences.
    """

    positions_T: torch.Tensor | None = None
    """Position of each of this rank's tokens in its own sequence."""
    angles_T: torch.Tensor | None = None
    """Whose position's angle sits at each place of the whole pack, so that RoPE's cut of it gives this rank its own."""
    ends_N1: torch.Tensor | None = None
    """Where each sequence begins, and the pack ends, over all context parallel ranks: int32, on the device."""
    lengths_N: Lengths = ()
    prefix_N: Sequence[int] | np.ndarray | None = None
    """The sequence that each continues, where sequences share what they begin with."""
    cut: Cut = Cut()

    @functools.cached_property
    def rectangles(self) -> Rectangles:
        """Made when attention first asks: a kernel that takes packs has no use for them."""
        shape = rectangles(self.lengths_N, self.prefix_N) if self.cut.size == 1 else zigzag(self.lengths_N, self.cut)
        device = None if self.ends_N1 is None else self.ends_N1.device
        queries, keys = ([x.to(device) for x in part] for part in (shape.queries, shape.keys))
        return Rectangles(queries, keys, shape.scatter_T.to(device))

    @functools.cached_property
    def whole(self) -> Whole:
        device = None if self.positions_T is None else self.positions_T.device
        lengths_N = self.cut.whole(self.lengths_N)
        positions_T = torch.from_numpy(ranges(np.zeros_like(lengths_N), lengths_N)).to(device)
        chunks = Chunks.of(lengths_N, device)
        if self.cut.size == 1:
            return Whole(slice(None), slice(None), positions_T, chunks)
        starts_N = np.cumsum(lengths_N) - lengths_N
        ranks = [dataclasses.replace(self.cut, rank=rank) for rank in range(self.cut.size)]
        owners, within = (np.concatenate(x) for x in zip(*(places(self.lengths_N, cut) for cut in ranks), strict=True))
        inverse_T = torch.from_numpy(starts_N[owners] + within).to(device)
        return Whole(inverse_T.argsort(), inverse_T, positions_T, chunks)


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """``concatenate([arange(s, s + n) ...])`` without a Python loop."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - lengths), lengths)


NO_PREFIX = -1


def before(lengths_N: Lengths, prefix_N: Lengths) -> np.ndarray:
    """How many tokens come before each sequence's first: those of the sequence that it continues, ``prefix_N``, or none
    with :data:`NO_PREFIX`, [N]."""
    prefix_N = np.asarray(prefix_N, np.int64)
    return np.where(prefix_N == NO_PREFIX, 0, np.asarray(lengths_N, np.int64)[prefix_N])


def places(lengths_N: Lengths, cut: Cut) -> tuple[np.ndarray, np.ndarray]:
    """The sequence and the position in it of each token that the rank holds, both [T]; positions from the length on are
    padding."""
    lengths_N = np.asarray(lengths_N, np.int64)
    if cut.size == 1:
        return np.repeat(np.arange(len(lengths_N)), lengths_N), ranges(np.zeros_like(lengths_N), lengths_N)
    chunks_N = cut.chunks(lengths_N)
    owners_T = np.repeat(np.arange(len(lengths_N)), 2 * chunks_N)
    within_T = ranges(np.zeros_like(chunks_N), 2 * chunks_N)
    chunk_T = chunks_N[owners_T]
    first_T = within_T < chunk_T
    return owners_T, within_T + chunk_T * np.where(first_T, cut.rank, 2 * cut.size - 2 - cut.rank)


def pack(
    lengths: Lengths, device: torch.device, cut: Cut = Cut(), prefix_N: Sequence[int] | np.ndarray | None = None
) -> Pack:
    """Parameters of a pack of sequences with these lengths (padding of the pack, if any, is a sequence of its own).

    ``prefix_N``: the sequence of the pack that each continues, or :data:`NO_PREFIX`. It is for local layers that attend
    in rectangles, on one context parallel rank.
    """
    _, positions_T = places(lengths, cut)
    whole_N = cut.whole(lengths)
    longest = int(whole_N.max())
    if prefix_N is not None:
        before_N = before(lengths, prefix_N)
        positions_T = positions_T + np.repeat(before_N, lengths)
        longest = int((whole_N + before_N).max())
    angles_T = positions_T
    if cut.size > 1:
        half = len(positions_T) // 2
        angles_T = np.zeros(len(positions_T) * cut.size, np.int64)
        for chunk, own_T in ((cut.rank, positions_T[:half]), (2 * cut.size - 1 - cut.rank, positions_T[half:])):
            angles_T[chunk * half : (chunk + 1) * half] = own_T
    ends = slices = torch.from_numpy(np.concatenate([[0], np.cumsum(whole_N)])).int()
    on_device = ends.to(device)
    if cut.local:
        slices = ends[[0, -1]]
    else:
        ends = slices = on_device
    return Pack(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        cu_seqlens_q_padded=slices,
        cu_seqlens_kv_padded=slices,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        pad_between_seqs=False,  # else Transformer Engine compares lengths in every layer, and waits for the GPU
        positions_T=torch.from_numpy(positions_T).to(device),
        angles_T=torch.from_numpy(angles_T).to(device),
        ends_N1=on_device,
        lengths_N=lengths,
        prefix_N=prefix_N,
        cut=cut,
    )


def rectangles(lengths: Lengths, prefix_N: Sequence[int] | np.ndarray | None = None) -> Rectangles:
    """Whole sequences grouped by length to the next power of two, padded on the right: at most doubled, and no query
    sees it. Those that continue another one (``prefix_N``) are grouped by its length too, and see its tokens first."""
    lengths_N = np.asarray(lengths, np.int64)
    starts = np.cumsum(lengths_N) - lengths_N
    prefix_N = np.full(len(lengths_N), NO_PREFIX) if prefix_N is None else np.asarray(prefix_N, np.int64)
    before_N = before(lengths_N, prefix_N)
    classes = [(int(b), int(n - 1).bit_length()) for b, n in zip(before_N, lengths_N)]
    queries = []
    keys = []
    valid = []
    for each in sorted(set(classes)):
        members = np.flatnonzero([found == each for found in classes])
        column = np.arange(lengths_N[members].max())
        inside = column < lengths_N[members][:, None]
        own = np.where(inside, starts[members][:, None] + column, 0)
        seen = starts[prefix_N[members]][:, None] + np.arange(each[0])
        queries.append(own)
        keys.append(np.concatenate([seen, own], axis=1))
        valid.append(inside)
    return _rectangles(queries, keys, valid, int(lengths_N.sum()))


def zigzag(lengths: Lengths, cut: Cut) -> Rectangles:
    """The two chunks that a rank holds of every sequence, stacked by chunk length, with all keys up to a chunk's
    end."""
    chunks = cut.chunks(lengths)
    starts = np.cumsum(2 * chunks) - 2 * chunks
    total = int(2 * chunks.sum())
    queries = []
    keys = []
    for chunk in np.unique(chunks):
        start = starts[chunks == chunk][:, None]
        at = np.arange(2 * cut.size * chunk)
        n = at // chunk
        held = np.where(n < cut.size, n, 2 * cut.size - 1 - n) * total + at % chunk + np.where(n < cut.size, 0, chunk)
        for half, place in enumerate((cut.rank, 2 * cut.size - 1 - cut.rank)):
            queries.append(start + half * chunk + np.arange(chunk))
            keys.append(start + held[: (place + 1) * chunk])
    return _rectangles(queries, keys, [np.ones_like(q, bool) for q in queries], total)


def _rectangles(queries: list[np.ndarray], keys: list[np.ndarray], valid: list[np.ndarray], total: int) -> Rectangles:
    scatter_T = np.empty(total, np.int64)
    offset = 0
    for query, inside in zip(queries, valid):
        place = offset + np.arange(query.size).reshape(query.shape)
        scatter_T[query[inside]] = place[inside]
        offset += query.size
    return Rectangles(
        [torch.from_numpy(q) for q in queries], [torch.from_numpy(k) for k in keys], torch.from_numpy(scatter_T)
    )
