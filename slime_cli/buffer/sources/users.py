"""``--data-source-path``: prompts dealt by a class of a user's own, as a prompt source.

Opened like any other source, in place of ``--prompt-data``. Invariants: ``get_samples(1)`` is asked for one group after
the other, in order, and a row is asked for once; of its samples the prompt, the label and the metadata of the first are
read. How far a run has come is in its own journal, so ``save``, ``load`` and ``add_samples`` are never called, and an
attempt that resumes asks for the rows again: the class must deal the same ones in the same order.
"""

import types
from typing import Any

from slime_cli.buffer.sources.base import PromptSource, RowContract
from slime_cli.buffer.sources.messages import RowProblem
from slime_cli.buffer.types import PromptRow, Sample
from slime_cli.errors import DataError, UsageError
from slime_cli.hooks.kinds import Hook

FIX = "get_samples(n) returns n groups, lists of Samples with a prompt"


class UserSource(PromptSource):
    """``args``: what the class is made with, every option of slime's own by name."""

    def __init__(self, path: str, args: types.SimpleNamespace) -> None:
        super().__init__(path)
        self._hook = Hook.load(path, "data_source")
        self._source = self._hook(args)
        self._rows: list[PromptRow] = []
        self._select(self._length(), slice(None))

    def _length(self) -> int:
        if not hasattr(type(self._source), "__len__"):
            raise self._hook.refuse("has no __len__", "say how many groups it deals before they repeat")
        return int(self._method("__len__")())

    def _method(self, name: str) -> Hook:
        method = getattr(self._source, name, None)
        if not callable(method):
            raise self._hook.refuse(f"has no {name}", FIX)
        return Hook(self._hook.path, self._hook.kind, method)

    def _get(self, good: int) -> PromptRow:
        while len(self._rows) <= good:
            self._rows.append(self._next(len(self._rows) + 1))
        return self._rows[good]

    def _next(self, row: int) -> PromptRow:
        groups = self._method("get_samples")(1)
        if groups in ([], [[]]):
            raise DataError(f"{self.name}: it dealt {row - 1} of its {len(self)} groups and no more", FIX)
        first = groups[0][0] if _is_one_group(groups) else None
        if not isinstance(first, Sample):
            raise UsageError(
                f"{self._hook.where}: get_samples(1) returned {type(groups).__name__} {groups!r:.100}", FIX
            )
        record: dict[str, Any] = {"prompt": first.prompt, "label": first.label, "metadata": first.metadata}
        contract = RowContract("prompt", None if first.label is None else "label")
        try:
            return contract.check(record | {"tools": first.metadata.get("tools")}, self.name, row)
        except RowProblem as problem:
            raise DataError(f"{self.name}:{row}: {problem}", "fix what get_samples makes") from None

    def fingerprint(self) -> str:
        return f"{self.name}-{len(self)}-{self[0].prompt!r:.200}"


def _is_one_group(groups: Any) -> bool:
    return isinstance(groups, list | tuple) and len(groups) == 1 and isinstance(groups[0], list | tuple)
