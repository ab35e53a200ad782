"""Every path of a run, once. Torch-free; nothing here reads or writes.

A run directory, ``RUN``, has what all its phases share. Each phase has what is its own in ``RUN/PHASE``, or in ``RUN``
itself where the profile names no phases; ``folder`` is that one. Names of a fixed file are constants, for
``folder / layout.JOURNAL``; functions make the numbered ones, so that nobody else knows how many digits they have.
"""

import os
import pathlib
import re

RUN = "run.json"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
MEMORY = "memory.json"
REWARD_PLOT = "reward.png"
ENDPOINT = "endpoint.json"
CLAIM = "endpoint.claim.json"
"""Beside ``endpoint.json``; see :mod:`slime_cli.serving.claim`."""
SYNCED = "sync.json"
"""Beside ``endpoint.json``: what ``slime sync`` has sent."""
LOCK = ".lock"
TRACE = "trace"
LOGS = "logs"
MODEL = "model"
"""The checkpoint that a ``tiny:`` model is made as."""

JOURNAL = "journal.sqlite"
ROLLOUTS = "rollouts"
SAMPLES = "samples.parquet"
WEIGHTS = "weights"
APPLIED = "applied"
"""Beside versions, or in ``--update-weight-local-checkpoint-dir``: the copy that deltas are applied to."""
CHECKPOINTS = "checkpoints"
EVALUATIONS = "eval"
TENSORBOARD = "tensorboard"
WANDB = "wandb"
"""W&B's name for its folder."""

MANIFEST = "manifest.json"
"""In the folder of a rollout or of a version, written last: the folder is complete when it is there."""
CHECKPOINT = "checkpoint.json"
"""The same for a checkpoint."""

RESERVED = frozenset(
    {RUN, METRICS, SUMMARY, MEMORY, REWARD_PLOT, ENDPOINT, CLAIM, TRACE, LOGS, MODEL}
    | {JOURNAL, ROLLOUTS, WEIGHTS, CHECKPOINTS, EVALUATIONS, TENSORBOARD, WANDB}
)
"""Names in a run directory that a phase cannot have."""

_VERSION = re.compile(r"v(\d{6,})", re.ASCII)
_ROLLOUT = re.compile(r"(\d+)", re.ASCII)
_EVALUATION = re.compile(r"(\d+)\.json", re.ASCII)
_CHECKPOINT = re.compile(r"iter_(\d+)", re.ASCII)


def _numbered(folder: pathlib.Path, pattern: re.Pattern[str]) -> list[pathlib.Path]:
    """Entries of ``folder`` whose name has a number, by number: names sort wrongly once the digits overflow."""
    paths = folder.iterdir() if folder.is_dir() else ()
    found = [(int(match[1]), path) for path in paths if (match := pattern.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


PROBE = "probe.json"
"""Beside a published LoRA adapter: what the trainer computes with it."""


def rollout(folder: str | os.PathLike, rollout_id: int) -> pathlib.Path:
    """The batch of one rollout: ``manifest.json`` and ``samples.parquet``."""
    return pathlib.Path(folder) / ROLLOUTS / f"{rollout_id:06d}"


def rollouts(folder: str | os.PathLike) -> list[pathlib.Path]:
    """Folders of rollouts that are there, complete or not, in order."""
    return _numbered(pathlib.Path(folder) / ROLLOUTS, _ROLLOUT)


def evaluation(folder: str | os.PathLike, step: int) -> pathlib.Path:
    """Results of the weights of ``step``, JSON."""
    return pathlib.Path(folder) / EVALUATIONS / f"{step:06d}.json"


def evaluations(folder: str | os.PathLike) -> list[pathlib.Path]:
    """Those that are there, by step."""
    return _numbered(pathlib.Path(folder) / EVALUATIONS, _EVALUATION)


def checkpoint(root: str | os.PathLike, step: int) -> pathlib.Path:
    """Megatron's name for it; ``root`` is ``--save`` or the phase's ``checkpoints/``."""
    return pathlib.Path(root) / f"iter_{step:07d}"


def critic(checkpoint_folder: str | os.PathLike) -> pathlib.Path:
    """Where the critic of a policy's checkpoint is saved."""
    path = pathlib.Path(checkpoint_folder)
    return path.parent / "critic" / path.name


def checkpoints(root: str | os.PathLike) -> list[pathlib.Path]:
    """Those that are there, whole or not, by step."""
    return _numbered(pathlib.Path(root), _CHECKPOINT)


def version_name(step: int) -> str:
    """The name of the weights after optimizer step ``step``, for engines and for the folder of the version."""
    return f"v{step:06d}"


def step_of(version: str | None) -> int | None:
    """The inverse of :func:`version_name`; None for a name that it did not make (``default``, ``by-hand``)."""
    found = _VERSION.fullmatch(version or "")
    return int(found[1]) if found else None


def adapter_name(version: str, digest: str) -> str:
    """The name of a version's LoRA adapter in engines, which other adapters of a version of that name do not have.
    ``digest``: hex digits of what is in it."""
    return f"{version}-{digest[:8]}"


def version_of(adapter: str) -> str:
    """The version in an :func:`adapter_name`."""
    return adapter.partition("-")[0]


def version(folder: str | os.PathLike, step: int) -> pathlib.Path:
    """A published version: what an engine loads, and its manifest."""
    return pathlib.Path(folder) / WEIGHTS / version_name(step)


def versions(folder: str | os.PathLike) -> list[pathlib.Path]:
    """Folders of published versions that are there, complete or not, by step."""
    return _numbered(pathlib.Path(folder) / WEIGHTS, _VERSION)
