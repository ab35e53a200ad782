"""Megatron's torch_dist checkpoints: saved whole or not at all, loaded to exactly the state that was saved.

A checkpoint counts as complete when its ``checkpoint.json`` is there: it is written last, after Megatron's files are
synced. Which one to resume from is the journal's to say, not Megatron's tracker file.

With ``--async-save`` :func:`start` returns while Megatron's writer, a process forked at that moment, still writes: its
memory is the state of the step, however long it takes and whatever is trained meanwhile. :func:`written` says when
every rank's writer is done; only then comes :func:`finish`.
"""

import argparse
import contextlib
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import torch
from megatron.core import dist_checkpointing
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.training.async_utils import is_empty_async_queue, maybe_finalize_async_save
from megatron.training.checkpointing import load_checkpoint, save_checkpoint

from slime_cli import manifests
from slime_cli.errors import DataError
from slime_cli.hardware import megatron
from slime_cli.manifests import checkpoints, layout, pickles
from slime_cli.training.network import adam_state
from slime_cli.training.network.chained import AnyChain, inner_optimizers

Chunks = list[torch.nn.Module]
"""A model on this rank: one module a virtual pipeline stage."""


def save(
    args: argparse.Namespace,
    root: str,
    iteration: int,
    model: Chunks,
    optimizer: MegatronOptimizer | None,
    scheduler: OptimizerParamScheduler | None,
    manifest: manifests.Checkpoint,
) -> None:
    """Collective. Saves model, optimizer, scheduler and RNG state as iteration ``iteration``, to the end."""
    target = start(args, root, iteration, model, optimizer, scheduler)
    written(wait=True)
    finish(target, manifest)


def start(
    args: argparse.Namespace,
    root: str,
    iteration: int,
    model: Chunks,
    optimizer: MegatronOptimizer | None,
    scheduler: OptimizerParamScheduler | None,
) -> pathlib.Path:
    """Collective. Writes Megatron's files, or with ``--async-save`` begins to; the checkpoint's folder."""
    args.save = root
    target = layout.checkpoint(root, iteration)
    if optimizer is not None:
        _before_the_first_step(optimizer)
    if torch.distributed.get_rank() == 0 and target.exists():
        shutil.rmtree(target)  # of an attempt that was killed before it could commit
    torch.distributed.barrier()
    # Megatron's writer keeps its results in a manager process. Made by the default, spawn, that process imports this
    # whole program again (10 s and a core); a forked one only serves a queue. Checkpoints that are written at the same
    # time (a critic's and its policy's) must not share one: either would take the other's results.
    megatron.queue_for_results(another=not is_empty_async_queue())
    with contextlib.redirect_stdout(None):
        save_checkpoint(iteration, model, optimizer, scheduler, 0)
    return target


def written(wait: bool) -> bool:
    """Collective. Whether Megatron's files of every checkpoint that was started are durable; it can be waited for.

    Raises what a writer of any rank raised.
    """
    with contextlib.redirect_stdout(None):
        maybe_finalize_async_save(blocking=wait)
    return is_empty_async_queue()


def finish(target: pathlib.Path, manifest: manifests.Checkpoint) -> None:
    """Collective. The checkpoint in ``target``, which is :func:`written`, becomes complete."""
    if torch.distributed.get_rank() == 0:
        for file in target.iterdir():
            with open(file, "rb") as f:
                os.fsync(f.fileno())
        sizes = {file.name: file.stat().st_size for file in sorted(target.iterdir())}
        manifests.write(target / layout.CHECKPOINT, msgspec.structs.replace(manifest, files=sizes))
    torch.distributed.barrier()


def load(
    args: argparse.Namespace,
    path: str | os.PathLike,
    model: Chunks,
    optimizer: MegatronOptimizer | None,
    scheduler: OptimizerParamScheduler | None,
    *,
    weights_only: bool,
) -> int:
    """Collective. Loads the checkpoint folder ``path`` (``.../iter_NNNNNNN``) and returns its iteration.

    ``weights_only`` starts a new training from its weights. Raises DataError when the checkpoint is not complete, or
    has not what a resume needs.
    """
    path = pathlib.Path(path)
    manifest = manifests.read(path / layout.CHECKPOINT, manifests.Checkpoint)
    if manifest.format != "torch_dist":
        raise DataError(f"{path}: format is {manifest.format}, not torch_dist", "slime convert hf-to-dist makes one")
    if damage := checkpoints.damage(path):
        raise DataError(f"{path}: damaged: {damage}", "restore it, or give another checkpoint")
    depths = args.mtp_num_layers
    if depths and manifest.megatron_args.get("mtp_num_layers") != depths:
        raise DataError(
            f"{path}: it has no {depths} layers of multi-token prediction (MTP), which are to be trained",
            f"slime convert hf-to-dist --mtp-num-layers {depths} makes one that has",
        )
    pickles.check(path, own=not weights_only)
    args.finetune = args.no_load_optim = args.no_load_rng = weights_only
    args.exit_on_missing_checkpoint = True
    with contextlib.ExitStack() as stack:
        if not weights_only:
            _check_resumable(args, path)
            stack.enter_context(_state_to_load_into(args, optimizer))
        args.load = str(stack.enter_context(_by_itself(path, manifest.iteration)))
        args.ckpt_step = manifest.iteration
        stack.enter_context(torch.no_grad())
        stack.enter_context(contextlib.redirect_stdout(None))
        state: Any = None if weights_only or optimizer is None else AnyChain(optimizer)
        load_checkpoint(model, state, scheduler if not weights_only else None)
    args.load = str(path.parent)
    if optimizer is not None and weights_only:
        optimizer.reload_model_params()
    elif optimizer is not None:
        _restore_steps(optimizer)
    return manifest.iteration


