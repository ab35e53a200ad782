"""The tokens that sampling had left to choose from, for a micro-batch: what its log-probabilities are taken among.

Made from the ``rollout_top_p_*`` columns of a batch (:mod:`slime_cli.rollout.nucleus`), read by the log-probability
head.
"""

import dataclasses

import numpy as np
import torch


@dataclasses.dataclass(frozen=True)
class Nucleus:
    """Ragged: row ``i`` of the micro-batch's response tokens keeps ``ids_K[starts_R1[i] : starts_R1[i + 1]]``; none
    means all."""

    ids_K: torch.Tensor
    starts_R1: torch.Tensor

    @classmethod
    def of(cls, ids_K: np.ndarray, counts_R: np.ndarray, rows_R: np.ndarray, device: torch.device) -> "Nucleus":
        """The rows ``rows_R`` of a batch's ragged column; one row that keeps all for a filler, which has none."""
        counts = counts_R[rows_R] if len(rows_R) else np.zeros(1, np.int64)
        starts_R1 = np.concatenate([[0], np.cumsum(counts)])
        firsts = (np.cumsum(counts_R) - counts_R)[rows_R] if len(rows_R) else np.zeros(1, np.int64)
        at_K = np.arange(starts_R1[-1]) + np.repeat(firsts - starts_R1[:-1], counts)
        return cls(
            torch.as_tensor(ids_K[at_K], dtype=torch.long).to(device),
            torch.as_tensor(starts_R1, dtype=torch.long).to(device),
        )

    def keep(self, first: int, count: int, vocabulary: range) -> torch.Tensor:
        """bool [count, V / tp]: of ``count`` rows from ``first``, the tokens of this rank's slice of the vocabulary
        that stay."""
        starts = self.starts_R1[first : first + count + 1]
        sizes = starts.diff()
        rows_K = torch.arange(count, device=starts.device).repeat_interleave(sizes)
        own_K = self.ids_K[starts[0] : starts[-1]] - vocabulary.start
        here = (own_K >= 0) & (own_K < len(vocabulary))
        keep_CV = (sizes == 0)[:, None].repeat(1, len(vocabulary))
        keep_CV[rows_K[here], own_K[here]] = True
        return keep_CV
