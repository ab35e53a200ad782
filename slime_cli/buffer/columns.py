"""A batch as columns: what the trainer ranks get. Torch-free. Order of samples is the order of training."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from slime_cli.buffer.types import Sample


@dataclasses.dataclass(frozen=True)
class TrainBatch:
    """N samples of R response tokens in all, T tokens in all."""

    sample_index_N: np.ndarray
    """The trajectory that each sample came from: siblings share it."""
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

        def flat(values: Iterable[Iterable[Any]], dtype: Any) -> np.ndarray:
            return np.fromiter((x for row in values for x in row), dtype=dtype)

        def column(name: str, dtype: Any = np.float32) -> np.ndarray | None:
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
                else flat([np.diff(s.rollout_top_p_token_offsets or [0]) for s in samples], np.int64)
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


def _routed_experts(samples: list[Sample]) -> np.ndarray | None:
    chosen = _all_or_none(samples, "rollout_routed_experts")
    if chosen is None:
        return None
    shapes = sorted({tuple(s.routed_experts_shape or ()) for s in samples})
    if len(shapes) > 1:
        raise ValueError(f"rollout_routed_experts differ in layers and experts a token: {shapes}")
    last_1LK = np.broadcast_to(np.arange(shapes[0][1], dtype=np.int16), (1, *shapes[0]))
    return np.concatenate(
        [part for c in chosen for part in (np.frombuffer(c, "<i2").reshape(-1, *shapes[0]), last_1LK)]
    )
