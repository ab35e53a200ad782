"""HF checkpoint <-> Megatron ``torch_dist`` checkpoint. Torch-free: the work itself is done by ranks of processes.

:func:`hf_to_dist` and :func:`dist_to_hf` check everything that can be checked from files, have the job carried out
(``run``: :func:`slime_cli.cluster.conversion.run`), and put the result in place only when every rank has ended well: a
failed conversion leaves nothing behind. Called by ``slime convert`` and, for a checkpoint that is not HF yet, by
``slime sync``.
"""

import contextlib
import fcntl
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from slime_cli import manifests
from slime_cli.errors import DataError, UsageError
from slime_cli.hardware import device as hardware
from slime_cli.manifests import checkpoints, layout, pickles
from slime_cli.models import architecture, lora, schemes, whole
from slime_cli.models.describe import checkpoint_manifest, file_hash
from slime_cli.models.families import FAMILIES
from slime_cli.models.headers import INDEX

Say = Callable[[str], None]
Run = Callable[[dict[str, Any], Say], None]
"""Carries out a job on all its ranks; raises what went wrong."""


def hf_to_dist(
    hf_checkpoint: str | os.PathLike,
    save: str | os.PathLike,
    *,
    tensor: int = 1,
    pipeline: int = 1,
    expert: int = 1,
    megatron: dict[str, Any] | None = None,
    force: bool = False,
    say: Say = lambda text: None,
    run: Run,
) -> pathlib.Path:
    """Writes ``save/iter_0000000`` and returns it. ``megatron``: options by dest beyond those that follow from the
    config.
    """
    source = pathlib.Path(hf_checkpoint).resolve()
    save = pathlib.Path(save).resolve()
    args = _architecture(source, megatron or {})
    whole.check(source, say)
    _check_layout(args, tensor, pipeline, expert)
    _check_target(save, force)
    say(f"hashing {source}")
    dtype = _trainer_dtype(architecture.read_config(str(source)))
    sizes = {"tensor": tensor, "pipeline": pipeline, "data": expert, "context": 1, "expert": expert}
    manifest = checkpoint_manifest(source, iteration=0, dtype=dtype, layout=sizes)
    manifest = msgspec.structs.replace(manifest, megatron_args=args)
    with _building(save) as building:
        job = {
            "kind": "hf_to_dist",
            "hf": str(source),
            "target": str(building),
            "dtype": dtype,
            "argv": architecture.argv(args),
            "tensor": tensor,
            "pipeline": pipeline,
            "expert": expert,
            "manifest": msgspec.to_builtins(manifest),
        }
        run(job, say)
        shutil.rmtree(layout.checkpoint(save, 0), ignore_errors=True)
        _move_into(building, save)
    return layout.checkpoint(save, 0)


def dist_to_hf(
    load: str | os.PathLike,
    save: str | os.PathLike,
    *,
    origin: str | os.PathLike | None = None,
    megatron: dict[str, Any] | None = None,
    force: bool = False,
    say: Say = lambda text: None,
    run: Run,
) -> tuple[pathlib.Path, int]:
    """Writes an HF checkpoint with the weights of ``load`` and the other files of ``origin``; the folder and the
    iteration. A LoRA adapter is merged into its base, which ``origin`` then has to be.

    ``load`` is an ``iter_NNNNNNN`` folder, or one that holds some: the newest complete one is taken.
    """
    save = pathlib.Path(save).resolve()
    checkpoint, manifest, source = _opened(load, origin, say)
    args = _architecture(source, manifest.megatron_args | (megatron or {}), blame=str(checkpoint))
    _check_target(save, force)
    config = architecture.read_config(str(source))
    say(f"hashing {checkpoint}")
    with ThreadPoolExecutor() as pool:
        files = sorted(p for p in checkpoint.iterdir() if p.is_file())
        hashes = dict(zip((p.name for p in files), pool.map(file_hash, files), strict=True))
    out = msgspec.structs.replace(
        manifest,
        format="hf",
        source=str(checkpoint),
        source_hashes=hashes,
        megatron_args=args,
        dtype=_hf_dtype(config),
        layout=dict.fromkeys(manifest.layout, 1),
        files={},
        adapter=None,
    )
    with _building(save) as building:
        job = _job("dist_to_hf", checkpoint, manifest, source, args, building / "hf")
        run(job | {"hf_dtype": out.dtype}, say)
        _finish_hf(building / "hf", config)
        _clear_weights(save)
        _move_into(building / "hf", save)
        manifests.write(save / layout.CHECKPOINT, out)
    return save, manifest.iteration


