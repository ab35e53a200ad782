"""The pickles in a torch_dist checkpoint, looked through before Megatron opens it: a pickle can run any command.
Torch-free.

Megatron and torch unpickle ``.metadata`` and the objects within the ``.distcp`` files (arguments, random states)
without a limit on what these may call. :func:`check` goes through the same bytes with stand-ins in the place of every
class and function, so nothing is imported or called, and refuses a name that such a checkpoint has no use for. It also
refuses what two readers could understand in two ways: an archive of another form than torch writes, or a piece outside
the checkpoint's own files. Called wherever a checkpoint's folder is about to be loaded: ``train``, ``convert
dist-to-hf`` and ``sync``.
"""

import io
import json
import pathlib
import pickle
import re
import struct
import zipfile
from collections.abc import Iterator
from typing import Any

from slime_cli.errors import DataError

_DCP = "torch.distributed.checkpoint.metadata"
ALLOWED = frozenset(
    f"{module}.{name}"
    for module, names in {
        _DCP: (
            "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta TensorProperties "
            "TensorStorageMetadata "
            "_MEM_FORMAT_ENCODING"
        ),
        "torch.distributed.checkpoint.filesystem": "_StorageInfo",
        "torch": "Size device Tensor",
        "torch._utils": "_rebuild_tensor_v2 _rebuild_tensor_v3 _rebuild_parameter",
        "torch.nn.parameter": "Parameter",
        "torch.serialization": "_get_layout",
        "torch.storage": "UntypedStorage TypedStorage",
        "collections": "OrderedDict Counter defaultdict deque",
        "builtins": "dict list tuple set frozenset int float bool bytes str bytearray complex slice range",
        "argparse": "Namespace",
        "types": "SimpleNamespace",
        "pathlib": "PosixPath Path PurePosixPath",
        "signal": "Signals",
        "_io": "BytesIO",
        "_codecs": "encode",
        "numpy": "ndarray dtype",
        "numpy.core.multiarray": "_reconstruct scalar",
        "numpy._core.multiarray": "_reconstruct scalar",
        "megatron.core.optimizer.optimizer_config": "OptimizerConfig",
        "megatron.core.rerun_state_machine": "RerunDiagnostic RerunMode RerunState",
    }.items()
    for name in names.split()
)
PATTERN = re.compile(
    r"torch\.(cuda\.)?[A-Z]\w*Storage|torch\.(u?int\d+|b?float\d\w*|bool|complex\d+)|numpy\.dtypes\.[A-Z]\w*DType"
    r"|megatron\.core\.(transformer\.)?enums\.[A-Z]\w*"
)
"""Storages, dtypes and Megatron's enumerations, which are many."""
_MEMBER = re.compile(
    r"(data\.pkl|byteorder|version|\.format_version|\.storage_alignment|\.data/serialization_id|data/\d+)"
)
FIX = (
    "take checkpoints only from those whose programs you would run; this one holds what Megatron and slime never write"
)


class Refused(Exception):
    """In words for people, without the file."""


def check(folder: pathlib.Path, *, own: bool = False) -> None:
    """Raises DataError for a torch_dist folder with a pickle that names something else, or of another form. ``own``: a
    run resumes from what it saved itself, FP8 state of Transformer Engine included, which cannot be looked through.
    """
    place = folder
    try:
        _check_format(folder)
        for place in sorted(folder.glob("*.metadata")):
            for key, file, start, length in _objects(_stand_ins(io.BytesIO(place.read_bytes()))):
                place = folder / file
                _check_object(key, _piece(place, start, length), own)
        if (place := folder / "common.pt").exists():  # of an older Megatron
            _check_archive(place.read_bytes())
    except Refused as error:
        raise DataError(f"{place}: {error}", FIX) from None
    except OSError as error:
        raise DataError(f"{place}: {error.strerror}", "restore the checkpoint, or give another one") from None


