"""One Hugging Face checkpoint into another of a different number format, shard by shard. Called by ``slime convert``.

Memory is bounded by one shard that is written; tensors are read one at a time, and a scale may lie in another shard
than its weight. What headers and options show is checked before anything is written. Each shard is written under a
temporary name, synced and renamed, so a shard that is there is whole: the same call continues where an earlier one was
stopped, and gives the same bytes. ``conversion.json`` says what is being made until ``checkpoint.json``, written last,
says that it is complete.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
from collections.abc import Callable
from typing import Protocol

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from slime_cli import manifests
from slime_cli.convert.number_formats import INDEX, STATE, Format, Plan, Source, Tensors, with_dtype
from slime_cli.errors import DataError, UsageError
from slime_cli.hardware import device as hardware
from slime_cli.manifests import layout
from slime_cli.manifests.base import fsync_folder
from slime_cli.models import architecture, describe, headers


class Screen(Protocol):
    """What shows the work: :class:`slime_cli.screen.Screen`."""

    def say(self, text: str) -> None: ...

    def progress(
        self, label: str, total: int, start: int = 0
    ) -> contextlib.AbstractContextManager[Callable[[int, str], object]]:
        """Yields ``advance(count, note)``."""
        ...


# -- the conversion ----------------------------------------------------------------------------------------------------


def convert(
    hf_checkpoint: str | os.PathLike, save: str | os.PathLike, form: Format, *, screen: Screen, force: bool = False
) -> tuple[pathlib.Path, int]:
    """Writes ``save`` in format ``form``; the folder, and how many tensors were converted. Continues what the same call
    began."""
    source = Source(hf_checkpoint)
    save = pathlib.Path(save).resolve()
    plan = form.plan(source)
    for note in plan.notes:
        screen.say(f"note: {note}")
    _begin(save, source, form, force)
    shards = {shard: [name for name in names if name not in plan.dropped] for shard, names in source.shards.items()}
    shards = {shard: names for shard, names in shards.items() if names}
    there = [shard for shard in shards if (save / shard).exists()]
    if there:
        screen.say(f"{len(there)} of {len(shards)} shards are written already")
    start = sum(len(shards[shard]) for shard in there)
    total = sum(map(len, shards.values()))
    with screen.progress("converting tensors", total, start) as advance:
        for shard in [shard for shard in shards if shard not in there]:
            tensors: Tensors = {}
            for name in shards[shard]:
                tensors |= _converted(source, name, form) if name in plan.converted else {name: source.read(name)}
                advance(1, shard)
            _write_shard(save / shard, tensors)
            source.close()
    _finish(save, source, plan, form, screen)
    return save, len(plan.converted)


def _converted(source: Source, name: str, form: Format) -> Tensors:
    device = "cuda" if hardware.find().kind == "cuda" else "cpu"
    try:
        return {new: tensor.cpu() for new, tensor in form.convert(source, name, device).items()}
    except DataError as error:
        raise DataError(f"{source.where(name)} {error.message}", error.fix) from None


def _begin(save: pathlib.Path, source: Source, form: Format, force: bool) -> None:
    """Makes ``save`` ready to be written into, or raises UsageError. What the same call began is left as it is."""
    if save == source.folder:
        raise UsageError(f"--save {save}: is the folder that is read", "give another folder")
    if save.exists() and not save.is_dir():
        raise UsageError(f"--save {save}: is a file", "give a folder")
    stats = {name: (source.folder / name).stat() for name in ("config.json", *source.shards)}
    files = {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}
    wanted = {
        "format": type(form).__name__,
        "options": dataclasses.asdict(form),
        "source": str(source.folder),
        "files": files,
    }
    wanted = json.loads(json.dumps(wanted))  # lists for tuples, as they are read back
    begun = json.loads((save / STATE).read_text()) if (save / STATE).is_file() else None
    if begun == wanted:
        return
    if save.is_dir() and any(save.iterdir()):
        if not force:
            what = "holds a conversion that other options or another source began" if begun else "not empty"
            raise UsageError(
                f"--save {save}: {what}", "give another folder, or --force to replace the checkpoint in it"
            )
        for pattern in (layout.CHECKPOINT, STATE, layout.MANIFEST, "*.safetensors", ".*.part", INDEX):
            for path in save.glob(pattern):
                path.unlink()
    try:
        manifests.write_json(save / STATE, wanted)
    except OSError as error:
        raise UsageError(f"--save {save}: {error.strerror}", "give a folder that you may write to") from None


def _write_shard(path: pathlib.Path, tensors: Tensors) -> None:
    part = path.with_name(f".{path.name}.part")
    try:
        save_file(tensors, part, metadata={"format": "pt"})
        with open(part, "rb") as file:
            os.fchmod(file.fileno(), 0o644)  # safetensors gives a file to its owner alone
            os.fsync(file.fileno())
        os.replace(part, path)
        fsync_folder(path.parent)
    except (SafetensorError, OSError) as error:
        part.unlink(missing_ok=True)
        raise DataError(f"{path}: {error}", "make room for it; the same command continues with this shard") from None


def _finish(save: pathlib.Path, source: Source, plan: Plan, form: Format, screen: Screen) -> None:
    """The other files, of which ``checkpoint.json`` is the last: with it the checkpoint is complete."""
    for path in sorted(source.folder.iterdir()):
        if (
            path.is_file()
            and not path.name.startswith(".")
            and path.name not in _MADE_HERE
            and path.suffix not in headers.SUFFIXES
        ):
            manifests.write_bytes(save / path.name, path.read_bytes())
    manifests.write_json(save / "config.json", form.configure(source, plan))
    weight_map = {}
    size = 0
    for shard in sorted(shard for shard in source.shards if (save / shard).exists()):
        with safe_open(save / shard, framework="pt") as file, open(save / shard, "rb") as raw:
            weight_map |= dict.fromkeys(file.keys(), shard)
            size += (
                os.fstat(raw.fileno()).st_size - 8 - int.from_bytes(raw.read(8), "little")
            )  # less the header and its length
    manifests.write_json(
        save / INDEX, {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    )
    screen.say(f"hashing {source.folder}")
    manifests.write(save / layout.CHECKPOINT, _manifest(source, form))
    (save / STATE).unlink()


def _manifest(source: Source, form: Format) -> manifests.Checkpoint:
    """Not :func:`describe.describe_hf`, which refuses models that are quantised or that Megatron cannot train: here
    both are welcome."""
    folder = source.folder
    iteration = 0
    args = {}
    if (folder / layout.CHECKPOINT).is_file():
        before = manifests.read(folder / layout.CHECKPOINT, manifests.Checkpoint)
        iteration = before.iteration
        args = before.megatron_args
    else:
        with contextlib.suppress(DataError):
            args = architecture.megatron_args(with_dtype(source.config, None)) or {}
    return manifests.Checkpoint(
        format="hf",
        megatron_args=args,
        iteration=iteration,
        dtype=form.dtype,
        layout=dict.fromkeys(("tensor", "pipeline", "data", "context", "expert"), 1),
        **describe.identity(folder, source.config, source.shards),
    )


_MADE_HERE = {"config.json", INDEX, STATE, layout.CHECKPOINT, layout.MANIFEST}
