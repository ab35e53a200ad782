"""Where checkpoints lie: ``ROOT/iter_NNNNNNN``, complete when ``checkpoint.json`` is in it. Torch-free."""

import os
import pathlib
from collections.abc import Callable

from slime_cli import manifests
from slime_cli.errors import DataError

MANIFEST = "checkpoint.json"


def folder(root: str | os.PathLike, iteration: int) -> pathlib.Path:
    return pathlib.Path(root) / f"iter_{iteration:07d}"


def iterations(root: str | os.PathLike) -> list[int]:
    """Complete checkpoints under ``root``, oldest first."""
    return sorted(int(p.parent.name[5:]) for p in pathlib.Path(root).glob(f"iter_*/{MANIFEST}"))


def any_in(path: str | os.PathLike) -> bool:
    """``path`` is a checkpoint or holds one, whole or not."""
    path = pathlib.Path(path)
    return (path / MANIFEST).exists() or any(path.glob("iter_*"))


def damage(checkpoint: str | os.PathLike) -> str:
    """What is wrong with a checkpoint folder; an empty string when it is whole."""
    path = pathlib.Path(checkpoint)
    if not (path / MANIFEST).is_file():
        return f"{MANIFEST} is missing, so it was never written to its end" if path.is_dir() else "there is no such folder"
    try:
        files = manifests.read(path / MANIFEST, manifests.Checkpoint).files
    except DataError as error:
        return error.message
    for name, size in files.items():
        if not (path / name).is_file():
            return f"{name} is missing"
        if (found := (path / name).stat().st_size) != size:
            return f"{name} has {found} bytes of {size}"
    return ""


def complete(path: str | os.PathLike, say: Callable[[str], None] = lambda text: None) -> pathlib.Path:
    """The checkpoint folder that ``path`` is, or the newest whole one in it; ``say`` is told of newer ones that are not.

    Raises DataError when there is none.
    """
    path = pathlib.Path(path).resolve()
    if (path / MANIFEST).is_file():
        candidates = [path]
    else:
        candidates = sorted((p for p in path.glob("iter_*") if p.name[5:].isdigit()), key=lambda p: int(p.name[5:]), reverse=True)
    passed = []
    for candidate in candidates:
        if not (found := damage(candidate)):
            for text in passed:
                say(f"passed over {text}; taking {candidate}")
            return candidate
        passed.append(f"{candidate}: {found}")
    raise DataError(
        f"{path}: no complete checkpoint there ({'; '.join(passed) or MANIFEST + ' is missing'})",
        "give an iter_NNNNNNN folder or the one above; slime convert hf-to-dist makes one",
    )
