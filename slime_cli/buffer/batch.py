"""A rollout batch: the samples that one rollout hands to the trainer, as columns, and its Parquet file on disk.

Written once by the conductor (``rollouts/NNNNNN/samples.parquet``), read by trainer ranks, by a resumed run that trains
it
again, and by anything that reads Parquet. Order of samples is the order of training.
"""

import contextlib
import dataclasses
import io
import json
import math
import os
import pathlib
from collections.abc import Iterable, Iterator

import numpy as np

from slime_cli import manifests
from slime_cli.buffer.types import Sample, executions
from slime_cli.errors import DataError
from slime_cli.manifests import layout

SAMPLES = layout.SAMPLES


@dataclasses.dataclass(frozen=True)
class TrainBatch:
    """N samples of R response tokens in all, T tokens in all."""

    sample_index_N: np.ndarray
    """The execution that each sample came from: siblings share it."""
    group_index_N: np.ndarray
    lengths_N: np.ndarray
    """Prompt + response tokens of each sample."""
    response_lengths_N: np.ndarray
    rewards_N: np.ndarray
    truncated_N: np.ndarray
    tokens_T: np.ndarray
    loss_mask_R: np.ndarray
    """uint8, 1 where the token is trained."""
    rollout_log_probs_R: np.ndarray | None
    """float32; None when no engine generated the samples (SFT)."""
    teacher_log_probs_R: np.ndarray | None = None
    """float32; None without a teacher endpoint."""
    kept_ids_K: np.ndarray | None = None
    """Tokens that top-p and top-k left at each response token, one after the other; None without
    ``--use-top-p-replay``."""
    kept_counts_R: np.ndarray | None = None
    """How many of them are a response token's; 0 where it was not sampled."""
    routed_experts_TLK: np.ndarray | None = None
    """int16, the experts that the engine chose for each token in each of L layers; the last token of a sample, whose
    choice no engine makes, has the first K. None without ``--use-rollout-routing-replay``."""
    versions_R: np.ndarray | None = None
    """int32, the step of the version that wrote each response token; -1 where no engine did, or where it is not known.
    None when no engine generated the samples (SFT)."""

    def __len__(self) -> int:
        return len(self.lengths_N)

    @property
    def starts_N(self) -> np.ndarray:
        """First token of each sample in ``tokens_T``."""
        return np.concatenate([[0], np.cumsum(self.lengths_N)[:-1]]).astype(np.int64)

    @property
    def response_starts_N(self) -> np.ndarray:
        """First response token of each sample in the ``_R`` columns."""
        return np.concatenate([[0], np.cumsum(self.response_lengths_N)[:-1]]).astype(np.int64)

    @classmethod
    def from_samples(cls, samples: list[Sample], reward_key: str | None = None) -> "TrainBatch":
        """Raises ValueError for a sample whose per-token lists do not fit, or when only some have log-probabilities."""
        for sample in samples:
            sample.check()
            if sample.response_length == len(sample.tokens):
                raise ValueError(
                    f"sample {sample.index} has no prompt token: nothing predicts its first response token"
                )

        def flat(values, dtype):
            return np.fromiter((x for row in values for x in row), dtype=dtype)

        def column(name: str, dtype=np.float32) -> np.ndarray | None:
            rows = _all_or_none(samples, name)
            return None if rows is None else flat(rows, dtype)

        kept_ids_K = column("rollout_top_p_token_ids", np.int64)
        return cls(
            sample_index_N=np.array([s.index for s in samples], np.int64),
            group_index_N=np.array([s.group_index for s in samples], np.int64),
            lengths_N=np.array([len(s.tokens) for s in samples], np.int64),
            response_lengths_N=np.array([s.response_length for s in samples], np.int64),
            rewards_N=np.array([0.0 if s.reward is None else _reward(s, reward_key) for s in samples], np.float64),
            truncated_N=np.array([s.status.value == "truncated" for s in samples], bool),
            tokens_T=flat([s.tokens for s in samples], np.int64),
            loss_mask_R=flat([s.effective_mask() for s in samples], np.uint8),
            rollout_log_probs_R=column("rollout_log_probs"),
            teacher_log_probs_R=column("teacher_log_probs"),
            kept_ids_K=kept_ids_K,
            kept_counts_R=(
                None
                if kept_ids_K is None
                else flat([np.diff(s.rollout_top_p_token_offsets) for s in samples], np.int64)
            ),
            routed_experts_TLK=_routed_experts(samples),
            versions_R=_versions(samples),
        )


def _versions(samples: list[Sample]) -> np.ndarray | None:
    if not any(s.spans or s.weight_versions or s.rollout_log_probs is not None for s in samples):
        return None
    runs = [run for sample in samples for run in sample.step_spans]
    return np.repeat(np.array([step for _, step in runs], np.int32), [length for length, _ in runs])


