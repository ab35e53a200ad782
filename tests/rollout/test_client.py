"""What an engine's answer must have before a sample is made of it."""

import asyncio
import base64
import collections

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from slime_cli.buffer.types import Sample, Status
from slime_cli.errors import EngineError
from slime_cli.rollout.client import RouterClient, fill, fill_routed_experts

SHAPE = [3, 2]


def answer(ids=(7, 8), **meta):
    scored = [[-0.5, token, None] for token in ids]
    return {
        "text": "x",
        "output_ids": list(ids),
        "meta_info": {"output_token_logprobs": scored, "finish_reason": {"type": "stop"}, **meta},
    }


def filled(**meta) -> tuple[Sample, dict]:
    sample = Sample(index=4, group_index=0)
    found = answer(**meta)
    fill(sample, [1, 2, 3], found)
    return sample, found


def encoded(chosen: np.ndarray) -> str:
    return base64.b64encode(chosen.astype("<i4").tobytes()).decode()


def test_tokens_and_log_probs_are_those_of_the_answer():
    sample, _ = filled()
    assert (
        sample.tokens == [1, 2, 3, 7, 8]
        and sample.rollout_log_probs == [-0.5, -0.5]
        and sample.status is Status.COMPLETED
    )


def test_an_answer_without_all_log_probs_is_refused():
    found = answer()
    found["meta_info"]["output_token_logprobs"].pop()
    with pytest.raises(EngineError, match="2 tokens but log-probabilities for 1"):
        fill(Sample(index=4, group_index=0), [1], found)


def test_chosen_experts_are_kept_token_by_token():
    chosen = np.arange(4 * 6).reshape(4, *SHAPE)
    sample, found = filled(routed_experts=encoded(chosen))
    fill_routed_experts(sample, found, SHAPE)
    sample.check()
    assert sample.routed_experts_shape == SHAPE
    assert (np.frombuffer(sample.rollout_routed_experts, "<i2").reshape(4, *SHAPE) == chosen).all()


@pytest.mark.parametrize(
    "meta, said",
    [
        ({}, "does not say which experts"),
        ({"routed_experts": encoded(np.zeros((3, *SHAPE)))}, "18 chosen experts for 5 tokens"),
        ({"routed_experts": encoded(np.full((4, *SHAPE), -1))}, "24 chosen experts"),
    ],
)
def test_missing_or_ill_fitting_experts_are_refused(meta, said):
    sample, found = filled(**meta)
    with pytest.raises(EngineError, match=said):
        fill_routed_experts(sample, found, SHAPE)


async def test_engines_are_asked_directly_and_evenly_when_the_router_would_drop_a_field():
    async def generate(request):
        asked.append(str(request.url.origin()))
        assert (await request.json())["return_routed_experts"]
        await asyncio.sleep(0.05)
        return web.json_response(answer())

    asked = []
    servers = [TestServer(web.Application()) for _ in range(2)]
    for server in servers:
        server.app.router.add_post("/generate", generate)
        await server.start_server()
    client = RouterClient("http://127.0.0.1:9", in_flight=8)
    client.engines = lambda: [str(server.make_url("")).rstrip("/") for server in servers]
    await asyncio.gather(*(client.generate({"return_routed_experts": True}) for _ in range(8)))
    await client.close()
    for server in servers:
        await server.close()
    assert sorted(collections.Counter(asked).values()) == [4, 4]
