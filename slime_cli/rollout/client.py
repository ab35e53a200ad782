"""Asks the router's engines for samples: bounded in flight, every answer checked at the boundary."""

import asyncio
import base64
import collections
import urllib.parse
from collections.abc import Callable
from typing import Any

import aiohttp

from slime_cli.buffer.types import Sample, Status
from slime_cli.errors import EngineError

RETRIES = 20
_STATUS = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}


class RouterClient:
    """One for a run. ``alive`` is asked before a retry, so that a dead fleet ends a run at once instead of a retry
    storm."""

    def __init__(self, router_url: str, in_flight: int, alive=lambda: None):
        self.url = router_url
        self.alive = alive
        self.in_flight = in_flight
        # aiohttp, not httpx: httpx's pool looks at every connection for every request, which at hundreds in flight took
        # more time than the engine. It never reads proxy variables unless asked to.
        self._http: aiohttp.ClientSession | None = None
        self.slots = asyncio.Semaphore(in_flight)
        self.retries = 0
        self.engines: Callable[[], list[str]] | None = None
        """Set, requests go to the engines themselves: the router passes on the fields that it knows (0.3.2), and
        ``return_routed_experts`` is not among them."""
        self._engines: list[str] | None = None
        """Of the last look; taken anew after a request that failed."""
        self._asked: collections.Counter[str] = collections.Counter()

    def address(self) -> tuple[str, int]:
        """Host and port of the router, as users' functions put them into ``http://HOST:PORT``."""
        parts = urllib.parse.urlsplit(self.url)
        host = parts.hostname or ""
        return f"[{host}]" if ":" in host else host, parts.port or {"https": 443}.get(parts.scheme, 80)

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()

    def _session(self) -> aiohttp.ClientSession:
        """Made in the event loop that uses it."""
        if self._http is None:
            connector = aiohttp.TCPConnector(limit=self.in_flight)
            self._http = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        return self._http

    async def generate(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """POST /generate; a list of answers also for one sample. Raises EngineError when the engines cannot answer."""
        async with self.slots:
            for attempt in range(RETRIES):
                url = self._least_asked()
                self._asked[url] += 1
                try:
                    async with self._session().post(url + "/generate", json=body) as answer:
                        if answer.status == 200:
                            found = await answer.json()
                            return found if isinstance(found, list) else [found]
                        problem = f"{answer.status} {(await answer.text())[:300]}"
                        if answer.status < 500:
                            raise EngineError(f"{url}/generate refused a request: {problem}")
                except aiohttp.ClientError as error:
                    problem = f"{type(error).__name__}: {error}"
                finally:
                    self._asked[url] -= 1
                self.retries += 1
                self._engines = None
                self.alive()  # raises when the processes are gone
                await asyncio.sleep(min(0.2 * 2**attempt, 5.0))
        raise EngineError(f"{url}/generate failed {RETRIES} times, last: {problem}", "see logs/ in the run directory")

    def _least_asked(self) -> str:
        """The router, or the engine with the fewest open requests."""
        if self.engines is None:
            return self.url
        if self._engines is None:
            self._engines = self.engines()
        return min(self._engines, key=self._asked.__getitem__)


def fill(sample: Sample, prompt_tokens: list[int], answer: dict[str, Any]) -> None:
    """Puts an engine's answer into ``sample``. Raises EngineError when its evidence is incomplete.

    The trained token ids are the sampled ones, never a re-tokenised text, and each has the log-probability of itself.
    """
    meta = answer["meta_info"]
    ids = answer["output_ids"]
    scored = meta.get("output_token_logprobs")
    if scored is None or len(scored) != len(ids) or any(entry[1] != token for entry, token in zip(scored, ids)):
        raise EngineError(
            f"sample {sample.index}: {len(ids)} tokens but log-probabilities for {scored and len(scored)}"
        )
    sample.tokens = prompt_tokens + ids
    sample.response = answer["text"]
    sample.response_length = len(ids)
    sample.rollout_log_probs = [entry[0] for entry in scored]
    sample.weight_versions.append(str(meta.get("weight_version")))
    sample.status = _STATUS.get(meta["finish_reason"]["type"], Status.FAILED)


def fill_routed_experts(sample: Sample, answer: dict[str, Any], shape: list[int]) -> None:
    """Puts the experts that the engine chose into a filled ``sample``; ``shape`` is [layers, experts a token].

    Raises EngineError when the engine says nothing of them, or of another model.
    """
    import numpy as np

    encoded = answer["meta_info"].get("routed_experts")
    if encoded is None:
        raise EngineError(
            f"sample {sample.index}: the engine does not say which experts it chose",
            "start it with --sglang-enable-return-routed-experts (slime serve-rollout takes it too)",
        )
    chosen = np.frombuffer(base64.b64decode(encoded), "<i4")
    expected = (len(sample.tokens) - 1) * shape[0] * shape[1]
    if len(chosen) != expected or not 0 <= chosen.min(initial=0) <= chosen.max(initial=0) < 2**15:
        raise EngineError(
            f"sample {sample.index}: {len(chosen)} chosen experts for {len(sample.tokens)} tokens of {shape}, not"
            f" {expected}"
        )
    sample.rollout_routed_experts = chosen.astype("<i2").tobytes()
    sample.routed_experts_shape = list(shape)
