"""Asks the router's engines for samples: bounded in flight, held back while weights change.

One a run; generation, evaluation and users' functions (through :mod:`slime_cli.hooks`) share it. Invariants: no request
is sent while the engines' weights change; whoever changes them knows that none is left, or that all stand still;
requests that this run aborted are counted.
"""

import asyncio
import collections
import contextlib
import contextvars
import enum
import json
import time
import urllib.parse
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import aiohttp

from slime_cli.errors import EngineError
from slime_cli.manifests import layout
from slime_cli.rollout.concurrent import side_by_side
from slime_cli.rollout.watch import Watch

RETRIES = 20
QUIET = 0.3
"""Seconds without a piece of an answer, after which none is on its way from an engine that stands still."""

_in_call: contextvars.ContextVar[bool] = contextvars.ContextVar("in_call", default=False)
"""True inside a call of a user's generate function."""


_ends: contextvars.ContextVar[Callable[[], bool]] = contextvars.ContextVar("ends", default=lambda: False)


@contextlib.contextmanager
def ending(ends: Callable[[], bool]) -> Iterator[None]:
    """In this block, what is held back does not wait for the hold's end once ``ends`` says so: a request is answered as
    one that was aborted at its first token, a call raises :class:`EndedError`."""
    token = _ends.set(ends)
    try:
        yield
    finally:
        _ends.reset(token)


class EndedError(Exception):
    """A call that waited is not wanted any more."""


class Hold(enum.Enum):
    """The kind of work that waits inside :meth:`RouterClient.held`."""

    NOTHING = "nothing"
    CALLS = "calls"
    """New requests of slime's own, and new calls of users' functions; requests inside such a call pass, so that it can
    end."""
    REQUESTS = "requests"
    """Every new request."""


