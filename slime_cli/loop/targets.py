"""Where a phase saves, whether it may write there, and how much room that takes. Torch-free, and light: ``--dry-run``
calls it."""

import itertools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from slime_cli import disk
from slime_cli.buffer.journal import Journal
from slime_cli.buffer.records import Commit
from slime_cli.errors import UsageError
from slime_cli.hardware import device as hardware
from slime_cli.manifests import checkpoints, layout
from slime_cli.models import architecture
from slime_cli.options import memory
from slime_cli.options.groups import SlimeOptions
from slime_cli.options.resolve import Resolved

KEEP_WEIGHTS = 2
"""Published versions that stay, besides those that a resume may need."""


def root(s: SlimeOptions, folder: pathlib.Path, run_dir: pathlib.Path) -> pathlib.Path:
    """The folder of a phase's checkpoints. In ``--save`` each phase of a run with several has a folder of its own, as
    in the run directory."""
    return (pathlib.Path(s.save) / folder.relative_to(run_dir) if s.save else folder / layout.CHECKPOINTS).resolve()


def check_folders(
    s: SlimeOptions,
    folder: pathlib.Path,
    run_dir: pathlib.Path,
    check: Callable[[pathlib.Path, str], None] = disk.writable,
) -> None:
    """Raises UsageError when ``--save`` or ``--save-hf`` cannot be written to, as ``check`` finds it."""
    if s.save:
        check(root(s, folder, run_dir), "--save")
    if s.save_hf:
        check(exports(s), "--save-hf")


def refuse_others(root: pathlib.Path, journal: Journal | None) -> None:
    """Steps are counted from 1 in every phase, so that saving beside another run's checkpoints would replace them."""
    own = journal is not None and (journal.commits() or journal.get("saving") is not None)
    if not own and (found := [i for i in checkpoints.iterations(root) if i]):
        raise UsageError(
            f"--save {root} holds checkpoints of another run already, up to iteration {found[-1]}",
            "give a new folder; --load can name that one",
        )


def exports(s: SlimeOptions) -> pathlib.Path:
    """The folder that all of ``--save-hf`` is in: as far as it has no {rollout_id}."""
    assert s.save_hf is not None
    parts = pathlib.Path(s.save_hf).parts
    return pathlib.Path(*itertools.takewhile(lambda part: "{" not in part, parts)).resolve()


def room(
    name: str, options: Resolved, folder: pathlib.Path, run_dir: pathlib.Path, config: dict[str, Any]
) -> list[tuple[pathlib.Path, str, int]]:
    """(folder, what, bytes) that a phase keeps at most at a time, estimated from the model's ``config``."""
    s = options.slime
    megatron = options.megatron
    found = memory.estimate(options, architecture.megatron_args(config))
    if found is None:
        return []
    half = (config.get("dtype") or config.get("torch_dtype")) in ("bfloat16", "float16")
    parameters = found["parameters"]
    master = half and hardware.find().kind == "cuda"
    moments = 0 if s.use_stateless_adam else 8
    each = (2 if master else 4) + (0 if megatron.get("no_save_optim") else moments + (4 if master else 0))
    networks = 2 if s.advantage_estimator == "ppo" and s.loss_type != "sft_loss" else 1
    checkpoints_ = root(s, folder, run_dir)
    needs = [
        (
            checkpoints_,
            f"{s.keep_checkpoints} + 1 checkpoints",
            (s.keep_checkpoints + 1) * networks * parameters * each,
        )
    ]
    published = parameters * (2 if half else 4)
    if s.loss_type != "sft_loss" and s.update_weight_transport == "disk":
        needs.append(
            (folder / layout.WEIGHTS, f"{KEEP_WEIGHTS} + 1 published versions", (KEEP_WEIGHTS + 1) * published)
        )
        copies = 2 if s.update_weight_mode == "delta" else 1 if s.update_weight_local_checkpoint_dir else 0
        if copies:  # what engines load, and with deltas what the ranks compare with
            near = pathlib.Path(s.update_weight_local_checkpoint_dir or folder / layout.WEIGHTS)
            needs.append((near, f"{copies} copies of the newest version", copies * published))
    if s.save_hf:
        count = max(1, (s.num_rollout or 1) // (s.save_interval or 1)) if "{" in s.save_hf else 1
        needs.append((exports(s), f"{count} exports", count * published))
    return needs


def reference_due(s: SlimeOptions, rollout_id: int) -> bool:
    """``--ref-update-interval``: the policy as saved after this rollout becomes the reference."""
    interval = s.ref_update_interval
    return s.loss_type != "sft_loss" and bool(interval) and (rollout_id + 1) % interval == 0


def reference(s: SlimeOptions, commits: Sequence[Commit]) -> str | None:
    """The checkpoint that became the reference last; None before the first time."""
    return next((c.checkpoint for c in reversed(commits) if reference_due(s, c.rollout_id)), None)