def dist_to_adapter(
    load: str | os.PathLike,
    save: str | os.PathLike,
    *,
    origin: str | os.PathLike | None = None,
    force: bool = False,
    say: Say = lambda text: None,
    run: Run,
) -> tuple[pathlib.Path, int]:
    """Writes the LoRA adapter of ``load`` alone, in PEFT's format; the folder and the iteration. Raises DataError for a
    checkpoint of whole weights."""
    save = pathlib.Path(save).resolve()
    checkpoint, manifest, source = _opened(load, origin, say)
    if manifest.adapter is None:
        raise DataError(f"{checkpoint}: it holds whole weights and no adapter", "leave --adapter-only out")
    args = _architecture(source, manifest.megatron_args, blame=str(checkpoint))
    _check_target(save, force)
    with _building(save) as building:
        run(_job("dist_to_adapter", checkpoint, manifest, source, args, building / "peft"), say)
        _clear_weights(save)
        _move_into(building / "peft", save)
    return save, manifest.iteration


def _opened(
    load: str | os.PathLike, origin: str | os.PathLike | None, say: Say
) -> tuple[pathlib.Path, manifests.Checkpoint, pathlib.Path]:
    """The checkpoint's folder and manifest, and the HF model that it came from. Raises DataError for what cannot be
    read."""
    checkpoint = checkpoints.complete(load, say)
    manifest = manifests.read(checkpoint / layout.CHECKPOINT, manifests.Checkpoint)
    if manifest.format != "torch_dist":
        raise DataError(f"{checkpoint}: format is {manifest.format}, not torch_dist", "there is nothing to convert")
    pickles.check(checkpoint)
    source = pathlib.Path(origin or manifest.source).resolve()
    if not (source / "config.json").is_file():
        fix = (
            "--origin-hf-dir must be a folder with the HF model it came from"
            if origin
            else "say where it is: --origin-hf-dir DIR"
        )
        raise DataError(f"{source}: no config.json there, and {checkpoint} came from that model", fix)
    if manifest.adapter:
        lora.require(checkpoint, manifest.adapter, source)
    return checkpoint, manifest, source


def _job(
    kind: str,
    checkpoint: pathlib.Path,
    manifest: manifests.Checkpoint,
    source: pathlib.Path,
    args: dict[str, Any],
    target: pathlib.Path,
) -> dict[str, Any]:
    """The work of one process that reads a checkpoint. ``args``: Megatron's, by dest."""
    return {
        "kind": kind,
        "hf": str(source),
        "load": str(checkpoint),
        "target": str(target),
        "tensor": 1,
        "pipeline": 1,
        "expert": 1,
        "dtype": "float32" if hardware.find().kind == "cpu" else manifest.dtype,
        "adapter": msgspec.to_builtins(manifest.adapter),
        "argv": architecture.argv(args),
    }


def as_hf(source: str | os.PathLike, target: str | os.PathLike, *, say: Say, run: Run) -> tuple[pathlib.Path, int]:
    """:func:`dist_to_hf` over whatever an earlier call left at ``target``."""
    return dist_to_hf(source, target, force=True, say=say, run=run)


# -- checks ------------------------------------------------------------------------------------------------------------


def _architecture(source: pathlib.Path, given: dict[str, Any], blame: str = "the options") -> dict[str, Any]:
    """Megatron's options for the model in ``source``, ``given`` included. Raises DataError when they are not known or
    differ."""
    config = architecture.read_config(str(source))
    derived = architecture.megatron_args(config)
    if derived is None and "num_layers" not in given:
        name = (config.get("architectures") or ["none"])[0]
        raise DataError(
            f"{source / 'config.json'}: architecture {name} is not supported",
            f"supported: {', '.join(sorted(FAMILIES))}; for another, give Megatron's options (--num-layers and so on)"
            " or a --profile",
        )
    derived = derived or {}
    dest = architecture.contradiction(derived, given)
    if dest is not None:
        raise DataError(
            f"{blame}: {dest} is {given[dest]}, {source / 'config.json'} makes it {derived[dest]}",
            "they belong to different models",
        )
    return derived | given


_SPLIT_BY_TENSOR = ("num_attention_heads", "num_query_groups", "ffn_hidden_size", "moe_ffn_hidden_size", "vocab_size")