def _check_format(folder: pathlib.Path) -> None:
    """Megatron reads other formats by what it finds in the folder; slime has only this one."""
    try:
        backend = json.loads((folder / "metadata.json").read_text())["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError):
        backend = None
    if backend != "torch_dist" or not (folder / ".metadata").is_file():
        raise Refused("no torch_dist checkpoint: that has a metadata.json which says so, and a .metadata")


def _objects(metadata: Any) -> Iterator[tuple[str, str, int, int]]:
    """Key, file, first byte and length of everything that torch would unpickle: all that is not a tensor's storage."""
    kinds = getattr(metadata, "state_dict_metadata", None)
    storage = getattr(metadata, "storage_data", None)
    if not isinstance(kinds, dict) or not isinstance(storage, dict):
        raise Refused("its .metadata is not what torch writes")
    for index, info in storage.items():
        key = getattr(index, "fqn", None)
        file = getattr(info, "relative_path", None)
        kind = type(kinds.get(key) if isinstance(key, str) else None)  # a pickle may give an object any attribute
        if issubclass(kind, StandIn) and kind.name == f"{_DCP}.TensorStorageMetadata":
            continue
        start = getattr(info, "offset", None)
        length = getattr(info, "length", None)
        if (
            not isinstance(key, str)
            or not isinstance(start, int)
            or not isinstance(length, int)
            or not isinstance(file, str)
            or pathlib.PurePath(file).name != file
            or getattr(info, "transform_descriptors", None)
        ):
            raise Refused(f"{key}: its place in the files is not what torch writes")
        yield key, file, start, length


def _piece(path: pathlib.Path, start: int, length: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(start)
        return file.read(length)


def _check_object(key: str, data: bytes, own: bool) -> None:
    archive = _check_archive(data)
    if (
        not own
        and "_extra_state" in key
        and any(entry.file_size for entry in archive.infolist() if "/data/" in entry.filename)
    ):
        raise Refused(f"{key} is FP8 state of Transformer Engine: a pickle in a tensor, which is not looked through")


def _check_archive(data: bytes) -> zipfile.ZipFile:
    """True for a file as ``torch.save`` writes it, with a safe pickle in it."""
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
        names = archive.namelist()
        top = names[0].partition("/")[0]
        plain = all(
            entry.compress_type == zipfile.ZIP_STORED and not entry.flag_bits & 1 for entry in archive.infolist()
        )
        known = all(name.startswith(f"{top}/") and _MEMBER.fullmatch(name[len(top) + 1 :]) for name in names)
        once = len({name.lower() for name in names}) == len(names) and f"{top}/data.pkl" in names
        if not (data.startswith(b"PK\x03\x04") and plain and known and once and _directory(data) == archive.start_dir):
            raise Refused("an archive of another form than torch writes")
        _stand_ins(io.BytesIO(archive.read(f"{top}/data.pkl")))
    except (zipfile.BadZipFile, struct.error, IndexError, EOFError, NotImplementedError, ValueError) as error:
        raise Refused(f"not an archive that torch writes ({error})") from None
    return archive


def _directory(data: bytes) -> int:
    """Where the archive's own end says that its directory begins; every reader looks there when no comment follows."""
    signature, offset, comment = data[-22:-18], *struct.unpack("<IH", data[-6:])
    if signature != b"PK\x05\x06" or comment:
        raise Refused("an archive of another form than torch writes")
    if offset != 0xFFFFFFFF:
        return offset
    (end,) = struct.unpack("<Q", data[-34:-26])
    return struct.unpack("<Q", data[end + 48 : end + 56])[0]


# -- stand-ins ---------------------------------------------------------------------------------------------------------


class StandIn:
    """In the place of an object that a pickle makes: takes what is put into it and calls nothing."""

    name = ""

    def __new__(cls, *args: Any, **more: Any) -> "StandIn":
        return super().__new__(cls)

    def __init__(self, *args: Any, **more: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update({key: value for key, value in state.items() if isinstance(key, str)})

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        pass

    def extend(self, values: Any) -> None:
        pass

    def add(self, value: Any) -> None:
        pass


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type[StandIn]:
        found = {"__builtin__": "builtins", "copy_reg": "copyreg"}.get(module, module) + f".{name}"
        if found not in ALLOWED and not PATTERN.fullmatch(found):
            raise Refused(f"its pickle would call {found}")
        return type("StandIn", (StandIn,), {"name": found})

    def persistent_load(self, pid: Any) -> StandIn:
        return StandIn()


def _stand_ins(file: io.BytesIO) -> Any:
    """The object of the pickle, built of stand-ins."""
    try:
        return _Unpickler(file).load()
    except Refused:
        raise
    except Exception as error:  # a pickle may do anything to its stand-ins; what goes wrong is the finding
        raise Refused(f"its pickle cannot be read ({type(error).__name__}: {error})") from None
