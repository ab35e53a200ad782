"""Failures while answers are generated and rewarded: the first of each kind is shown at once, and a loop that gets
nowhere ends.

One for a phase; the generator and evaluation report to it. Invariants: a failure costs its trajectory and is counted by
its reason; the run ends with those counts after ``--max-groups-without-progress`` groups in a row of which none was
accepted, whatever the reasons.
"""

import collections
import dataclasses
from collections.abc import Callable

from slime_cli.errors import DataError

OPTION = "--max-groups-without-progress"


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """Why a trajectory is dropped."""

    reason: str
    """The name that is counted: ``generation_error``, ``reward_timeout``, ..."""
    detail: str
    trace: str = ""
    """The exception of a user's function, with the lines of their code."""


class Failures:
    """``say`` prints a text as it is."""

    def __init__(self, limit: int = 128, say: Callable[[str], None] = print):
        self.limit = limit
        self.say = say
        self.first: dict[str, str] = {}
        """Detail of the first failure by reason."""
        self._shown: set[tuple[str, str]] = set()

    def show(self, failure: Failure) -> None:
        """Once for each reason, and for each line of the user's code that raised."""
        self.first.setdefault(failure.reason, failure.detail)
        kind = failure.reason, failure.detail.rpartition(" at ")[2] if failure.trace else ""
        if kind not in self._shown:
            self._shown.add(kind)
            trace = "\n" + failure.trace if failure.trace else ""
            self.say(f"{failure.reason}: {failure.detail} (the first of its kind; all are counted){trace}")

    def streak(self, unit: str) -> "Streak":
        return Streak(self, unit)

    def told(self, dropped: collections.Counter[str]) -> str:
        """``reward_error 12 (KeyError: 'x' at FILE:LINE), filter_rejected 3``"""
        parts = []
        for reason, count in dropped.most_common():
            detail = self.first.get(reason)
            parts.append(f"{reason} {count}" + (f" ({detail})" if detail else ""))
        return ", ".join(parts)


class Streak:
    """Groups, or prompts of an evaluation, since the last one that came to something."""

    def __init__(self, failures: Failures, unit: str):
        self.failures = failures
        self.unit = unit
        self.length = 0
        self.dropped: collections.Counter[str] = collections.Counter()

    def settle(self, accepted: bool, dropped: collections.Counter[str]) -> None:
        """``dropped``: the trajectories that this one lost, by reason. Raises DataError when the streak is as long as
        allowed."""
        if accepted:
            self.length = 0
            self.dropped.clear()
            return
        self.length += 1
        self.dropped += dropped
        if self.length >= self.failures.limit:
            self.end()

    def end(self) -> None:
        raise DataError(
            f"not one of {self.length} {self.unit} in a row was of use; lost by reason:"
            f" {self.failures.told(self.dropped)}",
            f"fix the cause, and the same command resumes; {OPTION} {self.failures.limit} is how many may be lost in"
            " a row",
        )