@contextlib.contextmanager
def _by_itself(path: pathlib.Path, iteration: int) -> Iterator[pathlib.Path]:
    """A folder with this checkpoint and a tracker file that names it. Megatron looks for the latter first: it ends the
    process where the file is emptied or gone, and does not take iteration 0 where it names a later one."""
    with tempfile.TemporaryDirectory(prefix="slime-load-") as name:
        root = pathlib.Path(name)
        layout.checkpoint(root, iteration).symlink_to(path.resolve(), target_is_directory=True)
        (root / checkpoints.TRACKER).write_text(str(iteration))
        yield root


def _check_resumable(args: argparse.Namespace, path: pathlib.Path) -> None:
    """What Megatron would leave out without a word, or refuse in words about its formats."""
    common = dist_checkpointing.load_common_state_dict(str(path))
    theirs = common["args"]
    if theirs.no_save_optim:
        raise DataError(
            f"{path}: it was saved with --no-save-optim, so Adam's moments and the schedule are not in it and training"
            " cannot continue there",
            "start another --run-dir with --load and this folder: its weights are whole",
        )
    if theirs.use_distributed_optimizer != args.use_distributed_optimizer:
        ours = "with" if args.use_distributed_optimizer else "without"
        raise DataError(
            f"{path}: its optimizer was{'' if theirs.use_distributed_optimizer else ' not'} distributed and this run is"
            f" {ours} --use-distributed-optimizer",
            "give that flag to both or to neither",
        )
    if args.use_distributed_optimizer:
        _check_layout(args, theirs, dist_checkpointing.load_content_metadata(preloaded_state_dict=common) or {}, path)


def _check_layout(
    args: argparse.Namespace, theirs: argparse.Namespace, metadata: dict[str, Any], path: pathlib.Path
) -> None:
    sizes = [(a.tensor_model_parallel_size, a.pipeline_model_parallel_size) for a in (theirs, args)]
    kind = metadata.get("distrib_optim_sharding_type")
    if kind in DistributedOptimizer.checkpoint_fully_reshardable_formats:
        return
    layers = [a.transformer_impl for a in (theirs, args)]
    if layers[0] != layers[1]:  # whose parameters come in another order, by which that format goes
        raise DataError(
            f"{path}: saved with {layers[0]} layers, this run has {layers[1]}, and its distributed optimizer is in the"
            f" format {kind}, whose moments would go to other weights",
            f"resume with --transformer-impl {layers[0]}, or save with --dist-ckpt-optim-fully-reshardable",
        )
    if sizes[0] != sizes[1]:
        raise DataError(
            f"{path}: saved in tensor x pipeline {sizes[0][0]} x {sizes[0][1]}, this run has {sizes[1][0]} x"
            f" {sizes[1][1]}, and its distributed optimizer is in the format {kind}, which fits other data parallel"
            " sizes only",
            "resume in that layout, or save with --dist-ckpt-optim-fully-reshardable (not with --use-stateless-adam)",
        )


def _before_the_first_step(optimizer: MegatronOptimizer) -> None:
    """Gives an optimizer that has not stepped (a policy's while its critic trains alone) the state that it begins with:
    a checkpoint without it could not be loaded, since loading asks for all of it."""
    for inner in inner_optimizers(optimizer):
        torch_optimizer = getattr(inner, "optimizer", None)
        if torch_optimizer is not None and not torch_optimizer.state:
            megatron.give_state(inner)


@contextlib.contextmanager
def _state_to_load_into(args: argparse.Namespace, optimizer: MegatronOptimizer | None) -> Iterator[None]:
    """A sharded load fills state that exists; torch's AdamW makes its state at the first step only. And while Megatron
    loads the fully reshardable format, that state must have no tensors but the moments: the step count is none
    meanwhile."""

    def step_is_no_tensor(torch_optimizer: torch.optim.Optimizer) -> None:
        for state in torch_optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = np.float32(state["step"])

    with contextlib.ExitStack() as hooks:
        for inner in inner_optimizers(optimizer):
            before = inner.optimizer.register_load_state_dict_pre_hook
            hooks.callback(before(adam_state.fill_options).remove)
            if not args.use_distributed_optimizer:  # else Megatron places the count
                hooks.callback(before(adam_state.place_step_count).remove)
                continue
            if not inner.optimizer.state:
                megatron.give_state_to_load_into(inner)
            hooks.callback(inner.optimizer.register_load_state_dict_post_hook(step_is_no_tensor).remove)
        yield


def _restore_steps(optimizer: MegatronOptimizer) -> None:
    """Megatron puts Adam's step count back into the parameter group; torch's AdamW reads it from each state."""
    for inner in inner_optimizers(optimizer):
        torch_optimizer = getattr(inner, "optimizer", None)
        if torch_optimizer is None:
            continue
        for group in torch_optimizer.param_groups:
            if group.get("step") is None:
                continue
            for parameter in group["params"]:
                state = torch_optimizer.state.get(parameter)
                if state and "step" in state:
                    state["step"] = torch.tensor(float(group["step"]))
