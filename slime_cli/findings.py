"""One thing that was looked at before a run: what ``slime doctor`` lists, and what other commands refuse or warn of."""

import dataclasses
from typing import Literal

Status = Literal["ok", "warn", "fail"]


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """A warning may still work; a failure does not."""

    name: str
    status: Status
    detail: str
    fix: str = ""
    """The fix; empty when ok."""
    shown: tuple[str, ...] = ()
    """Lines that are printed below the list of findings."""
