"""Prompt sources: where prompts come from, by URI. Used by the Data Buffer, evaluation and the conversion of SFT data.

``data.jsonl`` · ``data.parquet`` · ``datasets:FOLDER`` · ``datasets:json?data_files=a.json&split=train`` ·
``reasoning-gym:TASK?arg=value``; each may end in ``@[start:end:step]``, which counts good rows as a Python list would.
"""

import functools
import pathlib
import types
from collections.abc import Sequence

from slime_cli.buffer.sources.base import (
    BadRow,
    PromptSource,
    RowContract,
    require_path,
    split_slice,
)
from slime_cli.buffer.sources.files import (
    HuggingFace,
    JsonLines,
    Parquet,
    TableSource,
    open_dataset,
)
from slime_cli.buffer.sources.gym import GymSource
from slime_cli.buffer.sources.users import UserSource
from slime_cli.buffer.types import PromptRow
from slime_cli.errors import DataError, UsageError
from slime_cli.options.evaluations import evaluation_sets
from slime_cli.options.groups import SlimeOptions
from slime_cli.text import nearest

__all__ = ["BadRow", "PromptSource", "evaluations_of", "open_source", "prompts_of"]

KINDS = "FILE.jsonl, FILE.parquet, a folder of datasets.save_to_disk, datasets:..., reasoning-gym:TASK?..."
SCHEMES = ("datasets", "reasoning-gym")


def open_source(
    uri: str,
    *,
    input_key: str = "input",
    label_key: str | None = None,
    metadata_key: str = "metadata",
    tool_key: str = "tools",
    on_bad_row: str = "fail",
) -> PromptSource:
    """Opens and checks a prompt source.

    Raises UsageError for a URI that cannot be understood, DataError for data that is missing, broken or empty. With
    ``on_bad_row="skip"`` broken rows are listed in ``skipped`` instead.
    """
    if on_bad_row not in ("fail", "skip"):
        raise UsageError(f"--on-bad-row {on_bad_row!r}{nearest(on_bad_row, ('fail', 'skip'))}", "choose fail or skip")
    contract = RowContract(input_key, label_key, metadata_key, tool_key)
    base, window = split_slice(uri)
    scheme, colon, rest = base.partition(":")
    if colon and scheme == "reasoning-gym":
        return _open_gym(uri)
    if colon and scheme == "datasets":
        return TableSource(uri, HuggingFace(base, open_dataset(rest, uri), contract), contract, window, on_bad_row)
    if colon and nearest(scheme, SCHEMES) and not pathlib.Path(base).exists():
        raise UsageError(f"{uri}: unknown kind of source {scheme!r}{nearest(scheme, SCHEMES)}", f"use {KINDS}")
    return _open_path(uri, base, contract, window, on_bad_row)


class NoPrompts(PromptSource):
    """The source of a phase that deals none: it only evaluates, or trains on saved rollouts."""

    def __init__(self) -> None:
        super().__init__("no prompts")

    def _get(self, good: int) -> PromptRow:
        raise IndexError(good)

    def fingerprint(self) -> str:
        return self.name


def prompts_of(s: SlimeOptions) -> PromptSource:
    """``--prompt-data``, or the class of ``--data-source-path``. ``s``: slime's options by dest, here and below."""
    if s.data_source_path:
        return UserSource(s.data_source_path, types.SimpleNamespace(**vars(s)))
    if not s.prompt_data and (s.num_rollout == 0 or s.load_debug_rollout_data):
        return NoPrompts()
    return _opened(s, s.prompt_data, s.input_key, s.label_key, s.tool_key)


def evaluations_of(s: SlimeOptions, left_out: Sequence[str] = ()) -> list[PromptSource | None]:
    """The evaluation sets, in order; None for one that is ``left_out``."""
    return [
        None
        if one.path in left_out
        else _opened(
            one.options,
            one.path,
            one.options.eval_input_key or "",
            one.options.eval_label_key,
            one.options.eval_tool_key or "",
        )
        for one in evaluation_sets(s)
    ]


def _opened(s: SlimeOptions, uri: str, input_key: str, label_key: str | None, tool_key: str) -> PromptSource:
    return open_source(
        uri,
        input_key=input_key,
        label_key=label_key,
        metadata_key=s.metadata_key,
        tool_key=tool_key,
        on_bad_row=s.on_bad_row,
    )


@functools.cache  # a command checks its data before anything starts and opens it again later; these never change
def _open_gym(uri: str) -> GymSource:
    base, window = split_slice(uri)
    return GymSource(uri, base.partition(":")[2], window)


def _open_path(uri: str, base: str, contract: RowContract, window: slice, on_bad_row: str) -> PromptSource:
    path = require_path(base)
    if path.is_dir():
        table = HuggingFace(base, open_dataset(base, uri), contract)
    elif path.suffix == ".jsonl":
        try:
            table = JsonLines(path)
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}", "check its permissions") from None
    elif path.suffix == ".parquet":
        table = Parquet(path, contract)
    else:
        raise UsageError(f"{uri}: a {path.suffix or 'nameless'} file is no prompt source", f"use {KINDS}")
    return TableSource(uri, table, contract, window, on_bad_row)