class _Waiters:
    """Wakes who waits for a state, without awaiting itself: a change made while a task is cancelled is told too."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    def tell(self) -> None:
        """The state may have changed."""
        for future in self._waiting:
            if not future.done():
                future.set_result(None)

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            future = asyncio.get_running_loop().create_future()
            self._waiting.add(future)
            try:
                await future
            finally:
                self._waiting.discard(future)


class RouterClient:
    """``alive`` is asked before a retry, so that a dead fleet ends a run at once instead of a retry storm. ``abort``
    ends every request in the engines; both may block."""

    def __init__(
        self,
        router_url: str,
        in_flight: int,
        alive: Callable[[], object] = lambda: None,
        *,
        abort: Callable[[], object] = lambda: None,
        streams: bool = False,
        watch: Watch | None = None,
    ) -> None:
        """``streams``: answers come token by token, each with the weight version that wrote it."""
        self.url = router_url
        self.alive = alive
        self.in_flight = in_flight
        self.watch = watch or Watch()
        self.streams = streams
        # aiohttp, not httpx: httpx's pool looks at every connection for every request, which at hundreds in flight took
        # more time than the engine. It never reads proxy variables unless asked to.
        self._http: aiohttp.ClientSession | None = None
        self.slots = asyncio.Semaphore(in_flight)
        self.retries = 0
        self._abort = abort
        self.aborts = 0
        """How often this run aborted what was in flight."""
        self.engines: Callable[[], list[str]] | None = None
        """Set, requests go to the engines themselves: the router passes on the fields that it knows (0.3.2), and
        ``return_routed_experts`` and ``lora_path`` are not among them."""
        self._heard = 0.0
        """When the last piece of an answer came, by the monotonic clock."""
        self.adapter: str | None = None
        """The LoRA adapter that every request asks for (:func:`slime_cli.manifests.layout.adapter_name`)."""
        self._engines: list[str] | None = None
        """The last answer of :attr:`engines`; it is asked again after a request that failed."""
        self._asked: collections.Counter[str] = collections.Counter()
        self._hold = Hold.NOTHING
        self._holding = asyncio.Lock()
        self._requests = 0
        self._calls = 0
        self._admission = _Waiters()
        self._ends = _Waiters()

    def address(self) -> tuple[str, int]:
        """Host and port of the router, as users' functions put them into ``http://HOST:PORT``."""
        parts = urllib.parse.urlsplit(self.url)
        host = parts.hostname or ""
        return f"[{host}]" if ":" in host else host, parts.port or {"https": 443}.get(parts.scheme, 80)

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()
            self._http = None

    # -- while the weights change ---------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def held(self, what: Hold) -> AsyncIterator[None]:
        """Inside, ``what`` waits; what is in flight is left alone. One holds at a time: who comes second waits for the
        first."""
        async with self._holding:
            self._hold = what
            try:
                yield
            finally:
                self._hold = Hold.NOTHING
                self._admission.tell()

    async def abort(self) -> None:
        """Every request that the engines know ends soon, with the tokens that it has; so does what waits, and is not
        wanted any more."""
        self.aborts += 1
        self._admission.tell()
        await asyncio.to_thread(self._abort)

    async def quiet(self) -> None:
        """Waits until no piece of an answer has come for :data:`QUIET` seconds. Engines that stand still have sent
        pieces which are still on their way through SGLang's processes, and get the version's name where they arrive."""
        began = time.monotonic()
        while self._requests and (left := max(began, self._heard) + QUIET - time.monotonic()) > 0:
            await asyncio.sleep(left)

    async def idle(self, what: Hold) -> None:
        """Waits until nothing of the kind that ``what`` holds is in flight."""
        calls = what is Hold.CALLS
        await self._ends.until(lambda: not self._requests and not (calls and self._calls))

    @contextlib.asynccontextmanager
    async def call(self) -> AsyncIterator[None]:
        """Around a call of a user's generate function, which may ask the engines in its own way."""
        ends = _ends.get()
        await self._admission.until(lambda: self._hold is Hold.NOTHING or ends())
        if self._hold is not Hold.NOTHING:
            raise EndedError
        self._calls += 1
        token = _in_call.set(True)
        try:
            yield
        finally:
            _in_call.reset(token)
            self._calls -= 1
            self._ends.tell()

    @contextlib.asynccontextmanager
    async def _request(self) -> AsyncIterator[bool]:
        """False where it is not to be sent any more."""
        inside, ends = _in_call.get(), _ends.get()

        def admits() -> bool:
            return self._hold is Hold.NOTHING or (inside and self._hold is Hold.CALLS)

        async with self.slots:
            await self._admission.until(lambda: admits() or ends())
            self._requests += 1
            try:
                with self.watch.at("requests to the engines"):
                    yield admits()
            finally:
                self._requests -= 1
                self._ends.tell()

    # -- requests --------------------------------------------------------------------------------------------------

    async def generate(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """POST /generate; a list of answers also for one sample. Raises EngineError when the engines cannot answer."""

        params = body.get("sampling_params") or {}
        if self.adapter is not None and (n := params.get("n") or 1) > 1:
            # SGLang (0.5.16) counts an adapter's requests wrongly where one asks for several answers, and then waits
            # for ever to unload it.
            one = body | {"sampling_params": params | {"n": 1}}
            return [answer for found in await side_by_side(self.generate(one) for _ in range(n)) for answer in found]

        async def read(answer: aiohttp.ClientResponse) -> list[dict[str, Any]]:
            found = await answer.json()
            return self._of_adapter(found if isinstance(found, list) else [found], str(answer.url))

        return await self._asked_for(body, read)

    async def stream(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The pieces of one sample's answer, in order, each as :meth:`generate` would answer it: ``output_ids`` and
        log-probabilities of its own tokens alone, with the ``weight_version`` that wrote them."""

        async def read(answer: aiohttp.ClientResponse) -> list[dict[str, Any]]:
            pieces: list[dict[str, Any]] = []
            done = 0
            async for line in answer.content:
                self._heard = time.monotonic()
                if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                    piece = json.loads(data)
                    if "error" in piece:
                        raise EngineError(f"{answer.url}: {piece['error']}")
                    pieces.append(_own_part(piece, done))
                    done = piece["meta_info"]["completion_tokens"]
            return self._of_adapter(_complete(pieces, str(answer.url)), str(answer.url))

        return await self._asked_for(body | {"stream": True}, read)

    async def _asked_for(self, body: dict[str, Any], read: Callable[[aiohttp.ClientResponse], Any]) -> Any:
        problem = url = ""
        async with self._request() as admitted:
            if self.adapter is not None:
                body = body | {"lora_path": self.adapter}
            if not admitted:
                self.aborts += 1
                return [_ended() for _ in range(body["sampling_params"].get("n") or 1)]
            for attempt in range(RETRIES):
                with self._least_asked() as url:
                    try:
                        async with self._session().post(url + "/generate", json=body) as answer:
                            if answer.status == 200:
                                return await read(answer)
                            problem = f"{answer.status} {(await answer.text())[:300]}"
                            if answer.status < 500:
                                raise EngineError(f"{url}/generate refused a request: {problem}")
                    except aiohttp.ClientError as error:
                        problem = f"{type(error).__name__}: {error}"
                self.retries += 1
                self._engines = None
                await asyncio.to_thread(self.alive)  # raises when the processes are gone
                await asyncio.sleep(min(0.2 * 2**attempt, 5.0))
        raise EngineError(f"{url}/generate failed {RETRIES} times, last: {problem}", "see logs/ in the run directory")

    def _of_adapter(self, answers: list[dict[str, Any]], url: str) -> list[dict[str, Any]]:
        """``answers``, whose version is the adapter that was asked for. Raises EngineError for another's."""
        for answer in answers if self.adapter is not None else ():
            found = answer["meta_info"].get("weight_version")
            if found != layout.version_of(self.adapter or ""):
                raise EngineError(
                    f"{url} was asked for adapter {self.adapter} and names version {found!r} in its answer",
                    "another process updates this endpoint: end it, or use an endpoint of your own",
                )
        return answers

    def _session(self) -> aiohttp.ClientSession:
        """Made in the event loop that uses it."""
        if self._http is None:
            connector = aiohttp.TCPConnector(limit=self.in_flight)
            self._http = aiohttp.ClientSession(
                connector=connector, timeout=aiohttp.ClientTimeout(total=None), read_bufsize=2**20
            )
        return self._http

    @contextlib.contextmanager
    def _least_asked(self) -> Iterator[str]:
        """The router, or the engine with the fewest open requests."""
        url = self.url
        if self.engines is not None:
            if self._engines is None:
                self._engines = self.engines()
            url = min(self._engines, key=self._asked.__getitem__)
        self._asked[url] += 1
        try:
            yield url
        finally:
            self._asked[url] -= 1


def _ended() -> dict[str, Any]:
    """The answer to a request that is not sent any more."""
    meta = {"finish_reason": {"type": "abort"}, "completion_tokens": 0, "output_token_logprobs": []}
    return {"text": "", "output_ids": [], "meta_info": meta}


def _own_part(piece: dict[str, Any], done: int) -> dict[str, Any]:
    """A chunk without the ``done`` tokens of those before it: engines send them again, unless started with
    ``--incremental-streaming-output``."""
    meta = piece["meta_info"]
    new = meta["completion_tokens"] - done
    if len(piece["output_ids"]) == new:
        return piece
    lists = {name: meta[name][done:] for name in ("output_token_logprobs", "output_top_logprobs") if meta.get(name)}
    return piece | {"output_ids": piece["output_ids"][done:], "meta_info": meta | lists, "cumulative_text": True}


def _complete(pieces: list[dict[str, Any]], url: str) -> list[dict[str, Any]]:
    if not pieces or pieces[-1]["meta_info"]["finish_reason"] is None:
        raise aiohttp.ClientPayloadError(f"{url}: the stream ended before the answer did")
    return pieces
