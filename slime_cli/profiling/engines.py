"""A torch profile of each generation engine, asked for through the router. Used by ``slime profile engines``.

Every engine records ``num_steps`` forward steps of its own and ends by itself; small requests drive it there. Engines
write the traces themselves, so ``out_dir`` must be a folder that they can reach (the same host, or a shared disk).
"""

import gzip
import os
import pathlib
import time
import zlib
from typing import Any

import httpx

from slime_cli.errors import EngineError
from slime_cli.manifests import Endpoint

_POLL_S = 0.25
_TOKENS = [1, 2, 3, 4, 5, 6, 7, 8]
"""A prompt that is valid in any vocabulary; what it says does not matter."""


def profile_engines(
    endpoint: Endpoint,
    out_dir: str | os.PathLike[str],
    num_steps: int = 8,
    *,
    cuda: bool | None = None,
    timeout: float = 300.0,
) -> dict[str, list[pathlib.Path]]:
    """Engine URL -> its trace files (``*.trace.json.gz``, one a rank). ``cuda`` None asks the endpoint's devices.

    Raises EngineError when the router has no workers, one refuses, or a trace is not there after ``timeout`` seconds.
    """
    if num_steps < 1:
        raise ValueError(f"num_steps must be at least 1, not {num_steps}")
    cuda = any(engine.devices for engine in endpoint.engines) if cuda is None else cuda
    activities = ["CPU", "GPU"] if cuda else ["CPU"]
    # Proxies of the environment are not for the cluster's own addresses.
    with httpx.Client(trust_env=False, timeout=60.0) as client:
        urls = worker_urls(client, endpoint.router_url)
        folders = {url: pathlib.Path(out_dir).resolve() / f"engine-{number}" for number, url in enumerate(urls)}
        old = {url: set(_traces(folder)) for url, folder in folders.items()}
        for url, folder in folders.items():
            folder.mkdir(parents=True, exist_ok=True)
            request = {"output_dir": str(folder), "num_steps": num_steps, "activities": activities}
            _post(client, f"{url}/start_profile", request)
        return _drive(client, endpoint.router_url, folders, old, num_steps, time.monotonic() + timeout)


def worker_urls(client: httpx.Client, router_url: str) -> list[str]:
    """The engines that the router knows, in a stable order."""
    try:
        answer = client.get(f"{router_url.rstrip('/')}/workers")
        answer.raise_for_status()
        urls = sorted(worker["url"].rstrip("/") for worker in answer.json()["workers"])
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise EngineError(f"{router_url}/workers: {error!r}", "is it up? `slime serve-rollout` starts one") from None
    if not urls:
        raise EngineError(f"{router_url}: the router has no workers", "start engines with `slime serve-rollout`")
    return urls


def _drive(
    client: httpx.Client,
    router_url: str,
    folders: dict[str, pathlib.Path],
    old: dict[str, set[pathlib.Path]],
    num_steps: int,
    deadline: float,
) -> dict[str, list[pathlib.Path]]:
    """Sends work until each engine's traces lie there complete. The router goes first; an engine that it does not
    choose is then asked directly."""
    params = {"max_new_tokens": num_steps + 2, "temperature": 1.0, "ignore_eos": True}
    found: dict[str, list[pathlib.Path]] = {}
    attempt = 0
    while True:
        for url, folder in folders.items():
            new = sorted(set(_traces(folder)) - old[url])
            if new and all(_complete(path) for path in new):
                found[url] = new
        waiting = [url for url in folders if url not in found]
        if not waiting:
            return found
        if time.monotonic() > deadline:
            raise EngineError(
                f"no complete trace from {', '.join(waiting)} under {', '.join(str(folders[u]) for u in waiting)}",
                "can these engines write there? A folder on a shared disk is needed for engines of other hosts",
            )
        targets = [router_url.rstrip("/")] * len(waiting) if attempt < 2 else waiting
        for offset, target in enumerate(targets):
            start = (attempt + offset) % len(_TOKENS)
            prompt = _TOKENS[start:] + _TOKENS[:start]  # not always the same: routers send equal prefixes to one engine
            _post(client, f"{target}/generate", {"input_ids": prompt, "sampling_params": params})
        attempt += 1
        time.sleep(_POLL_S)


def _traces(folder: pathlib.Path) -> list[pathlib.Path]:
    return list(folder.glob("*.trace.json.gz"))


def _complete(path: pathlib.Path) -> bool:
    """A gzip file that is being written lacks its end."""
    try:
        with gzip.open(path) as file:
            while file.read(1 << 20):
                pass
    except (EOFError, OSError, zlib.error):
        return False
    return path.stat().st_size > 0


def _post(client: httpx.Client, url: str, body: dict[str, Any]) -> None:
    try:
        answer = client.post(url, json=body)
    except httpx.HTTPError as error:
        raise EngineError(f"{url}: {error!r}", "is the engine still running?") from None
    if answer.status_code != 200:
        raise EngineError(f"{url}: status {answer.status_code}: {answer.text[:300]}", "see the engine's log")
