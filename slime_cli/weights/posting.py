"""Buckets announced to several engines at once, while older ones are still being loaded. Torch-free.

An engine that fails gets nothing more and is remembered with its reason; the others continue. Called by the rank that
sends.
"""

import collections
import concurrent.futures
from collections.abc import Callable, Sequence
from typing import Any

from slime_cli import engine_api
from slime_cli.errors import EngineError

AHEAD = 2
"""Requests that an engine has at most: it loads one while the next waits at its door."""


class Posting:
    """``path`` of every request. ``session``: the caller's, which says how long an answer is waited for."""

    def __init__(self, urls: Sequence[str], path: str, session: engine_api.Session) -> None:
        self.path = path
        self.left = list(urls)
        """Engines that have not failed."""
        self.failed: dict[str, str] = {}
        self._session = session
        self._pool = concurrent.futures.ThreadPoolExecutor(AHEAD * max(1, len(urls)), "posting")
        self._waiting: collections.deque[list[tuple[str, concurrent.futures.Future[None]]]] = collections.deque()

    def put(self, body: Callable[[str], dict[str, Any]]) -> None:
        """One request to every engine that is left; ``body``: the one for a URL."""
        jobs = [(url, self._pool.submit(self._session.done, url, self.path, body(url))) for url in self.left]
        self._waiting.append(jobs)

    def wait(self, most: int) -> None:
        """Returns when at most ``most`` of the puts are unanswered."""
        while len(self._waiting) > most:
            self._take(self._waiting.popleft())

    def look(self) -> bool:
        """Without waiting: whether no engine has failed, as far as is known by now."""
        for jobs in self._waiting:
            self._take([job for job in jobs if job[1].done()])
        return not self.failed

    def close(self) -> None:
        """What is unanswered is not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _take(self, jobs: Sequence[tuple[str, concurrent.futures.Future[None]]]) -> None:
        for url, job in jobs:
            try:
                job.result()
            except EngineError as error:
                self.failed.setdefault(url, error.message)
                if url in self.left:
                    self.left.remove(url)