def _reward(sample: Sample, key: str | None) -> float:
    try:
        value = sample.reward_value(key)
    except (KeyError, TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        under = f" under {key!r}" if key else ""
        raise ValueError(f"sample {sample.index}: its reward is {sample.reward!r:.200}, no finite number{under}")
    return value


def _all_or_none(samples: list[Sample], name: str) -> list | None:
    """The field of every sample, None when none has it. Raises ValueError when only some have."""
    rows = [getattr(s, name) for s in samples]
    without = [s.index for s, row in zip(samples, rows) if row is None]
    if without and len(without) < len(rows):
        raise ValueError(f"sample {without[0]} has no {name} while others have")
    return None if without or not rows else rows


def unlike_the_others(samples: list[Sample]) -> dict[str, list[int]]:
    """Executions by the reason why they don't fit a batch: a sample lacks a column that others have
    (``no_rollout_log_probs``)."""
    found: dict[str, list[int]] = {}
    for name in ("rollout_log_probs", "teacher_log_probs", "rollout_top_p_token_ids", "rollout_routed_experts"):
        without = executions(s for s in samples if getattr(s, name) is None)
        if len(without) < len(executions(samples)) and without:
            found[f"no_{name}"] = list(without)
            samples = [s for s in samples if s.index not in without]
    return found


def _routed_experts(samples: list[Sample]) -> np.ndarray | None:
    chosen = _all_or_none(samples, "rollout_routed_experts")
    if chosen is None:
        return None
    shapes = sorted({tuple(s.routed_experts_shape) for s in samples})
    if len(shapes) > 1:
        raise ValueError(f"rollout_routed_experts differ in layers and experts a token: {shapes}")
    last_1LK = np.broadcast_to(np.arange(shapes[0][1], dtype=np.int16), (1, *shapes[0]))
    return np.concatenate(
        [part for c in chosen for part in (np.frombuffer(c, "<i2").reshape(-1, *shapes[0]), last_1LK)]
    )


def to_parquet(samples: list[Sample]) -> bytes:
    """One row a sample, siblings too; nested fields as lists, free-form ones (reward, metadata, prompt) as JSON
    text."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [s.to_dict() for s in samples]
    for row in rows:
        for name in ("reward", "metadata", "prompt"):
            row[name] = json.dumps(row[name])
        row["spans"] = [span._asdict() for span in row["spans"]]
    schema = pa.schema(
        [
            ("index", pa.int64()),
            ("group_index", pa.int64()),
            ("rollout_id", pa.int64()),
            ("part", pa.int64()),
            ("status", pa.string()),
            ("prompt", pa.string()),
            ("response", pa.string()),
            ("label", pa.string()),
            ("reward", pa.string()),
            ("tokens", pa.list_(pa.int64())),
            ("response_length", pa.int64()),
            ("loss_mask", pa.list_(pa.int8())),
            ("rollout_log_probs", pa.list_(pa.float32())),
            ("teacher_log_probs", pa.list_(pa.float32())),
            ("weight_versions", pa.list_(pa.string())),
            ("spans", pa.list_(pa.struct([("length", pa.int32()), ("version", pa.string())]))),
            ("rollout_top_p_token_ids", pa.list_(pa.int32())),
            ("rollout_top_p_token_offsets", pa.list_(pa.int32())),
            ("remove_sample", pa.bool_()),
            ("metadata", pa.string()),
            ("rollout_routed_experts", pa.binary()),
            ("routed_experts_shape", pa.list_(pa.int32())),
        ]
    )
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), out, compression="zstd")
    return out.getvalue()


def read_parquet(path: str | os.PathLike) -> list[Sample]:
    """Inverse of :func:`to_parquet`; older files have no ``part`` (no siblings) or no ``spans`` (not known)."""
    import pyarrow.parquet as pq

    samples = []
    for row in pq.read_table(path).to_pylist():
        for name in ("reward", "metadata", "prompt"):
            row[name] = json.loads(row[name])
        row["spans"] = [span.values() for span in row.get("spans") or ()]
        samples.append(Sample.from_dict(row))
    return samples


def write(
    folder: pathlib.Path,
    samples: list[Sample],
    groups: int,
    dropped: dict[str, int],
    cursors: tuple[dict, dict],
    rollout_id: int,
) -> list[int]:
    """Samples and manifest of a rollout into its folder, durably; the executions of the batch. ``dropped``: executions
    by reason;
    ``cursors``: the prompt source's before and after."""
    manifests.write_bytes(folder / SAMPLES, to_parquet(samples))
    batched = list(executions(samples))
    fates = {"batched": len(batched)} | {f"dropped:{reason}": n for reason, n in dropped.items()}
    manifest = manifests.Rollout(
        rollout_id=rollout_id,
        groups=groups,
        samples=len(samples),
        executions=len(batched),
        fates=fates,
        weight_versions=sorted({v for s in samples for v in s.weight_versions}),
        prompt_cursor_before=cursors[0],
        prompt_cursor_after=cursors[1],
        files={SAMPLES: manifests.file_hash(folder / SAMPLES)},
    )
    manifests.write(folder / layout.MANIFEST, manifest)
    return batched


def read_again(folder: pathlib.Path, indices: Iterable[int], rows: int | None) -> list[Sample]:
    """What an earlier attempt wrote of the executions ``indices``. DataError, with the way out, when it can't be
    trained."""
    kept = set(indices)
    with _named(folder):
        samples = [sample for sample in read_parquet(folder / SAMPLES) if sample.index in kept]
        if missing := kept - {sample.index for sample in samples}:
            raise ValueError(f"sample {min(missing)} is not in it")
        for sample in samples:
            sample.check(rows)
    return samples


def columns(samples: list[Sample], reward_key: str | None, folder: pathlib.Path) -> TrainBatch:
    """The samples of a rollout that is on disk, for the trainer. DataError, with the way out, when they don't make a
    batch."""
    with _named(folder):
        return TrainBatch.from_samples(samples, reward_key)


@contextlib.contextmanager
def _named(folder: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, KeyError, OSError) as error:  # pyarrow's errors are among them
        fix = (
            f"the same command with --drop-rollouts {int(folder.name)} drops this batch and makes another; the ledger"
            " keeps count"
        )
        raise DataError(f"{folder / SAMPLES} can't be trained: {error}", fix) from None


def rollout_folder(run_dir: str | os.PathLike, rollout_id: int) -> pathlib.Path:
    return layout.rollout(run_dir, rollout_id)
