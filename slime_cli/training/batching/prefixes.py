"""Which places of a pack hold which tokens of its samples, where those of one prompt may share its tokens.

The n samples of a group begin with the same prompt, and what a causal model makes of it does not depend on what
follows. So a pack can hold the prompt once and behind it each sample's response, whose tokens see the prompt and the
response before them: hidden states, log-probabilities and gradients are those of n whole sequences (up to the order of
sums), for a fraction of the work where prompts are longer than answers. The last token of a response predicts nothing
and is left out. (Prefix sharing in training: Prefix Grouper, arXiv 2506.05433.)
"""

import dataclasses

import numpy as np

from slime_cli.buffer.columns import TrainBatch
from slime_cli.training.batching import packs


@dataclasses.dataclass(frozen=True)
class Layout:
    """A pack of N samples on one rank: T places, and R response tokens that are predicted there, sample by sample."""

    lengths_N: np.ndarray
    """Each sequence's; they are more than the samples where those share prompts."""
    prefix_N: np.ndarray | None
    """The sequence that each continues (:func:`slime_cli.training.batching.packs.pack`); None where none does."""
    at_T: np.ndarray
    """Where each place's token is in the batch's ``_T`` column; padding inside a sequence is at 0."""
    real_T: np.ndarray
    """bool, False for such padding."""
    where_R: np.ndarray
    """The place that predicts each response token."""
    owner_R: np.ndarray
    """The sample, of this pack, that it belongs to."""
    rows_R: np.ndarray
    """Where it is in the batch's ``_R`` columns."""
    targets_R: np.ndarray
    """Where it is in the batch's ``_T`` column."""


def whole(batch: TrainBatch, p: np.ndarray, cut: packs.Cut) -> Layout:
    """This rank's part of the samples at ``p``, each a sequence of its own."""
    lengths = batch.lengths_N[p]
    responses = batch.response_lengths_N[p]
    owner_T, place_T = packs.places(lengths, cut)
    real_T = place_T < lengths[owner_T]
    at_T = batch.starts_N[p][owner_T] + place_T
    response_T = place_T - (lengths - responses - 1)[owner_T]  # which response token a place predicts
    where_R = np.flatnonzero((response_T >= 0) & (response_T < responses[owner_T]))
    return Layout(
        lengths_N=lengths,
        prefix_N=None,
        at_T=np.where(real_T, at_T, 0),
        real_T=real_T,
        where_R=where_R,
        owner_R=owner_T[where_R],
        rows_R=(batch.response_starts_N[p][owner_T] + response_T)[where_R],
        targets_R=at_T[where_R] + 1,
    )


def shared(batch: TrainBatch, p: np.ndarray, cut: packs.Cut) -> Layout:
    """The samples at ``p`` on one context parallel rank, every prompt once; whole where no two have the same."""
    responses = batch.response_lengths_N[p]
    prompts = batch.lengths_N[p] - responses
    starts = batch.starts_N[p]
    known: dict[bytes, int] = {}
    first = []
    of_sample = np.empty(len(p), np.int64)
    for i, (start, n) in enumerate(zip(starts, prompts)):
        of_sample[i] = known.setdefault(batch.tokens_T[start : start + n].tobytes(), len(known))
        if of_sample[i] == len(first):
            first.append(i)
    if len(first) == len(p):
        return whole(batch, p, cut)
    behind = np.maximum(responses - 1, 0)
    continued = np.flatnonzero(behind)
    lengths_N = np.concatenate([prompts[first], behind[continued]])
    begins_N = np.concatenate([starts[first], (starts + prompts)[continued]])
    ends = np.cumsum(lengths_N)
    begun = np.zeros(len(p), np.int64)
    begun[continued] = (ends - lengths_N)[len(first) :]
    owner_R = np.repeat(np.arange(len(p)), responses)
    nth_R = packs.ranges(np.zeros_like(responses), responses)
    at_T = packs.ranges(begins_N, lengths_N)
    return Layout(
        lengths_N=lengths_N,
        prefix_N=np.concatenate([np.full(len(first), packs.NO_PREFIX), of_sample[continued]]),
        at_T=at_T,
        real_T=np.ones(len(at_T), bool),
        where_R=np.where(nth_R == 0, ends[of_sample[owner_R]] - 1, begun[owner_R] + nth_R - 1),
        owner_R=owner_R,
        rows_R=packs.ranges(batch.response_starts_N[p], responses),
        targets_R=(starts + prompts)[owner_R] + nth_R,
    )
