"""How many rows of a source a run can use, and the first that it cannot, before anything is started. Callers: ``slime
train``.

Rendering a short row and counting its tokens takes about 0.3 ms, a conversation of many turns a hundred times that: the
first :data:`ROWS` are looked at, as far as :data:`SECONDS` reach, unless the number of rollouts depends on every row
(``--num-epoch``). What is further on is found when it is dealt, and named the same way."""

import collections
import dataclasses
import time
from collections.abc import Callable
from typing import Any

from slime_cli.buffer.types import PromptRow, RowError
from slime_cli.errors import DataError

ROWS = 1000
AT_LEAST = 100
SECONDS = 3.0


@dataclasses.dataclass
class Usable:
    """Counts over the rows that were looked at."""

    looked_at: int = 0
    usable: int = 0
    problems: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    """Rows by what is wrong with them."""
    first: dict[str, str] = dataclasses.field(default_factory=dict)
    """The first of each kind, in words."""


def look(source: Any, render: Callable[[PromptRow], object], *, skip: bool, every: bool) -> Usable:
    """Renders the rows. Raises RowError for the first that cannot be used unless ``skip``, and DataError when none
    can."""
    found = Usable()
    began = time.monotonic()
    for index in range(len(source) if every else min(len(source), ROWS)):
        if not every and index >= AT_LEAST and time.monotonic() - began > SECONDS:
            break
        found.looked_at += 1
        row = source[index]
        try:
            if render(row) is not None:
                found.usable += 1
                continue
            kind = "too_long"
            message = f"{row.where}: longer than --rollout-max-prompt-len"
        except RowError as error:
            if not skip:
                raise
            kind = error.kind
            message = error.message
        found.problems[kind] += 1
        found.first.setdefault(kind, message)
    if not found.usable and found.looked_at == len(source):
        raise DataError(
            f"{source.name}: none of its {len(source)} rows can be used: {'; '.join(found.first.values())}",
            "fix the rows",
        )
    return found


def rollouts(name: str, usable: int, epochs: int, batch: int) -> tuple[int, int]:
    """Rollouts in so many passes over the usable rows, and the rows that are left over. Raises DataError when they fill
    none."""
    if usable * epochs < batch:
        raise DataError(
            f"{name}: --num-epoch {epochs} over {usable} rows that can be used is less than one "
            f"--rollout-batch-size {batch}",
            f"lower it to {usable * epochs} or less, or give --num-rollout, which deals rows again",
        )
    return divmod(usable * epochs, batch)
