"""A micro-batch as tensors: the pack's tokens, and for every response token what the loss needs to know.

``R`` counts the response tokens that are predicted on this rank, sample by sample: all of the micro-batch's samples, or
this
rank's share of them under context parallelism.
"""

import dataclasses

import numpy as np
import torch

from slime_cli.buffer.batch import TrainBatch
from slime_cli.training.batching import packs
from slime_cli.training.network.nucleus import Nucleus


@dataclasses.dataclass
class MicroBatch:
    """One pack. Columns that a loss does not use are None."""

    positions: list[int]
    """Which samples of the batch it holds, in order; empty for a filler."""
    tokens_T: torch.Tensor
    padding_T: torch.Tensor
    """bool, True where a token only fills a place; never in a filler, since routers divide by the count of the
    others."""
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
    on_policy: bool = True
    """The log-probabilities that are compared with the engine's are of the weights that generated it: only then is the
    difference a figure of the engines alone."""

    @property
    def samples(self) -> int:
        return max(len(self.positions), 1)

    def take(self, column_R: np.ndarray) -> torch.Tensor:
        """This micro-batch's part of a column of the whole batch, float32 on the device."""
        values = column_R[self.rows_R] if len(self.rows_R) else np.zeros(1)
        return torch.as_tensor(values, dtype=torch.float32).to(self.tokens_T.device)


def build(
    batch: TrainBatch, positions: list[int], weights_N: np.ndarray, *, cut: packs.Cut, device, nucleus: bool = False
) -> MicroBatch:
    """Tensors of this rank's part (``cut``) of the samples at ``positions``, which may hold none of their response
    tokens.
    ``nucleus``: log-probabilities are taken among the tokens that sampling had left.

    No positions: a filler of masked tokens that keeps the ranks' collectives in step.
    """
    p = np.asarray(positions, np.int64)
    lengths = batch.lengths_N[p]
    responses = batch.response_lengths_N[p]
    owner_T, place_T = packs.places(lengths, cut)
    real_T = place_T < lengths[owner_T]
    at_T = batch.starts_N[p][owner_T] + place_T
    tokens = np.where(real_T, batch.tokens_T[np.where(real_T, at_T, 0)], 0)
    response_T = place_T - (lengths - responses - 1)[owner_T]  # which response token a place predicts
    where = np.flatnonzero((response_T >= 0) & (response_T < responses[owner_T]))
    owners = owner_T[where]
    r = (batch.response_starts_N[p][owner_T] + response_T)[where]
    targets = batch.tokens_T[at_T[where] + 1]
    mask = batch.loss_mask_R[r].astype(bool)
    weight = weights_N[p][owners]
    if not len(where):
        where, targets, mask, weight, owners = (
            np.zeros(1, t) for t in (np.int64, np.int64, bool, np.float64, np.int64)
        )
    padding = (-len(tokens)) % cut.tokens_multiple if len(tokens) else cut.tokens_multiple
    sizes = lengths.tolist()
    real_T = np.concatenate([real_T, np.zeros(padding, bool)])
    if padding:
        tokens = np.concatenate([tokens, np.zeros(padding, np.int64)])
        sizes = [*sizes, padding * cut.size]

    routed = batch.routed_experts_TLK
    if routed is not None:  # what is padding goes to the first experts
        anywhere = np.broadcast_to(np.arange(routed.shape[2]), (len(tokens), *routed.shape[1:])).copy()
        anywhere[np.flatnonzero(real_T)] = routed[at_T[real_T[: len(at_T)]]]
        routed = anywhere

    def tensor(values, dtype):
        return torch.as_tensor(values, dtype=dtype).to(device)

    def column(values_R):
        return None if values_R is None else tensor(values_R[r] if len(r) else np.zeros(1), torch.float32)

    return MicroBatch(
        positions=list(positions),
        tokens_T=tensor(tokens, torch.long),
        padding_T=tensor(~real_T if len(p) else real_T, torch.bool),
        pack=packs.pack(sizes, device, cut),
        where_R=tensor(where, torch.long),
        targets_R=tensor(targets, torch.long),
        mask_R=tensor(mask, torch.bool),
        weight_R=tensor(weight, torch.float32),
        sample_R=tensor(owners, torch.long),
        rows_R=r,
        rollout_log_probs_R=column(batch.rollout_log_probs_R),
        teacher_log_probs_R=column(batch.teacher_log_probs_R),
        nucleus=None if not nucleus else Nucleus.of(batch.kept_ids_K, batch.kept_counts_R, r, device),
        routed_experts_TLK=None if routed is None else torch.from_numpy(routed.astype(np.int16)),
    )
