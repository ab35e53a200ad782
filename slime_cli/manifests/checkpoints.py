"""Where checkpoints lie: ``ROOT/iter_NNNNNNN``, complete when ``checkpoint.json`` is in it. Torch-free."""

import os
import pathlib

from slime_cli.errors import DataError

MANIFEST = "checkpoint.json"


def folder(root: str | os.PathLike, iteration: int) -> pathlib.Path:
    return pathlib.Path(root) / f"iter_{iteration:07d}"


def iterations(root: str | os.PathLike) -> list[int]:
    """Complete checkpoints under ``root``, oldest first."""
    return sorted(int(p.parent.name[5:]) for p in pathlib.Path(root).glob(f"iter_*/{MANIFEST}"))


def complete(path: str | os.PathLike) -> pathlib.Path:
    """The checkpoint folder that ``path`` is, or the newest complete one in it. Raises DataError for neither."""
    path = pathlib.Path(path).resolve()
    if (path / MANIFEST).is_file():
        return path
    found = iterations(path)
    if not found:
        raise DataError(
            f"{path}: no complete checkpoint there ({MANIFEST} is missing)",
            "give an iter_NNNNNNN folder or the one above; slime convert hf-to-dist makes one",
        )
    return folder(path, found[-1])
