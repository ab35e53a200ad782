"""Who has the devices: engines and trainer in turn (``--offload-train``, ``--offload-rollout``).

    engines generate                 trainer trains                      weights change
    engines: all                     engines: nothing                    engines: weights
    trainer: nothing                 trainer: all                        trainer: weights

    generate --train()--> train --sync()--> weights change --generate()--> generate

One a run, driven by :mod:`slime_cli.loop.phase` in the synchronous schedule. Between train() and generate() nothing is
sent to the engines. Weights come before the sync and the cache after it, when the trainer's weights have left: so what
is on a device at once is the trainer alone, both sides' weights, or the engines alone. What nobody asked to offload
stays where it is. On a CPU the states and their order are the same; the host's memory is the only one, so no bytes
move.
"""

import asyncio
import contextlib
import enum
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from slime_cli.rollout.client import Hold, RouterClient
from slime_cli.serving.occupation import ALL, WEIGHTS, Occupation

STATE = ("gradients", "optimizer")
"""Parts of the trainer that only training needs."""


class Learner(Protocol):
    """The trainer's ranks, as far as their memory goes."""

    def offload(self, parts: Sequence[str]) -> None: ...
    def onload(self, parts: Sequence[str]) -> None: ...


class Turn(enum.Enum):
    """The state that devices are in."""

    GENERATE = "generate"
    TRAIN = "train"
    SYNC = "sync"


class Turns:
    """``occupation``: the engines', with ``--offload-rollout``; ``learner``: with ``--offload-train``. The run begins
    in TRAIN, with engines that have not started or that :meth:`rest` has sent away."""

    def __init__(
        self, learner: Learner | None, occupation: Occupation | None, span: Callable[..., Any] = contextlib.nullcontext
    ) -> None:
        self.learner = learner
        self.occupation = occupation
        self.span = span
        self.turn = Turn.TRAIN
        self._away: set[str] = set()
        """Parts of the trainer."""
        self._held = contextlib.AsyncExitStack()

    @property
    def taken(self) -> bool:
        """There is something to offload, so the two sides take turns."""
        return self.learner is not None or self.occupation is not None

    async def rest(self, client: RouterClient) -> None:
        """Engines that have just started, or that the phase before ended with, rest until the first :meth:`sync`. The
        trainer of a phase is new, and whole."""
        self._away.clear()
        if self.turn is Turn.GENERATE or self.occupation is not None and not self.occupation.away:
            await self._hold(client)
            await self._release(ALL)
        self.turn = Turn.TRAIN

    async def train(self, client: RouterClient, *, new_weights: bool = True) -> None:
        """Before a rollout is trained. ``new_weights``: the engines get some afterwards; else they keep their own,
        which nobody could give them again. Raises RuntimeError in any state but GENERATE."""
        if not self.taken:
            return
        self._move(Turn.GENERATE, Turn.TRAIN)
        await self._hold(client)
        await self._release(ALL if new_weights else [tag for tag in ALL if tag != WEIGHTS])
        await self._onload(sorted(self._away))

    async def sync(self) -> None:
        """Before a version is sent: it is written, or lies in the trainer's weights. Raises RuntimeError in any state
        but TRAIN."""
        if not self.taken:
            return
        self._move(Turn.TRAIN, Turn.SYNC)
        await self._offload(STATE)
        if self.occupation is not None and WEIGHTS in self.occupation.away:
            await self._resume([WEIGHTS])

    async def generate(self) -> None:
        """After a version is in the engines, or where none is due. Raises RuntimeError while their weights are away."""
        if not self.taken:
            return
        if self.turn is Turn.TRAIN and self.occupation is not None and WEIGHTS in self.occupation.away:
            raise RuntimeError("engines have no weights to generate with: sync() comes before generate()")
        self._move(self.turn if self.turn is not Turn.GENERATE else Turn.SYNC, Turn.GENERATE)
        await self._offload([*STATE, "weights"])
        if self.occupation is not None and self.occupation.away:
            await self._resume(sorted(self.occupation.away))
        await self._held.aclose()

    def _move(self, before: Turn, after: Turn) -> None:
        if self.turn is not before:
            raise RuntimeError(f"{after.value} comes after {before.value}, and it is the turn of {self.turn.value}")
        self.turn = after

    async def _hold(self, client: RouterClient) -> None:
        """Nothing is in the engines, and nothing is sent until the next :meth:`generate`."""
        await self._held.aclose()
        await self._held.enter_async_context(client.held(Hold.REQUESTS))
        await client.idle(Hold.REQUESTS)

    async def _release(self, tags: Collection[str]) -> None:
        if self.occupation is not None:
            with self.span("release"):
                await asyncio.to_thread(self.occupation.release, tags)

    async def _resume(self, tags: Collection[str]) -> None:
        assert self.occupation is not None
        with self.span("resume"):
            await asyncio.to_thread(self.occupation.resume, tags)

    async def _offload(self, parts: Sequence[str]) -> None:
        parts = [part for part in parts if part not in self._away]
        if self.learner is not None and parts:
            await asyncio.to_thread(self.learner.offload, parts)
            self._away.update(parts)

    async def _onload(self, parts: Sequence[str]) -> None:
        if self.learner is not None and parts:
            await asyncio.to_thread(self.learner.onload, parts)
            self._away.difference_update(parts)
