"""The memory that engines occupy on the devices, given back and taken again part by part (``--offload-rollout``).

By their own endpoints, ``/release_memory_occupation`` and ``/resume_memory_occupation``, with the tags below; an engine
that is started with ``--enable-memory-saver`` keeps its addresses, CUDA graphs included, and gives the memory behind
them away. Stock SGLang (0.5.16) ends by an assertion when it is asked while a request is in it, or for a part that it
has not given away: so the order is kept here, and anything else is refused before an engine hears of it. On a CPU
engines answer alike and give nothing back. Torch-free; every function blocks.
"""

from collections.abc import Callable, Collection, Sequence

from slime_cli import engine_api

WEIGHTS = "weights"
CACHE = "kv_cache"
GRAPHS = "cuda_graph"
ALL = (CACHE, WEIGHTS, GRAPHS)
TIMEOUT = 300.0

_GIB = 2**30


def occupied(urls: Sequence[str]) -> list[dict[str, int]]:
    """Bytes of the devices by part, ``weights``, ``kv_cache`` and ``cuda_graph``, as each engine tells of one of its
    ranks; nothing for one that does not tell. Raises EngineError for one that does not answer."""

    def one(url: str) -> dict[str, int]:
        states = engine_api.get(url, "/server_info").get("internal_states") or [{}]
        told = states[0].get("memory_usage") or {}
        names = {"weight": WEIGHTS, "kvcache": CACHE, "graph": GRAPHS}
        return {name: int(told[key] * _GIB) for key, name in names.items() if key in told}

    return engine_api.each(urls, one)


class Occupation:
    """That of a run's engines, all alike. ``urls``: those that are alive."""

    def __init__(self, urls: Callable[[], Sequence[str]]) -> None:
        self.urls = urls
        self.away: frozenset[str] = frozenset()
        """Parts whose memory the engines have given back. An engine whose weights are among them has lost them."""

    def release(self, tags: Collection[str]) -> None:
        """Every engine gives the memory of these parts back. Raises EngineError for one with requests in it, and
        RuntimeError for a part that is away."""
        if again := self.away & {*tags}:
            raise RuntimeError(f"engines are to give back {_list(again)}, which they have given back")
        urls = self.urls()
        engine_api.each(urls, engine_api.flush)  # which an engine with requests refuses
        self._ask(urls, "/release_memory_occupation", tags)
        self.away |= {*tags}

    def resume(self, tags: Collection[str]) -> None:
        """Every engine has memory for these parts again. Weights are whatever lies there until a version is loaded, so
        they come first: raises RuntimeError for a cache before them, and for a part that is not away."""
        if there := {*tags} - self.away:
            raise RuntimeError(f"engines are to take {_list(there)} again, which they have")
        if WEIGHTS in self.away and {*tags} != {WEIGHTS}:
            raise RuntimeError("engines take their weights again before anything else")
        self._ask(self.urls(), "/resume_memory_occupation", tags)
        self.away -= {*tags}

    def _ask(self, urls: Sequence[str], path: str, tags: Collection[str]) -> None:
        body = {"tags": sorted(tags)}
        engine_api.each(urls, lambda url: engine_api.require(url, path, body, TIMEOUT))


def _list(tags: Collection[str]) -> str:
    return ", ".join(sorted(tags))
