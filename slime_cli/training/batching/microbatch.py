"""A micro-batch as tensors: the pack's tokens, and for every response token what the loss needs to know.

``R`` counts the response tokens that are predicted on this rank, sample by sample: all of the micro-batch's samples, or
this rank's share of them under context parallelism. :mod:`slime_cli.training.batching.parts` builds them, and
:mod:`slime_cli.training.preparation` adds what the loss needs besides the batch's own columns.
"""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from slime_cli.buffer.columns import TrainBatch
from slime_cli.training.batching import packs, prefixes
from slime_cli.training.network.nucleus import Nucleus


class Predicting(Protocol):
    """Places of a pack and the response tokens that are predicted there."""

    where_R: torch.Tensor
    targets_R: torch.Tensor
    nucleus: Nucleus | None


@dataclasses.dataclass
class Further:
    """Inputs and targets of one depth of multi-token prediction (MTP). Columns are named as the micro-batch's."""

    tokens_T: torch.Tensor
    """The token that lies so many places on as the depth says, in the same sequence; 0 behind its end."""
    where_R: torch.Tensor
    targets_R: torch.Tensor
    mask_R: torch.Tensor
    weight_R: torch.Tensor
    nucleus: Nucleus | None = None


@dataclasses.dataclass
class MicroBatch:
    """One pack. Columns that a loss does not use are None."""

    positions: list[int]
    """Which samples of the batch it holds, in order; empty for a filler."""
    tokens_T: torch.Tensor
    padding_T: torch.Tensor
    """bool, True where a token only fills a place; never in a filler, since routers divide by the count of the others.
    """
    pack: packs.Pack
    where_R: torch.Tensor
    """The place in the pack whose logits predict each response token."""
    targets_R: torch.Tensor
    mask_R: torch.Tensor
    """bool, True where the token is trained."""
    weight_R: torch.Tensor
    """What the token's loss counts in the step's loss."""
    sample_R: torch.Tensor
    """Which of the micro-batch's samples a response token belongs to."""
    rows_R: np.ndarray
    """Where each response token is in the batch's own ``_R`` columns; empty for a filler."""
    rollout_log_probs_R: torch.Tensor | None
    nucleus: Nucleus | None = None
    """What log-probabilities are taken among, where sampling was cut; None: the whole vocabulary."""
    further: Sequence[Further] = ()
    """By depth, where multi-token prediction is trained."""
    mtp_losses_D: torch.Tensor | None = None
    """Its losses, by depth, from the pass that trains on."""
    advantages_R: torch.Tensor | None = None
    returns_R: torch.Tensor | None = None
    old_log_probs_R: torch.Tensor | None = None
    ref_log_probs_R: torch.Tensor | None = None
    teacher_log_probs_R: torch.Tensor | None = None
    old_values_R: torch.Tensor | None = None
    correction_R: torch.Tensor | None = None
    """What the policy loss is multiplied by: an off-policy correction, a user's reducer."""
    routed_experts_TLK: torch.Tensor | None = None
    """Experts that the engine chose for each of this rank's tokens in all layers of the model, on the host, until they
    are taken."""
    routes: dict[tuple[int, int], torch.Tensor] = dataclasses.field(default_factory=dict)
    """Experts chosen for this rank's tokens, int16 [T, K] by virtual pipeline stage and router; see
    :mod:`slime_cli.training.network.routing`."""
    measured_R: torch.Tensor | None = None
    """bool, True where the log-probability that is compared with the engine's is of the weights that wrote the token;
    None in a step where no such are at hand."""

    @property
    def samples(self) -> int:
        return max(len(self.positions), 1)

    def take(self, column_R: np.ndarray) -> torch.Tensor:
        """This micro-batch's part of a column of the whole batch: bool of a bool one, else float32, on the device."""
        dtype = torch.bool if column_R.dtype == bool else torch.float32
        values = column_R[self.rows_R] if len(self.rows_R) else np.zeros(1)
        return torch.as_tensor(values, dtype=dtype).to(self.tokens_T.device)


def filled[T](column: T | None) -> T:
    """A column that something earlier fills in. Raises ValueError where nothing did."""
    if column is None:
        raise ValueError("a column is read that nothing has filled in")
    return column


