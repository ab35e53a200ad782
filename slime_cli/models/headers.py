"""Tensors of the safetensors files of an HF folder, by headers and index: no tensor is read. Torch-free."""

import dataclasses
import json
import os
import pathlib
import struct
from typing import Any

from slime_cli import manifests

INDEX = "model.safetensors.index.json"
SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx"}
"""Files that may hold weights end so, in this format or another."""
STATE = "conversion.json"
"""Is there for as long as `slime convert` has not ended what it writes into the folder."""


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """One tensor of a file."""

    file: str
    dtype: str
    """As safetensors spells it: ``BF16``, ``F8_E4M3``."""
    shape: tuple[int, ...]
    place: tuple[int, int]
    """First byte in the file, and the one after the last."""


@dataclasses.dataclass(frozen=True)
class Contents:
    """What all files that belong to the checkpoint hold."""

    tensors: dict[str, Held]
    files: tuple[str, ...]
    unlisted: frozenset[str]
    """Tensors that lie in a file and not in the index that there is: those who read by the index don't find them."""
    size: int
    """Bytes of all files."""


def read(folder: str | os.PathLike) -> Contents:
    """Every file of the index, or all there are without one. Raises ValueError for what is damaged, missing or there
    twice.
    """
    folder = pathlib.Path(folder)
    wanted = _wanted(folder)
    tensors: dict[str, Held] = {}
    problems = []
    for file in sorted(wanted):
        try:
            found = header(folder / file)
            if lost := sorted(wanted[file] - found.keys()):
                raise ValueError(f"{file} lacks {lost[0]}" + (f" and {len(lost) - 1} more" if len(lost) > 1 else ""))
            if twice := sorted(found.keys() & tensors.keys()):
                raise ValueError(f"{twice[0]} is in {tensors[twice[0]].file} and in {file}")
        except ValueError as error:
            problems.append(str(error))
            continue
        tensors |= {
            name: Held(file, entry["dtype"], tuple(entry["shape"]), tuple(entry["place"]))
            for name, entry in found.items()
        }
    if problems:
        raise ValueError(problems[0] + (f" (and {len(problems) - 1} more files)" if len(problems) > 1 else ""))
    listed = set().union(*wanted.values())
    unlisted = frozenset(tensors.keys() - listed) if (folder / INDEX).is_file() else frozenset()
    return Contents(tensors, tuple(sorted(wanted)), unlisted, sum((folder / file).stat().st_size for file in wanted))


def _wanted(folder: pathlib.Path) -> dict[str, set[str]]:
    """File -> the tensors that the index puts in it."""
    listed = index(folder)
    wanted: dict[str, set[str]] = {file: set() for file in listed.values() or files(folder)}
    for tensor, file in listed.items():
        wanted[file].add(tensor)
    return wanted


def index(folder: pathlib.Path) -> dict[str, str]:
    """Tensor -> file, by the index; empty where there is none. It goes before :func:`files`: a folder may hold the
    weights twice (``consolidated.safetensors``). Raises ValueError for one that is damaged.
    """
    path = folder / INDEX
    if not path.exists():
        return {}
    try:
        found = dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
        if apart := next((file for file in found.values() if pathlib.PurePath(file).name != file), None):
            raise ValueError(f"{apart} is not a file beside it")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{INDEX} is no index of tensors ({error!r})") from None
    if not found:
        raise ValueError(f"{INDEX} names no tensors")
    return found


def files(folder: pathlib.Path) -> list[str]:
    """The safetensors files of a folder without an index. Raises ValueError where there are none."""
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        raise ValueError(f"no *.safetensors in {folder}")
    return ["model.safetensors"] if "model.safetensors" in names else names


def header(path: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Name -> ``dtype``, ``shape`` and ``place`` (:class:`Held`). Raises ValueError when the file is not there, is not
    whole or is no such file.
    """
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            head = file.read(8)
            if not head:
                raise ValueError(f"{path.name} is empty")
            if head == b"version ":
                raise ValueError(f"{path.name} is a {manifests.POINTER}")
            length = struct.unpack("<Q", head)[0]
            if length > size:
                raise ValueError(f"{path.name} is cut off or no safetensors file")
            found = json.loads(file.read(length))
        found.pop("__metadata__", None)
        for entry in found.values():
            entry["place"] = [8 + length + offset for offset in entry["data_offsets"]]
        end = max((entry["place"][1] for entry in found.values()), default=8 + length)
        _ = [(entry["dtype"], tuple(entry["shape"])) for entry in found.values()]
    except FileNotFoundError:
        raise ValueError(f"{path.name} is missing") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path.name}: its header is no JSON ({error})") from None
    except (OSError, struct.error, UnicodeDecodeError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"{path.name} is damaged or no safetensors file ({error!r})") from None
    if end != size:
        raise ValueError(f"{path.name} has {size:,} bytes instead of {end:,}")
    return found


def alike(folder: pathlib.Path, one: Held, other: Held, sample: int = 1 << 16) -> bool:
    """Whether two tensors have the same type, shape and, at their beginnings, middles and ends, the same bytes."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    size = one.place[1] - one.place[0]
    with open(folder / one.file, "rb") as first, open(folder / other.file, "rb") as second:
        for at in (0, size // 2, max(0, size - sample)):
            first.seek(one.place[0] + at)
            second.seek(other.place[0] + at)
            count = min(sample, size - at)
            if first.read(count) != second.read(count):
                return False
    return True
