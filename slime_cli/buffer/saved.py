"""Rollouts that are saved for another run, and trained there without engines: ``--save-debug-rollout-data`` and
``--load-debug-rollout-data``.

A saved rollout is the batch's own Parquet file under another name, so what any run left in ``rollouts/NNNNNN`` is one
too. Called by :mod:`slime_cli.loop.phase`. Blocking.
"""

import pathlib
from collections.abc import Callable

from slime_cli import disk, manifests
from slime_cli.buffer.batch import Batch
from slime_cli.buffer.batch_files import read_parquet
from slime_cli.buffer.types import Sample
from slime_cli.errors import DataError
from slime_cli.manifests import layout
from slime_cli.options.groups import SlimeOptions

FLAG = "--load-debug-rollout-data"
MAGIC = b"PAR1"
"""A Parquet file begins and ends with it."""
FIX = "give a file of --save-debug-rollout-data, or a run's rollouts/{rollout_id:06d}"


def save(template: str, batch: Batch) -> None:
    """A copy of the batch's file, whole or not there."""
    path = pathlib.Path(template.format(rollout_id=batch.rollout_id)).expanduser()
    with disk.naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        manifests.write_bytes(path, (batch.folder / layout.SAMPLES).read_bytes())


def load(
    s: SlimeOptions, rollout_id: int, fault: Callable[[Sample], str | None] = lambda sample: None
) -> tuple[list[list[Sample]], str]:
    """The groups of a saved rollout in their order, and the file's path. Where a share of them is asked for: half from
    the begin, half from the end, at least one.

    Raises DataError for a file that is not there, or that is no saved rollout, and for a sample with a ``fault``.
    slime's own files are pickles, which run what they hold when they are read: they are refused.
    """
    assert s.load_debug_rollout_data is not None, "without engines there is nothing else"
    path = pathlib.Path(s.load_debug_rollout_data.format(rollout_id=rollout_id)).expanduser()
    path = path / layout.SAMPLES if path.is_dir() else path
    groups: dict[int, list[Sample]] = {}
    for sample in _read(path):
        if wrong := fault(sample):
            raise DataError(f"{FLAG}: {path}: {wrong}", "train on rollouts of this model, with these options")
        groups.setdefault(sample.group_index, []).append(sample)
    return _some(list(groups.values()), s.load_debug_rollout_data_subsample), str(path)


def _read(path: pathlib.Path) -> list[Sample]:
    where = f"{FLAG}: {path}"
    try:
        with open(path, "rb") as file:
            begin = file.read(len(MAGIC))
        if begin != MAGIC:
            pickled = begin.startswith((b"PK", b"\x80"))  # torch's zip, or its older form
            kind = "a pickle, as slime itself saves rollouts" if pickled else "no Parquet file"
            raise DataError(f"{where} is {kind}", FIX)
        samples = read_parquet(path)
    except (OSError, ValueError, TypeError, KeyError) as error:  # pyarrow's errors are among them
        raise DataError(f"{where} cannot be read: {error}", FIX) from None
    if not samples:
        raise DataError(f"{where} has no samples", FIX)
    return samples


def _some(groups: list[list[Sample]], share: float | None) -> list[list[Sample]]:
    if share is None:
        return groups
    count = max(1, round(len(groups) * share))
    last = count // 2
    return groups[: count - last] + groups[len(groups) - last :]