def _check_layout(args: dict[str, Any], tensor: int, pipeline: int, expert: int) -> None:
    if expert > 1 and args.get("num_experts") is None:
        raise UsageError(f"--expert-model-parallel-size {expert}: the model has no experts", "leave it out")
    for flag, size, names in (
        ("--tensor-model-parallel-size", tensor, _SPLIT_BY_TENSOR),
        ("--pipeline-model-parallel-size", pipeline, ("num_layers",)),
        ("--expert-model-parallel-size", expert, ("num_experts",)),
    ):
        if size < 1:
            raise UsageError(f"{flag} {size}: must be at least 1")
        for name in names:
            if args.get(name) is not None and args[name] % size:
                raise UsageError(
                    f"{flag} {size} does not divide the model's {name}, {args[name]}",
                    "a checkpoint loads in any layout: 1 always fits",
                )
    device = hardware.find()
    if device.kind == "cuda" and tensor * pipeline * expert > device.count:
        raise UsageError(
            f"{tensor} x {pipeline} x {expert} ranks need as many GPUs, this machine has {device.count}",
            "a checkpoint loads in any layout: leave the sizes out, or hide the GPUs (CUDA_VISIBLE_DEVICES=) to convert"
            " on the CPU",
        )


def _check_target(save: pathlib.Path, force: bool) -> None:
    if save.exists() and not save.is_dir():
        raise UsageError(f"--save {save}: is a file", "give a folder")
    if save.is_dir() and any(save.iterdir()) and not force:
        raise UsageError(f"--save {save}: not empty", "give another folder, or --force to replace the checkpoint in it")


def _trainer_dtype(config: dict[str, Any]) -> str:
    """What Megatron holds the weights in: bfloat16 where they are and the device trains in it, else float32, which is
    exact."""
    return "bfloat16" if hardware.find().kind == "cuda" and _hf_dtype(config) == "bfloat16" else "float32"


def _hf_dtype(config: dict[str, Any]) -> str:
    """The dtype that the config promises of its weights."""
    return config.get("dtype") or config.get("torch_dtype") or "float32"


# -- files -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _building(save: pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder on the disk of ``save`` that is gone afterwards. One process at a time has one for ``save``; what a
    killed one left is removed.
    """
    prefix = f".{save.name}.converting-"
    try:
        save.parent.mkdir(parents=True, exist_ok=True)
        for left in [path for path in save.parent.iterdir() if path.name.startswith(prefix)]:
            if (lock := _lock(left)) is not None:
                shutil.rmtree(left, ignore_errors=True)
                os.close(lock)
        building = pathlib.Path(tempfile.mkdtemp(dir=save.parent, prefix=prefix))
        lock = _lock(building)
    except BlockingIOError:
        raise UsageError(
            f"--save {save}: another conversion is writing it", "wait for it, or give another folder"
        ) from None
    except OSError as error:
        raise UsageError(f"--save {save}: {error.strerror}", "give a folder that you may write to") from None
    try:
        yield building
    finally:
        shutil.rmtree(building, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _lock(folder: pathlib.Path) -> int | None:
    """A descriptor that holds the folder's lock until it is closed; None on a disk that carries none. Raises
    BlockingIOError while another process has it.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise
        return None
    return descriptor


def _move_into(building: pathlib.Path, save: pathlib.Path) -> None:
    """The checkpoint's folders first, Megatron's tracker file after them."""
    save.mkdir(exist_ok=True)
    for path in sorted(building.iterdir(), key=lambda p: (p.is_file(), p.name)):
        os.replace(path, save / path.name)


def _clear_weights(save: pathlib.Path) -> None:
    for pattern in (layout.CHECKPOINT, layout.MANIFEST, "*.safetensors", INDEX):
        for path in save.glob(pattern):
            path.unlink()


def _finish_hf(folder: pathlib.Path, config: dict[str, Any]) -> None:
    """transformers finds shards by an index; slime's version manifest is for published weights and does not belong
    here.

    The weights are no longer quantised, if they were, and the config must not say so.
    """
    if schemes.settings(config):
        manifests.write_json(folder / "config.json", schemes.without(config))
    tensors = manifests.read(folder / layout.MANIFEST, manifests.Weights).tensors
    (folder / layout.MANIFEST).unlink()
    shards = sorted({tensor.file for tensor in tensors.values()})
    if len(shards) == 1:
        os.replace(folder / shards[0], folder / "model.safetensors")
        (folder / INDEX).unlink(missing_ok=True)
        return
    total = sum((folder / shard).stat().st_size for shard in shards)
    index = {"metadata": {"total_size": total}, "weight_map": {name: tensor.file for name, tensor in tensors.items()}}
    manifests.write_json(folder / INDEX, index)
