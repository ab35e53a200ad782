"""Prompts from files: JSON lines, Parquet and Hugging Face data sets, behind one table interface.

One streaming pass checks every row when the source is opened; afterwards rows are read on demand, so memory holds
offsets and a few row groups, never the data set. A file that changes under a running job is an error, not other rows.
"""

import abc
import bisect
import collections
import hashlib
import json
import os
import pathlib
import re
from array import array
from collections.abc import Iterator
from typing import Any

import msgspec

from slime_cli.buffer.sources import arrow_rows
from slime_cli.buffer.sources.base import (
    BadRow,
    Gaps,
    PromptSource,
    RowContract,
    parse_query,
    require_path,
)
from slime_cli.buffer.sources.messages import RowProblem
from slime_cli.buffer.types import PromptRow
from slime_cli.errors import DataError, UsageError
from slime_cli.text import nearest

MIB = 1 << 20
CACHED_GROUP_BYTES = 256 * MIB
BATCH = 1024


class Table(abc.ABC):
    """Physical rows, 1-based. ``scan`` yields every row once, in order: a record, a RowProblem, or None for a blank."""

    file: str
    columnar = True

    @abc.abstractmethod
    def scan(self) -> Iterator[Any]: ...

    @abc.abstractmethod
    def read(self, row: int) -> Any: ...

    @abc.abstractmethod
    def digest(self) -> str:
        """Hash of the content (complete only after a scan)."""


class JsonLines(Table):
    """A JSON-lines file: the scan keeps each line's byte offset (8 bytes a line) and hashes the whole content."""

    columnar = False

    def __init__(self, path: pathlib.Path) -> None:
        self.file = str(path)
        self._handle = open(path, "rb")
        self._stamp = self._now()
        self._starts = array("Q")
        self._hash = hashlib.blake2b(digest_size=16)

    def _now(self) -> tuple[int, int]:
        status = os.fstat(self._handle.fileno())
        return status.st_size, status.st_mtime_ns

    def scan(self) -> Iterator[Any]:
        start = 0
        for line in self._handle:
            self._starts.append(start)
            self._hash.update(line)
            start += len(line)
            yield self._parse(line, first=len(self._starts) == 1)
        self._starts.append(start)

    def read(self, row: int) -> Any:
        if self._now() != self._stamp:
            raise DataError(f"{self.file}: it was changed while in use", "write a new file instead, and start again")
        start = self._starts[row - 1]
        end = self._starts[row]
        return self._parse(os.pread(self._handle.fileno(), end - start, start), first=row == 1)

    def _parse(self, line: bytes, first: bool) -> Any:
        if first:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line.strip():
            return None
        try:
            return msgspec.json.decode(line)
        except (msgspec.MsgspecError, RecursionError) as error:
            return RowProblem("", self._why(line, error))

    def _why(self, line: bytes, error: Exception) -> str:
        try:
            line.decode()
        except UnicodeDecodeError as wrong:
            return f"not UTF-8: byte 0x{line[wrong.start]:02x} at column {wrong.start + 1}"
        if isinstance(error, msgspec.MsgspecError) and (lenient := _read_by_python(line)):
            return f"not JSON: {lenient}"
        return f"not JSON: {error}"

    def digest(self) -> str:
        return self._hash.hexdigest()


def _read_by_python(line: bytes) -> str | None:
    """Refuses constants that Python's JSON module allows and JSON does not have."""
    constants: list[str] = []
    try:
        found = json.loads(line, parse_constant=constants.append)
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return "an escape is half of a pair of surrogates, and so no character"
    except (ValueError, RecursionError):
        return None
    return f"{constants[0]} is no number there; null is" if constants else None


class Parquet(Table):
    """A Parquet file, read by row group; the last few groups stay in memory, up to CACHED_GROUP_BYTES."""

    def __init__(self, path: pathlib.Path, contract: RowContract) -> None:
        import pyarrow
        import pyarrow.parquet

        self.file = str(path)
        try:
            self._parquet = pyarrow.parquet.ParquetFile(path)
        except pyarrow.ArrowException as error:
            raise DataError(f"{path}: not a readable Parquet file: {error}", "check the file") from None
        self._columns = wanted_columns(self.file, self._parquet.schema_arrow.names, contract)
        counts = [self._parquet.metadata.row_group(i).num_rows for i in range(self._parquet.num_row_groups)]
        self._ends = array("Q", [sum(counts[: i + 1]) for i in range(len(counts))])
        self._cache: collections.OrderedDict[int, Any] = collections.OrderedDict()

    def scan(self) -> Iterator[Any]:
        for batch in self._parquet.iter_batches(batch_size=BATCH, columns=self._columns):
            yield from arrow_rows.rows(batch)

    def read(self, row: int) -> Any:
        group = bisect.bisect_right(self._ends, row - 1)
        first = self._ends[group - 1] if group else 0
        return next(arrow_rows.rows(self._group(group).slice(row - 1 - first, 1)))

    def _group(self, group: int) -> Any:
        if group in self._cache:
            self._cache.move_to_end(group)
        else:
            self._cache[group] = self._parquet.read_row_group(group, columns=self._columns)
            while len(self._cache) > 1 and sum(table.nbytes for table in self._cache.values()) > CACHED_GROUP_BYTES:
                self._cache.popitem(last=False)
        return self._cache[group]

    def digest(self) -> str:
        """Size, first MiB and last MiB: the footer has every column chunk's place, size and statistics."""
        size = os.path.getsize(self.file)
        digest = hashlib.blake2b(str(size).encode(), digest_size=16)
        with open(self.file, "rb") as handle:
            digest.update(handle.read(MIB))
            handle.seek(max(0, size - MIB))
            digest.update(handle.read(MIB))
        return digest.hexdigest()


