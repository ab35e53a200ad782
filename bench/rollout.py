"""The rollout stage against the same requests sent straight to the engine, on genuine engines."""

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
from slime_cli.manifests import Endpoint
from slime_cli.options.resolve import Resolved, args_namespace, resolve
from slime_cli.rewards.rewards import RewardPool
from slime_cli.rollout.chat import Renderer, RenderOptions
from slime_cli.rollout.client import RouterClient
from slime_cli.rollout.collector import Collector
from slime_cli.rollout.generate import Generator
from slime_cli.serving.engine import Engine
from slime_cli.serving.fleet import Fleet

PROMPTS = 64
ROUNDS = 5
TOKENS = 64
URI = "reasoning-gym:basic_arithmetic?size=5000"


def ratio(model: str, folder: pathlib.Path, say: Callable[[str], None]) -> dict[str, float]:
    """Tokens a second of both ways, in turns; the ratio of the medians."""
    options = resolve(
        f"--hf-checkpoint {model} --prompt-data {URI} --rollout-batch-size {PROMPTS} --n-samples-per-prompt 4"
        f" --num-rollout 1 --rollout-max-response-len {TOKENS} --apply-chat-template --rm-type reasoning-gym --run-dir"
        f" {folder}".split()
    )
    fleet = Fleet(options, model, folder, Engine, say)
    try:
        endpoint = fleet.wait_healthy()
        return asyncio.run(_measure(options, endpoint, model, folder))
    finally:
        fleet.stop()


async def _measure(options: Resolved, endpoint: Endpoint, model: str, folder: pathlib.Path) -> dict[str, float]:
    args = args_namespace(options)
    renderer = Renderer(model, RenderOptions(apply_chat_template=True))
    source = open_source(URI)
    buffer = DataBuffer(
        Journal(folder / "journal.sqlite"),
        source,
        folder=folder,
        samples_per_prompt=4,
        shuffle=False,
        seed=0,
        render=renderer.prompt,
        gate=Gate(PROMPTS, None),
    )
    client = RouterClient(endpoint.router_url, 512)
    rates = {"stage": [], "direct": []}
    async with RewardPool.from_args(args) as rewards:
        generator = Generator(args, client, rewards)
        collector = Collector(
            generator,
            buffer,
            client,
            batch=PROMPTS,
            burst=PROMPTS,
            slots=PROMPTS,
            keep_partial=False,
            abort=lambda: None,
        )
        for i in range(ROUNDS + 1):
            start = time.perf_counter()
            batch = await collector.take(i)
            stage = sum(s.response_length for s in batch.samples) / (time.perf_counter() - start)
            direct = await _direct(endpoint.engines[0].url, generator.sampling_params(), renderer, source, i)
            if i:  # the first round warms both up
                rates["stage"].append(stage)
                rates["direct"].append(direct)
    await client.close()
    stage, direct = (statistics.median(rates[k]) for k in ("stage", "direct"))
    return {"ratio": stage / direct, "stage": stage, "direct": direct}


async def _direct(url: str, params: dict[str, Any], renderer: Renderer, source: PromptSource, round_: int) -> float:
    """Other prompts of the same kind, straight to the engine, nothing checked or kept."""
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=512), timeout=aiohttp.ClientTimeout(total=None)
    ) as http:

        async def one(i: int) -> int:
            rendered = renderer.prompt(source[2500 + round_ * PROMPTS + i])
            assert rendered is not None, "no prompt of this source is too long"
            body = {"input_ids": rendered.tokens, "sampling_params": params | {"n": 4}, "return_logprob": True}
            async with http.post(url + "/generate", json=body) as answer:
                answers = await answer.json()
            return sum(len(a["output_ids"]) for a in answers)

        start = time.perf_counter()
        counts = await asyncio.gather(*(one(i) for i in range(PROMPTS)))
        return sum(counts) / (time.perf_counter() - start)
