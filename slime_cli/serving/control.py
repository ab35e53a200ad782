"""Requests in flight stand still, continue or end, on a list of engines by their own endpoints. Torch-free.

The router does not pass these on, so each engine is asked itself. Every function can be called again with the same
effect as once, asks all engines even when one fails, and raises EngineError that names those that did. All of them
block.

What stock SGLang (0.5.16) does, measured in ``tests/end_to_end/test_engine_control.py``:

* :func:`pause` keeps requests in the engine, at the token where they were. Requests that arrive later wait at its door.
  Weights can change meanwhile, but the cache cannot be flushed: an update with ``flush_cache`` ends an engine that
  has requests. After :func:`resume` they continue with the new weights over the keys and values of the old ones.
* :func:`abort_all` ends every request at the next token, with what it has generated. A paused engine ends its requests
  only when it is resumed, and those at its door are not ended at all.
* :func:`slime_cli.engine_api.flush` empties the prefix cache of an engine without requests. The cache serves every
  later request with the same prefix, whichever weights made it: after a change of weights, flush as soon as nothing is
  in flight.
"""

from collections.abc import Sequence
from typing import Literal

from slime_cli import engine_api

TIMEOUT = 120.0
Mode = Literal["in_place", "retract"]
"""``retract`` gives the requests' memory back, and computes their keys and values anew, with the weights at
that time."""


def pause(urls: Sequence[str], mode: Mode = "in_place") -> None:
    """Returns when every engine stands still: none of them generates a token before :func:`resume`. Tokens may still be
    on their way through its processes; they get the name of the weights where they arrive."""

    def one(url: str) -> None:
        engine_api.require(url, "/pause_generation", {"mode": mode}, TIMEOUT)
        # That answer comes before the scheduler has read the message. It reads in order, and answers this when it has.
        engine_api.get(url, "/server_info", TIMEOUT)

    engine_api.each(urls, one)


def resume(urls: Sequence[str]) -> None:
    """Requests that stand still continue, those at the door are let in. Nothing happens to an engine that is not
    paused."""
    engine_api.each(urls, lambda url: engine_api.require(url, "/continue_generation", {}, TIMEOUT))


def abort_all(urls: Sequence[str]) -> None:
    """Every request in the engines ends with ``finish_reason`` abort and the tokens that it has, soon after."""
    engine_api.each(urls, lambda url: engine_api.require(url, "/abort_request", {"abort_all": True}, TIMEOUT))
