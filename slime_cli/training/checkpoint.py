"""Megatron's torch_dist checkpoints: saved whole or not at all, loaded to exactly the state that was saved.

A checkpoint counts as complete when its ``checkpoint.json`` is there: it is written last, after Megatron's files are
synced. Which one to resume from is the journal's to say, not Megatron's tracker file.
"""

import contextlib
import os
import pathlib
import shutil

import torch
from megatron.core.dist_checkpointing.strategies.filesystem_async import get_write_results_queue
from megatron.training.checkpointing import load_checkpoint, save_checkpoint

from slime_cli import manifests
from slime_cli.errors import DataError
from slime_cli.manifests import checkpoints


def save(args, root: str, iteration: int, model, optimizer, scheduler, manifest: manifests.Checkpoint) -> None:
    """Collective. Saves model, optimizer, scheduler and RNG state as iteration ``iteration``."""
    args.save = root
    if optimizer is not None:
        _before_the_first_step(optimizer)
    # Megatron's writer keeps results in a manager process. Made by its default, spawn, that process imports this whole
    # program again (10 s and a core); a forked one only serves a queue. The first call decides for all later ones.
    get_write_results_queue("fork")
    with contextlib.redirect_stdout(None):
        save_checkpoint(iteration, model, optimizer, scheduler, 0)
    if torch.distributed.get_rank() == 0:
        target = checkpoints.folder(root, iteration)
        for file in target.iterdir():
            with open(file, "rb") as f:
                os.fsync(f.fileno())
        manifests.write(target / checkpoints.MANIFEST, manifest)
    torch.distributed.barrier()


def prune(root: str | os.PathLike, newest: int, also: str | None = None) -> None:
    """Keeps the ``newest`` complete checkpoints, and one named as ``also`` is; others, broken ones too, go.

    Rank 0 calls it after the commit.
    """
    keep = set(checkpoints.iterations(root)[-newest:])
    for path in pathlib.Path(root).glob("iter_*"):
        if path.name[5:].isdigit() and int(path.name[5:]) not in keep and (also is None or path.name != pathlib.Path(also).name):
            shutil.rmtree(path)


def load(args, path: str | os.PathLike, model, optimizer, scheduler, *, weights_only: bool) -> int:
    """Collective. Loads the checkpoint folder ``path`` (``.../iter_NNNNNNN``) and returns its iteration.

    ``weights_only`` starts a new training from its weights. Raises DataError when the checkpoint is not complete.
    """
    path = pathlib.Path(path)
    manifest = manifests.read(path / checkpoints.MANIFEST, manifests.Checkpoint)
    if manifest.format != "torch_dist":
        raise DataError(f"{path}: format is {manifest.format}, not torch_dist", "slime convert hf-to-dist makes one")
    tracker = path.parent / "latest_checkpointed_iteration.txt"
    if manifest.iteration == 0 and tracker.exists() and tracker.read_text().strip() not in ("0", "release"):
        raise DataError(f"{path}: Megatron cannot load iteration 0 beside later ones", "move it into a folder of its own")
    args.load, args.ckpt_step = str(path.parent), manifest.iteration
    args.finetune = args.no_load_optim = args.no_load_rng = weights_only
    args.exit_on_missing_checkpoint = True
    if not weights_only:
        _create_optimizer_state(args, optimizer)
    with torch.no_grad(), contextlib.redirect_stdout(None):
        load_checkpoint(model, optimizer if not weights_only else None, scheduler if not weights_only else None)
    if weights_only:
        optimizer.reload_model_params()
    else:
        _restore_steps(optimizer)
    return manifest.iteration


def inner_optimizers(optimizer) -> list:
    """The optimizers that Megatron chains, or the one there is."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def _before_the_first_step(optimizer) -> None:
    """Gives an optimizer that has not stepped (a policy's while its critic trains alone) the state that it begins with: a
    checkpoint without it could not be loaded, since loading asks for all of it."""
    for inner in inner_optimizers(optimizer):
        torch_optimizer = getattr(inner, "optimizer", None)
        if torch_optimizer is None or torch_optimizer.state or inner.init_state_fn is None:
            continue
        inner.init_state_fn(torch_optimizer, inner.config)
        if isinstance(torch_optimizer, torch.optim.Adam | torch.optim.AdamW):
            for state in torch_optimizer.state.values():
                # Megatron leaves a step of 0 out of the checkpoint, and torch then refuses it. This one is not 0, and the
                # next is 1 exactly.
                state["step"] = torch.tensor(1e-30)


def _create_optimizer_state(args, optimizer) -> None:
    """A sharded load fills state that exists; torch's AdamW makes its state at the first step only."""
    if args.use_distributed_optimizer:
        for inner in inner_optimizers(optimizer):
            inner._init_optimizer_states_with_dummy_values()


def _restore_steps(optimizer) -> None:
    """Megatron puts Adam's step count back into the parameter group; torch's AdamW reads it from each state."""
    for inner in inner_optimizers(optimizer):
        torch_optimizer = getattr(inner, "optimizer", None)
        for group in torch_optimizer.param_groups if torch_optimizer else []:
            if group.get("step") is None:
                continue
            for parameter in group["params"]:
                state = torch_optimizer.state.get(parameter)
                if state and "step" in state:
                    state["step"] = torch.tensor(float(group["step"]))
