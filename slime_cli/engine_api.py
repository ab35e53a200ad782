"""An engine's stock endpoints over HTTP, for those who steer engines or bring weights into them. Torch-free.

Every failure is an EngineError that names the engine. :func:`each` asks all engines before it raises, so that one dead
engine keeps no other from being told: an engine that nobody resumes would stand still for ever.
"""

import collections
import concurrent.futures
import functools
import http.client
import json
import select
import socket
import ssl
import time
import urllib.parse
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import httpx

from slime_cli.errors import EngineError, together

T = TypeVar("T")
LOADER = "slime_cli.weights.loading.load"
"""The function by which engines that slime starts load buckets of shared memory (``--custom-weight-loader``)."""
RELOADER = "slime_cli.weights.reloading.load"
"""The one by which they load a version of quantised weights."""
_SPELLED = {"half": "float16", "float": "float32", "": "auto"}
_FLUSH_AGAIN = 0.2
"""Seconds."""
_RUNNING = "is the engine still running? see logs/engine-*.log of the run that owns it"


def _client(timeout: float) -> httpx.Client:
    """Proxies of the environment are not for the cluster's own addresses."""
    return httpx.Client(trust_env=False, timeout=timeout, verify=_certificates())


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Read once: it takes longer than an engine's answer, and a version in the engines takes several."""
    return httpx.create_ssl_context(trust_env=False)


def get(url: str, path: str, timeout: float = 60) -> dict[str, Any]:
    """The JSON object that the engine answers. Raises EngineError, also for an answer that says that it failed."""
    try:
        with _client(timeout) as client:
            return client.get(url + path).raise_for_status().json()
    except (httpx.HTTPError, ValueError) as error:
        raise EngineError(f"{url}{path}: {type(error).__name__}: {error}", _RUNNING) from None


def post(url: str, path: str, body: dict[str, Any], timeout: float) -> httpx.Response:
    """The engine's answer, whatever it says. Raises EngineError when there is none."""
    try:
        with _client(timeout) as client:
            return client.post(url + path, json=body)
    except httpx.HTTPError as error:
        raise EngineError(f"{url}{path}: {type(error).__name__}: {error}", _RUNNING) from None


class Session:
    """Requests over connections that stay open, for many in a row, with as little work for each as there can be: they
    are sent while something else is computed. ``timeout``: seconds without a sign of the engine. Threads may share it.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._free: collections.defaultdict[str, list[http.client.HTTPConnection]] = collections.defaultdict(list)
        """By URL, connections that no request is on."""

    def done(self, url: str, path: str, body: dict[str, Any]) -> None:
        """Raises EngineError unless the engine answers that it has done it."""
        connection = self._connection(url)
        try:
            connection.request("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise EngineError(f"{url}{path}: {type(error).__name__}: {error}", _RUNNING) from None
        self._free[url].append(connection)
        if answer.status != 200:
            raise EngineError(f"{url}{path} answered {answer.status}: {text.strip()[:300]}", _RUNNING)

    def close(self) -> None:
        for connections in self._free.values():
            while connections:
                connections.pop().close()

    def _connection(self, url: str) -> http.client.HTTPConnection:
        """One that is open, or that opens itself with its first request."""
        free = self._free[url]
        while free:
            connection = free.pop()
            if connection.sock is not None and not _readable(connection.sock):
                return connection
            connection.close()  # the engine has closed it, as it does after some seconds
        where = urllib.parse.urlsplit(url)
        assert where.hostname is not None, url
        if where.scheme == "https":
            return http.client.HTTPSConnection(
                where.hostname, where.port, timeout=self._timeout, context=_certificates()
            )
        return http.client.HTTPConnection(where.hostname, where.port, timeout=self._timeout)


def _readable(connection: socket.socket) -> bool:
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))


def has_loader(server: dict[str, Any], loader: str) -> bool:
    """Whether an engine was started with this ``--custom-weight-loader``. ``server``: its ``/server_info``."""
    return loader in (server.get("custom_weight_loader") or ())


def require(url: str, path: str, body: dict[str, Any], timeout: float) -> httpx.Response:
    """The engine's answer to a request that it must not refuse. Raises EngineError."""
    answer = post(url, path, body, timeout)
    if answer.status_code != 200:
        raise EngineError(f"{url}{path} answered {answer.status_code}: {answer.text[:300]}", _RUNNING)
    return answer


def each(urls: Sequence[str], ask: Callable[[str], T]) -> list[T]:
    """The answer of each engine to ``ask``, all at once. Raises EngineError, after the last answer, that names every
    engine that failed."""
    with concurrent.futures.ThreadPoolExecutor(max(len(urls), 1)) as pool:
        jobs = [pool.submit(ask, url) for url in urls]
        concurrent.futures.wait(jobs)
    failed = [error for job in jobs if isinstance(error := job.exception(), EngineError)]
    if failed:
        raise together(failed, "engines failed") from None
    return [job.result() for job in jobs]


def flush(url: str, patience: float = 60) -> None:
    """The engine's prefix cache is empty. Requests that are about to end are waited for, ``patience`` seconds at most.
    Raises EngineError where there are some then, and leaves the engine as it is.

    It is asked again and again: an engine that sleeps while it is idle looks only when a message comes, and where that
    is always a health check it would find one request each time.
    """
    end = time.monotonic() + patience
    while True:
        late = time.monotonic() > end
        answer = post(url, f"/flush_cache?timeout={_FLUSH_AGAIN:g}", {}, 120)
        if answer.status_code == 200:
            return
        if late or answer.status_code != 400:  # which says that there are requests
            message = f"{url}: its prefix cache cannot be flushed: {answer.text.strip()[:300]}"
            raise EngineError(message, "let its requests end, or abort them, before")
        time.sleep(_FLUSH_AGAIN / 4)


def dtype(server_info: dict[str, Any]) -> str:
    """The dtype that the engine computes in, by torch's name; "auto" where the model decides."""
    said = str(server_info.get("dtype") or "").removeprefix("torch.")
    return _SPELLED.get(said, said)