class HuggingFace(Table):
    """A ``datasets.Dataset``: memory-mapped Arrow, with the fingerprint that the library keeps for it."""

    def __init__(self, uri: str, dataset: Any, contract: RowContract) -> None:
        self.file = uri
        self._fingerprint = dataset._fingerprint
        self._rows = dataset.select_columns(wanted_columns(uri, dataset.column_names, contract)).with_format("arrow")

    def scan(self) -> Iterator[Any]:
        for batch in self._rows.iter(batch_size=BATCH):
            yield from arrow_rows.rows(batch)

    def read(self, row: int) -> Any:
        return next(arrow_rows.rows(self._rows[row - 1 : row]))

    def digest(self) -> str:
        return f"{self._fingerprint}-{len(self._rows)}"


def wanted_columns(file: str, present: list[str], contract: RowContract) -> list[str]:
    """The contract's columns that are there. A missing input or label column ends it here, not once a row."""
    for key in filter(None, (contract.input_key, contract.label_key)):
        if key not in present:
            option = "--input-key" if key == contract.input_key else "--label-key"
            hint = nearest(key, present)
            raise DataError(
                f"{file}: no column {key!r}{hint}; it has {', '.join(present)}", f"name the column with {option}"
            )
    return [name for name in contract.columns() if name in present]


def open_dataset(rest: str, uri: str) -> Any:
    """``PATH`` saved by save_to_disk, or ``BUILDER?data_files=...&split=...`` for load_dataset -> a Dataset."""
    path, _, query = rest.partition("?")
    options: dict[str, Any] = {
        key: values[0] if len(values) == 1 else values for key, values in parse_query(query, uri).items()
    }
    split = options.pop("split", None)
    local = pathlib.Path(path).expanduser()
    on_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", path) and split
    if not local.exists() and "data_files" not in options and not on_hub:
        require_path(path)
    import datasets
    import datasets.exceptions

    try:
        if local.is_dir() and any((local / name).exists() for name in ("state.json", "dataset_dict.json")):
            if options:
                raise UsageError(
                    f"{uri}: {', '.join(options)} mean nothing for a saved data set", "only split=NAME does"
                )
            loaded = datasets.load_from_disk(str(local))
        else:
            loaded = datasets.load_dataset(path, split=split, **options)
    except (OSError, ValueError, TypeError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"{uri}: cannot be loaded: {type(error).__name__}: {error}", "check the path and its arguments"
        ) from error
    return pick_split(loaded, split, uri)


def pick_split(loaded: Any, split: str | None, uri: str) -> Any:
    """One Dataset out of what the library returned."""
    if not isinstance(loaded, dict):
        return loaded
    if split is None and len(loaded) == 1:
        return next(iter(loaded.values()))
    if split not in loaded:
        what = f"no split {split!r}{nearest(split, loaded)}" if split else "several splits"
        raise DataError(f"{uri}: {what}; it has {', '.join(loaded)}", "add ?split=NAME")
    return loaded[split]


class TableSource(PromptSource):
    """Prompts of a table. Opening checks every row; ``on_bad_row`` is ``fail`` or ``skip``."""

    def __init__(self, name: str, table: Table, contract: RowContract, window: slice, on_bad_row: str) -> None:
        super().__init__(name)
        self._table = table
        self._contract = contract
        self._window = window
        self._gaps = Gaps()
        row = 0
        for row, record in enumerate(table.scan(), 1):
            if record is None:
                self._gaps.add(row)
                continue
            try:
                self._check(record, row)
            except RowProblem as problem:
                self._refuse(row, problem, on_bad_row)
        self._select(row - len(self._gaps), window)

    def _check(self, record: Any, row: int) -> PromptRow:
        if isinstance(record, RowProblem):
            raise record
        return self._contract.check(record, self._table.file, row, self._table.columnar)

    def _refuse(self, row: int, problem: RowProblem, on_bad_row: str) -> None:
        bad = BadRow(self._table.file, row, problem.field, problem.reason)
        if on_bad_row == "fail":
            unit = "row" if self._table.columnar else "line"
            field = f", field {bad.field!r}" if bad.field else ""
            message = f"{bad.file}, {unit} {row}{field}: {bad.reason}"
            raise DataError(message, "fix the row or pass --on-bad-row skip") from None
        self.skipped.append(bad)
        self._gaps.add(row)

    def _get(self, good: int) -> PromptRow:
        row = self._gaps.row(good)
        try:
            return self._check(self._table.read(row), row)
        except RowProblem as problem:
            message = f"{self._table.file}, row {row}: {problem.reason}, though it was good when opened"
            raise DataError(message, "the file was changed while in use; start again") from None

    def fingerprint(self) -> str:
        parts = (self._table.digest(), self._order, self._contract, [bad.row for bad in self.skipped])
        return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
