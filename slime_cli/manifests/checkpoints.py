"""Where checkpoints lie: ``ROOT/iter_NNNNNNN``, complete when ``checkpoint.json`` is in it. Torch-free."""

import os
import pathlib
from collections.abc import Callable

from slime_cli import manifests
from slime_cli.errors import DataError
from slime_cli.manifests import layout

TRACKER = "latest_checkpointed_iteration.txt"
"""Megatron's, beside the checkpoints: which iteration is the newest. Written for others; nothing here depends on it."""


def iterations(root: str | os.PathLike) -> list[int]:
    """Complete checkpoints under ``root``, oldest first."""
    return [_iteration(path) for path in layout.checkpoints(root) if (path / layout.CHECKPOINT).exists()]


def _iteration(folder: pathlib.Path) -> int:
    return int(folder.name.rpartition("_")[2])


def any_in(path: str | os.PathLike) -> bool:
    """``path`` is a checkpoint or holds one, whole or not."""
    path = pathlib.Path(path)
    return (path / layout.CHECKPOINT).exists() or any(path.glob("iter_*"))


def damage(checkpoint: str | os.PathLike) -> str:
    """The damage of a checkpoint folder; an empty string when it is whole."""
    path = pathlib.Path(checkpoint)
    if not (path / layout.CHECKPOINT).is_file():
        return (
            f"{layout.CHECKPOINT} is missing, so it was never written to its end"
            if path.is_dir()
            else "there is no such folder"
        )
    try:
        files = manifests.read(path / layout.CHECKPOINT, manifests.Checkpoint).files
    except DataError as error:
        return error.message
    for name, size in files.items():
        if not (path / name).is_file():
            return f"{name} is missing"
        if (found := (path / name).stat().st_size) != size:
            return f"{name} has {found} bytes of {size}"
    return ""


def complete(
    path: str | os.PathLike,
    say: Callable[[str], None] = lambda text: None,
    step: int | None = None,
    option: str = "--ckpt-step",
) -> pathlib.Path:
    """The checkpoint folder that ``path`` is, or the newest whole one in it, or the one of ``step``; ``say`` is told of
    newer ones that are not whole, and of a tracker file that says something else.

    Raises DataError when there is none.
    """
    path = pathlib.Path(path).resolve()
    if step is not None:
        return _of_step(path, step, option)
    if (path / layout.CHECKPOINT).is_file():
        candidates = [path]
    else:
        candidates = list(reversed(layout.checkpoints(path)))
    passed = []
    for candidate in candidates:
        if not (found := damage(candidate)):
            for text in passed:
                say(f"passed over {text}; taking {candidate}")
            if candidate != path and not passed and (text := _tracker_differs(path, candidate, option)):
                say(text)
            return candidate
        passed.append(f"{candidate}: {found}")
    raise DataError(
        f"{path}: no complete checkpoint there ({'; '.join(passed) or layout.CHECKPOINT + ' is missing'})",
        "give an iter_NNNNNNN folder or the one above; slime convert hf-to-dist makes one",
    )


def _of_step(path: pathlib.Path, step: int, option: str) -> pathlib.Path:
    root = path.parent if (path / layout.CHECKPOINT).is_file() else path
    found = [i for i in iterations(root) if not damage(layout.checkpoint(root, i))]
    wanted = layout.checkpoint(root, step)
    if root != path and path != wanted:
        raise DataError(
            f"{option} {step}: {path} is the checkpoint of another step", f"leave {option} out, or give {root}"
        )
    if step not in found:
        why = damage(wanted) if wanted.exists() else "there is no such checkpoint"
        have = f"whole ones are there of step {', '.join(map(str, found))}" if found else "no whole checkpoint is there"
        raise DataError(f"{option} {step}: {wanted}: {why}", have)
    return wanted


def _tracker_differs(root: pathlib.Path, taken: pathlib.Path, option: str) -> str:
    """The warning when Megatron's tracker file does not name the checkpoint that is taken; an empty string when it
    does."""
    try:
        text = (root / TRACKER).read_text(errors="replace").strip()
    except OSError as error:
        said = f"cannot be read ({error.strerror})"
    else:
        iteration = 0 if text == "release" else int(text) if text.isascii() and text.isdigit() else None
        if iteration == _iteration(taken):
            return ""
        other = f"; {option} {iteration} takes that one" if iteration in iterations(root) else ""
        said = f"says {text[:40]!r}{other}" if text else "is empty"
    return f"{root / TRACKER} {said}; taking the newest whole checkpoint, {taken}"
