"""The rollout stage on genuine engines: against the same requests sent straight to one of them, and partial rollouts on
against off where lengths have a long tail.
"""

import asyncio
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import aiohttp

from slime_cli.buffer.buffer import DataBuffer
from slime_cli.buffer.gate import Gate
from slime_cli.buffer.journal import Journal
from slime_cli.buffer.sources.base import PromptSource
from slime_cli.buffer.sources.open import open_source
from slime_cli.manifests import Endpoint, layout
from slime_cli.options.resolve import Resolved, args_namespace, resolve
from slime_cli.rewards.rewards import RewardPool
from slime_cli.rollout.chat import Renderer, RenderOptions
from slime_cli.rollout.client import RouterClient
from slime_cli.rollout.collector import Collector
from slime_cli.rollout.generate import Generator
from slime_cli.serving import control
from slime_cli.serving.engine import Engine
from slime_cli.serving.fleet import Fleet

SAMPLES = 4
URI = "reasoning-gym:basic_arithmetic?size=5000"
IN_FLIGHT = 512

PROMPTS = 64
ROUNDS = 5
TOKENS = 64

TAIL_PROMPTS = 12
TAIL_WARM_UP = 2
"""Rollouts until as much is continued as is given back."""
TAIL_ROLLOUTS = 6
TAIL_TOKENS = 384
STOPS = range(10, 310, 50)
"""Tokens that end an answer. A model with random weights draws one of them at a rate, so that lengths are geometric:
the longest of a rollout is several times their mean."""

Measured = dict[str, float]


def measured(model: str, folder: pathlib.Path, say: Callable[[str], None]) -> tuple[Measured, Measured]:
    """Tokens a second through the stage and straight to the engine; with partial rollouts and without. Each with its
    ratio."""
    short = options(model, folder, PROMPTS, f"--rollout-max-response-len {TOKENS}")
    stops = " ".join(map(str, STOPS))
    tail = options(
        model, folder, TAIL_PROMPTS, f"--rollout-max-response-len {TAIL_TOKENS} --rollout-stop-token-ids {stops}"
    )
    fleet = Fleet(short, model, folder, Engine, say)
    try:
        endpoint = fleet.wait_healthy()
        return asyncio.run(_both(short, tail, endpoint, model, folder))
    finally:
        fleet.stop()


def options(model: str, folder: pathlib.Path, prompts: int, more: str) -> Resolved:
    return resolve(
        f"--hf-checkpoint {model} --prompt-data {URI} --rollout-batch-size {prompts} --n-samples-per-prompt {SAMPLES}"
        f" --num-rollout 1 --apply-chat-template --rm-type reasoning-gym --run-dir {folder} {more}".split()
    )


async def _both(
    short: Resolved, tail: Resolved, endpoint: Endpoint, model: str, folder: pathlib.Path
) -> tuple[Measured, Measured]:
    urls = [engine.url for engine in endpoint.engines]
    client = RouterClient(endpoint.router_url, IN_FLIGHT, abort=lambda: control.abort_all(urls))
    try:
        async with RewardPool.from_args(args_namespace(short)) as rewards:
            stage = Stage(model, folder, client, rewards, endpoint)
            return await stage.against_the_engine(short), await stage.partial(tail)
    finally:
        await client.close()


class Stage:
    """The rollout stage as the loop has it, over an endpoint."""

    def __init__(
        self, model: str, folder: pathlib.Path, client: RouterClient, rewards: RewardPool, endpoint: Endpoint
    ) -> None:
        self.folder = folder
        self.client = client
        self.rewards = rewards
        self.urls = [engine.url for engine in endpoint.engines]
        self.renderer = Renderer(model, RenderOptions(apply_chat_template=True))
        self.source = open_source(URI)

    def collector(self, name: str, options: Resolved, *, burst: int, keep_partial: bool) -> Collector:
        """With a buffer of its own."""
        batch = options.slime.rollout_batch_size
        folder = self.folder / name
        buffer = DataBuffer(
            Journal(folder / layout.JOURNAL),
            self.source,
            folder=folder,
            samples_per_prompt=SAMPLES,
            shuffle=False,
            seed=0,
            render=self.renderer.prompt,
            gate=Gate(batch, None),
        )
        generator = Generator(args_namespace(options), self.client, self.rewards)
        return Collector(
            generator,
            buffer,
            self.client,
            batch=batch,
            burst=burst,
            slots=IN_FLIGHT // SAMPLES,
            keep_partial=keep_partial,
        )

    async def against_the_engine(self, options: Resolved) -> Measured:
        """In turns; medians."""
        collector = self.collector("stage", options, burst=PROMPTS, keep_partial=False)
        params = collector.generator.sampling_params()
        rates: dict[str, list[float]] = {"stage": [], "direct": []}
        for i in range(ROUNDS + 1):
            stage = await _rate(collector, i)
            direct = await self._direct(params, self.source, i)
            if i:  # the first round warms both up
                rates["stage"].append(stage[0] / stage[1])
                rates["direct"].append(direct)
        found = {name: statistics.median(values) for name, values in rates.items()}
        return {"ratio": found["stage"] / found["direct"]} | found

    async def partial(self, options: Resolved) -> Measured:
        """In turns; all tokens that were trained over all seconds, since what one rollout begins another one trains."""
        ways = {
            "on": self.collector("on", options, burst=2 * TAIL_PROMPTS, keep_partial=True),
            "off": self.collector("off", options, burst=TAIL_PROMPTS, keep_partial=False),
        }
        tokens = dict.fromkeys(ways, 0)
        seconds = dict.fromkeys(ways, 0.0)
        for i in range(TAIL_WARM_UP + TAIL_ROLLOUTS):
            for name, collector in ways.items():
                made, took = await _rate(collector, i)
                if i >= TAIL_WARM_UP:
                    tokens[name] += made
                    seconds[name] += took
        found = {name: tokens[name] / seconds[name] for name in ways}
        return {"ratio": found["on"] / found["off"]} | found

    async def _direct(self, params: dict[str, Any], source: PromptSource, round_: int) -> float:
        """Other prompts of the same kind, straight to the engine, nothing checked or kept."""
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=IN_FLIGHT), timeout=aiohttp.ClientTimeout(total=None)
        ) as http:

            async def one(i: int) -> int:
                rendered = self.renderer.prompt(source[2500 + round_ * PROMPTS + i])
                assert rendered is not None, "no prompt of this source is too long"
                sampling = params | {"n": SAMPLES}
                body = {"input_ids": rendered.tokens, "sampling_params": sampling, "return_logprob": True}
                async with http.post(self.urls[0] + "/generate", json=body) as answer:
                    answers = await answer.json()
                return sum(len(a["output_ids"]) for a in answers)

            start = time.perf_counter()
            counts = await asyncio.gather(*(one(i) for i in range(PROMPTS)))
            return sum(counts) / (time.perf_counter() - start)


async def _rate(collector: Collector, rollout_id: int) -> tuple[int, float]:
    """Response tokens of a rollout's batch, and the seconds that it took from the first lease to the file on disk."""
    start = time.perf_counter()
    batch = await collector.take(rollout_id)
    return sum(sample.response_length for sample in batch.samples), time.perf_counter() - start
