"""A batch as a value: the samples of one rollout, on disk and as columns, whether new, supervised or replayed.

Made by :class:`slime_cli.buffer.buffer.DataBuffer`. Invariants: a batch is durable before its trajectories are BATCHED;
a batch that a resumed run reads again equals the one that was made, its counts of what was dropped included.
"""

import collections
import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator, Mapping

import numpy as np

from slime_cli import manifests
from slime_cli.buffer.batch_files import read_parquet, to_parquet
from slime_cli.buffer.columns import TrainBatch
from slime_cli.buffer.types import Sample, trajectories
from slime_cli.errors import DataError
from slime_cli.manifests import layout

_DROPPED = "dropped:"
"""Before a reason, among the manifest's fates."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """The samples of one rollout, which are trained together."""

    rollout_id: int
    samples: list[Sample]
    columns: TrainBatch
    """The samples as the trainer gets them, in the same order."""
    groups: int
    dropped: collections.Counter[str]
    """Trajectories that were dropped while it was collected, by reason."""
    folder: pathlib.Path
    replayed: bool
    """An earlier attempt made it."""
    ages: Mapping[int, int]
    """Trajectory -> how many rollouts the engines' weights were trained on when its group was leased."""

    def staleness(self, step: int, steps_per_rollout: int) -> np.ndarray:
        """Rollouts that were trained between the oldest token of each sample and ``step``, whose weights the batch's
        first optimizer step begins with; int64 [N]. A sample that tells no version counts from when its group was
        leased."""

        def age(sample: Sample) -> int:
            oldest = sample.oldest_step
            return step - (self.ages.get(sample.index, 0) * steps_per_rollout if oldest is None else oldest)

        return -(-np.array([max(0, age(sample)) for sample in self.samples], np.int64) // steps_per_rollout)

    @property
    def untold(self) -> int:
        """Samples that tell no version, as those of a user's function may."""
        return sum(sample.oldest_step is None for sample in self.samples)


@dataclasses.dataclass(frozen=True)
class Cursors:
    """Where the prompt source stood before and after a batch."""

    before: dict[str, int]
    after: dict[str, int]


def new(
    folder: pathlib.Path,
    rollout_id: int,
    samples: list[Sample],
    *,
    groups: int,
    dropped: collections.Counter[str],
    cursors: Cursors,
    reward_key: str | None,
    ages: Mapping[int, int],
) -> Batch:
    """Writes the batch durably. DataError, with the way out, when the samples don't make one."""
    folder = layout.rollout(folder, rollout_id)
    samples = [dataclasses.replace(sample, rollout_id=rollout_id) for sample in samples]
    with _named(folder):
        columns = TrainBatch.from_samples(samples, reward_key)
    _write(folder, rollout_id, samples, groups, dropped, cursors)
    return Batch(rollout_id, samples, columns, groups, dropped, folder, replayed=False, ages=ages)


def again(
    folder: pathlib.Path, rollout_id: int, ages: Mapping[int, int], *, rows: int | None, reward_key: str | None
) -> Batch:
    """The trajectories of ``ages`` in a batch that an earlier attempt wrote. DataError, with the way out, when they
    can't be trained. ``rows``: of the model's embedding."""
    folder = layout.rollout(folder, rollout_id)
    kept = ages.keys()
    with _named(folder):
        samples = [sample for sample in read_parquet(folder / layout.SAMPLES) if sample.index in kept]
        if missing := kept - {sample.index for sample in samples}:
            raise ValueError(f"sample {min(missing)} is not in it")
        for sample in samples:
            sample.check(rows)
        columns = TrainBatch.from_samples(samples, reward_key)
    manifest = manifests.read(folder / layout.MANIFEST, manifests.Rollout)
    fates = {name: count for name, count in manifest.fates.items() if name.startswith(_DROPPED)}
    dropped = collections.Counter({name.removeprefix(_DROPPED): count for name, count in fates.items()})
    return Batch(rollout_id, samples, columns, manifest.groups, dropped, folder, replayed=True, ages=ages)


def _write(
    folder: pathlib.Path,
    rollout_id: int,
    samples: list[Sample],
    groups: int,
    dropped: collections.Counter[str],
    cursors: Cursors,
) -> None:
    manifests.write_bytes(folder / layout.SAMPLES, to_parquet(samples))
    count = len(trajectories(samples))
    manifest = manifests.Rollout(
        rollout_id=rollout_id,
        groups=groups,
        samples=len(samples),
        trajectories=count,
        fates={"batched": count} | {f"{_DROPPED}{reason}": n for reason, n in dropped.items()},
        weight_versions=sorted({v for s in samples for v in s.weight_versions}),
        prompt_cursor_before=cursors.before,
        prompt_cursor_after=cursors.after,
        files={layout.SAMPLES: manifests.file_hash(folder / layout.SAMPLES)},
    )
    manifests.write(folder / layout.MANIFEST, manifest)


def unlike_the_others(samples: list[Sample]) -> dict[str, list[int]]:
    """Trajectories by the reason why they don't fit a batch: a sample lacks a column that others have
    (``no_rollout_log_probs``)."""
    found: dict[str, list[int]] = {}
    for name in ("rollout_log_probs", "teacher_log_probs", "rollout_top_p_token_ids", "rollout_routed_experts"):
        without = trajectories(s for s in samples if getattr(s, name) is None)
        if len(without) < len(trajectories(samples)) and without:
            found[f"no_{name}"] = list(without)
            samples = [s for s in samples if s.index not in without]
    return found


@contextlib.contextmanager
def _named(folder: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, KeyError, OSError) as error:  # pyarrow's errors are among them
        fix = (
            f"the same command with --drop-rollouts {int(folder.name)} drops this batch and makes another; the ledger"
            " keeps count"
        )
        raise DataError(f"{folder / layout.SAMPLES} can't be trained: {error}", fix) from None