def build(
    batch: TrainBatch,
    positions: list[int],
    weights_N: np.ndarray,
    *,
    cut: packs.Cut,
    device: torch.device,
    nucleus: bool = False,
    depths: int = 0,
    share_prompts: bool = False,
) -> MicroBatch:
    """Tensors of this rank's part (``cut``) of the samples at ``positions``, which may hold none of their response
    tokens. ``nucleus``: log-probabilities are taken among the tokens that sampling had left. ``depths``: of multi-token
    prediction. ``share_prompts``: the pack holds every prompt once (:mod:`slime_cli.training.batching.prefixes`); on
    one context parallel rank.

    No positions: a filler of masked tokens that keeps the ranks' collectives in step.
    """
    p = np.asarray(positions, np.int64)
    found = (prefixes.shared if share_prompts and len(p) else prefixes.whole)(batch, p, cut)
    count = len(found.at_T)
    padding = (-count) % cut.tokens_multiple if count else cut.tokens_multiple
    tokens = np.where(found.real_T, batch.tokens_T[found.at_T], 0)
    padding_T = np.concatenate([~found.real_T, np.ones(padding, bool)])
    lengths = found.lengths_N.tolist()
    prefix_N = None if found.prefix_N is None else found.prefix_N.tolist()
    if padding:
        lengths.append(padding * cut.size)
        if prefix_N is not None:
            prefix_N.append(packs.NO_PREFIX)
    rows = found.rows_R

    def tensor(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(values, dtype=dtype).to(device)

    def of_response(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        """One value a response token; a single 0 where the rank has none, so that no column is ever empty."""
        return tensor(values if len(rows) else np.zeros(1), dtype)

    def column(values_R: np.ndarray | None) -> torch.Tensor | None:
        return None if values_R is None else of_response(values_R[rows], torch.float32)

    return MicroBatch(
        positions=list(positions),
        tokens_T=tensor(np.concatenate([tokens, np.zeros(padding, np.int64)]), torch.long),
        padding_T=tensor(padding_T if len(p) else ~padding_T, torch.bool),
        pack=packs.pack(lengths, device, cut, prefix_N),
        where_R=of_response(found.where_R, torch.long),
        targets_R=of_response(batch.tokens_T[found.targets_R], torch.long),
        mask_R=of_response(batch.loss_mask_R[rows], torch.bool),
        weight_R=of_response(weights_N[p][found.owner_R], torch.float32),
        sample_R=of_response(found.owner_R, torch.long),
        rows_R=rows,
        rollout_log_probs_R=column(batch.rollout_log_probs_R),
        teacher_log_probs_R=column(batch.teacher_log_probs_R),
        nucleus=_nucleus(batch, rows, device) if nucleus else None,
        routed_experts_TLK=_routed_experts(batch.routed_experts_TLK, found.at_T, ~padding_T),
        further=[
            _further(batch, p, weights_N, n, cut=cut, padding=padding, device=device) for n in range(1, depths + 1)
        ],
    )


def _further(
    batch: TrainBatch,
    p: np.ndarray,
    weights_N: np.ndarray,
    depth: int,
    *,
    cut: packs.Cut,
    padding: int,
    device: torch.device,
) -> Further:
    """Inputs and targets of a layer of multi-token prediction; the samples are whole, each a sequence of the pack."""
    lengths = batch.lengths_N[p]
    responses = batch.response_lengths_N[p]
    owner_T, place_T = packs.places(lengths, cut)
    at_T = batch.starts_N[p][owner_T] + place_T
    response_T = place_T - (lengths - responses - 1)[owner_T]
    ahead_T = np.flatnonzero(place_T + depth < lengths[owner_T])
    ahead = np.zeros(len(at_T) + padding, np.int64)
    ahead[ahead_T] = batch.tokens_T[at_T[ahead_T] + depth]
    places = np.flatnonzero((response_T + depth >= 0) & (response_T + depth < responses[owner_T]))
    rows = (batch.response_starts_N[p][owner_T] + response_T)[places] + depth

    def tensor(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(values, dtype=dtype).to(device)

    def predicted(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return tensor(values if len(places) else np.zeros(1), dtype)

    return Further(
        tokens_T=tensor(ahead, torch.long),
        where_R=predicted(places, torch.long),
        targets_R=predicted(batch.tokens_T[at_T[places] + depth + 1], torch.long),
        mask_R=predicted(batch.loss_mask_R[rows], torch.bool),
        weight_R=predicted(weights_N[p][owner_T[places]], torch.float32),
    )


def _nucleus(batch: TrainBatch, rows_R: np.ndarray, device: torch.device) -> Nucleus:
    return Nucleus.of(filled(batch.kept_ids_K), filled(batch.kept_counts_R), rows_R, device)


def _routed_experts(routed_TLK: np.ndarray | None, at_T: np.ndarray, real_T: np.ndarray) -> torch.Tensor | None:
    """The experts that the engine chose for the tokens at ``at_T``, int16; what is padding goes to the first ones."""
    if routed_TLK is None:
        return None
    out = np.broadcast_to(np.arange(routed_TLK.shape[2]), (len(real_T), *routed_TLK.shape[1:])).copy()
    out[np.flatnonzero(real_T)] = routed_TLK[at_T[real_T[: len(at_T)]]]
    return torch.from_numpy(out.astype(np.int16))
