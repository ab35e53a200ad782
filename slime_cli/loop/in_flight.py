"""Requests in flight while the engines' weights change: finished, standing still, or cut off (``--in-flight``).

Called by :mod:`slime_cli.loop.phase` around every publish. Invariant: inside :func:`interrupted` no request is sent and
no token is generated; after it, engines generate again, whatever the publish ended in.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from slime_cli.rollout.client import Hold, RouterClient
from slime_cli.rollout.concurrent import to_its_end
from slime_cli.serving import control


@contextlib.asynccontextmanager
async def interrupted(
    client: RouterClient,
    policy: str,
    urls: Callable[[], list[str]],
    idle: Callable[[Hold], Awaitable[None]] | None = None,
) -> AsyncIterator[None]:
    """``policy``: drain, pause or abort. ``urls``: of the engines that are alive; may block. ``idle``: the client's, or
    what waits for it with a limit."""
    what = Hold.CALLS if policy == "drain" else Hold.REQUESTS
    async with client.held(what):
        if policy == "pause":
            try:
                await to_its_end(lambda: control.pause(urls(), "retract"))
                await client.quiet()
                yield
            finally:
                await asyncio.to_thread(lambda: control.resume(urls()))
            return
        if policy == "abort":
            await client.abort()
        await (idle or client.idle)(what)
        yield
