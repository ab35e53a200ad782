"""Notices that nothing ends any more: a user's function that never returns, an engine that never answers.

One a run. What may take long registers (:meth:`Watch.at`); the loop waits through :meth:`Watch.over`, which says what
it waits for and ends the run after ``--max-seconds-without-progress``. Progress is that anything registered ends.
"""

import asyncio
import collections
import contextlib
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator

from slime_cli.errors import EngineError, SlimeError, UsageError
from slime_cli.rollout.concurrent import CANCEL_SECONDS

OPTION = "--max-seconds-without-progress"
FIRST_WARNING = 60.0
"""Seconds; each warning of one standstill comes after twice as long as the one before it."""


class Watch:
    """``clock`` counts seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ids = itertools.count()
        self._under_way: dict[int, tuple[str, bool, float]] = {}
        self._moved = clock()
        self._warn_after = FIRST_WARNING

    @contextlib.contextmanager
    def at(self, what: str, *, by_user: bool = False) -> Iterator[None]:
        """``what``, in the plural, is under way. ``by_user``: it is for a user's function to end it."""
        key = next(self._ids)
        self._under_way[key] = what, by_user, self._clock()
        try:
            yield
        finally:
            del self._under_way[key]
            self._moved = self._clock()
            self._warn_after = FIRST_WARNING

    async def over[T](self, waiting: Awaitable[T], what: str, *, limit: float, say: Callable[[str], None]) -> T:
        """What ``waiting`` comes to; ``what`` names it. Raises UsageError or EngineError, and cancels it, once nothing
        has ended for ``limit`` seconds."""
        task = asyncio.ensure_future(waiting)
        since = self._clock()
        try:
            while not task.done():
                still = self._clock() - max(since, self._moved)
                if still >= limit:
                    raise self._stuck(what, still, limit)
                if still >= self._warn_after:
                    self._warn_after *= 2
                    say(f"warning: {what}: nothing has ended for {still:.0f} s. Under way: {self.told()}")
                await asyncio.wait([task], timeout=min(limit, self._warn_after) - still)
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task], timeout=CANCEL_SECONDS)

    def told(self) -> str:
        """What is under way, how often, and for how long."""
        now = self._clock()
        found: dict[str, list[float]] = collections.defaultdict(list)
        for what, _, since in self._under_way.values():
            found[what].append(now - since)
        parts = (f"{what}: {len(ages)}, the longest for {max(ages):.0f} s" for what, ages in found.items())
        return "; ".join(parts) or "nothing that slime has begun"

    def _stuck(self, what: str, still: float, limit: float) -> SlimeError:
        message = f"{what}: nothing has ended for {still:.0f} s ({OPTION} {limit:g}). Under way: {self.told()}"
        if any(by_user for _, by_user, _ in self._under_way.values()):
            fix = "have the function give up by itself, as with asyncio.timeout"
            return UsageError(message, f"{fix}, or give a larger {OPTION}; the same command resumes")
        return EngineError(message, f"see logs/ in the run directory; the same command resumes, {OPTION} is how long")
