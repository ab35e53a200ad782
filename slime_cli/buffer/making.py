"""Makes a batch of the groups that a rollout was given: users' functions and what does not fit first, then the disk.

Called by :class:`slime_cli.buffer.buffer.DataBuffer`, in a thread. Invariants: the batch is durable before its
trajectories are BATCHED; every trajectory of the groups is in the batch or dropped, with the reason.
"""

import collections
import dataclasses
import pathlib
from collections.abc import Callable

from slime_cli.buffer import batch as batches
from slime_cli.buffer.batch import Batch
from slime_cli.buffer.journal import Journal
from slime_cli.buffer.types import Group, Sample, trajectories
from slime_cli.errors import DataError

Shape = Callable[[list[list[Sample]], list[list[Sample]]], list[Sample]]
"""The samples of a batch's groups as users' functions leave them; the second are those of rejected groups."""


@dataclasses.dataclass(frozen=True)
class Chosen:
    """The groups of a rollout, before they are a batch."""

    rollout_id: int
    groups: list[Group]
    dropped: collections.Counter[str]
    cursors: batches.Cursors
    rejected: list[list[Sample]]
    """Samples of finished groups that were rejected since the batch before, where users' functions look at them."""


def all_fit(samples: list[Sample]) -> dict[str, list[int]]:
    """No trajectory is unfit."""
    return {}


@dataclasses.dataclass
class Maker:
    """``folder``: the phase's. ``unfit``: trajectories that a batch must not have, by reason."""

    journal: Journal
    folder: pathlib.Path
    reward_key: str | None = None
    unfit: Callable[[list[Sample]], dict[str, list[int]]] = all_fit
    shape: Shape | None = None

    def make(self, chosen: Chosen) -> Batch:
        """The batch, durable and BATCHED. Blocks for as long as the disk takes. DataError when nothing is left to
        train."""
        samples = self._fitting(self._samples(chosen), chosen.dropped)
        made = batches.new(
            self.folder,
            chosen.rollout_id,
            samples,
            groups=len(chosen.groups),
            dropped=chosen.dropped,
            cursors=chosen.cursors,
            reward_key=self.reward_key,
            ages={s.index: group.leased_at or 0 for group in chosen.groups for s in group.finished},
        )
        self.journal.batched(list(trajectories(samples)), chosen.rollout_id)
        return made

    def _samples(self, chosen: Chosen) -> list[Sample]:
        """The samples of the chosen groups, as users' functions leave them."""
        groups = [group.finished for group in chosen.groups]
        samples = [sample for finished in groups for sample in finished]
        if self.shape is None:
            return samples
        made = self.shape(groups, chosen.rejected)
        if gone := trajectories(samples).keys() - trajectories(made).keys():
            self.journal.drop(sorted(gone), "convert_samples")
            chosen.dropped["convert_samples"] += len(gone)
        return made

    def _fitting(self, samples: list[Sample], dropped: collections.Counter[str]) -> list[Sample]:
        """Without trajectories that lack what others have, or that ``unfit`` names; they are dropped, with the
        reason."""
        unfit = batches.unlike_the_others(samples)
        gone = {index for indices in unfit.values() for index in indices}
        unfit |= self.unfit([sample for sample in samples if sample.index not in gone])
        for reason, indices in unfit.items():
            if indices:
                self.journal.drop(indices, reason)
                dropped[reason] += len(indices)
        gone = {index for indices in unfit.values() for index in indices}
        samples = [sample for sample in samples if sample.index not in gone]
        if not any(sample.trained for sample in samples):
            raise DataError(
                f"the rollout left no token to train on: {len(samples)} samples, dropped {dict(dropped)}",
                "look at the reasons (slime trace ledger) and at the samples' loss masks",
            )
        return samples
