"""Deals prompt rows in order: a fixed permutation of the source for each epoch, or the source's own order.

Called by :class:`slime_cli.buffer.buffer.DataBuffer`, which keeps the cursor in the journal with the groups that were
dealt, so that a resumed run deals on where it stands.
"""

import collections
from collections.abc import Callable
from typing import Any

import numpy as np

from slime_cli.buffer.types import PromptRow, RowError
from slime_cli.errors import DataError

KIND = "skipped:"
"""Before a kind of unusable row, in the cursor."""


class Prompts:
    """``render(row)`` returns what generation needs, None for a prompt that is too long, which is counted, or raises
    RowError: it ends the run, or with ``on_bad_row="skip"`` is counted too, and the first of its kind is said."""

    def __init__(
        self,
        source: Any,
        cursor: dict[str, int] | None,
        *,
        shuffle: bool,
        seed: int,
        render: Callable[[PromptRow], Any],
        on_bad_row: str,
        say: Callable[[str], None],
    ) -> None:
        self.source = source
        self.render = render
        self.say = say
        self.skip_bad_rows = on_bad_row == "skip"
        self.shuffle = shuffle
        self.seed = seed
        cursor = cursor or {"epoch": 0, "position": 0, "skipped": 0}
        self.epoch = cursor["epoch"]
        self.position = cursor["position"]
        self.skipped = cursor["skipped"]
        kinds = {name.removeprefix(KIND): count for name, count in cursor.items() if name.startswith(KIND)}
        self.skipped_by_kind = collections.Counter(kinds)
        self._order: tuple[int, np.ndarray] | None = None

    @property
    def cursor(self) -> dict[str, int]:
        kinds = {f"{KIND}{kind}": count for kind, count in self.skipped_by_kind.items()}
        return {"epoch": self.epoch, "position": self.position, "skipped": self.skipped, **kinds}

    def next(self) -> tuple[PromptRow, Any]:
        """The next row that can be used, and what it renders to. Raises DataError when a whole epoch has none."""
        for _ in range(len(self.source) + 1):
            if self.position >= len(self.source):
                self.epoch += 1
                self.position = 0
            row = self.source[self._index()]
            self.position += 1
            rendered = self._rendered(row)
            if rendered is not None:
                return row, rendered
            self.skipped += 1
        reasons = ", ".join(f"{n} {kind}" for kind, n in self.skipped_by_kind.items())
        raise DataError(
            f"{self.source.name}: none of its {len(self.source)} rows can be used: {reasons}",
            "raise --rollout-max-prompt-len or choose other data",
        )

    def _rendered(self, row: PromptRow) -> Any:
        """None for a row that is passed over."""
        try:
            rendered = self.render(row)
        except RowError as error:
            if not self.skip_bad_rows:
                raise
            if error.kind not in self.skipped_by_kind:
                self.say(f"passed over, the first of its kind ({error.kind}): {error.message}")
            self.skipped_by_kind[error.kind] += 1
            return None
        if rendered is None:
            self.skipped_by_kind["too_long"] += 1
        return rendered

    def _index(self) -> int:
        if not self.shuffle:
            return self.position
        if self._order is None or self._order[0] != self.epoch:
            self._order = (self.epoch, np.random.default_rng([self.seed, self.epoch]).permutation(len(self.source)))
        return int(self._order[1][self.position])
