"""The engines' client over HTTP: how requests are spread, held and waited for while weights change, and streamed."""

import asyncio
import collections
import contextlib
import json

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from slime_cli.errors import EngineError
from slime_cli.manifests import layout
from slime_cli.rollout import client as client_module
from slime_cli.rollout.client import EndedError, Hold, RouterClient, ending


def answer(ids=(7, 8), **meta):
    scored = [[-0.5, token, None] for token in ids]
    return {
        "text": "x" * len(ids),
        "output_ids": list(ids),
        "meta_info": {
            "output_token_logprobs": scored,
            "finish_reason": {"type": "stop"},
            "completion_tokens": len(ids),
            **meta,
        },
    }


@contextlib.asynccontextmanager
async def served(handler, count=1, **options):
    """A client of ``count`` servers, the first of which is its router."""
    servers = [TestServer(web.Application()) for _ in range(count)]
    for server in servers:
        server.app.router.add_post("/generate", handler)
        await server.start_server()
    urls = [str(server.make_url("")).rstrip("/") for server in servers]
    client = RouterClient(urls[0], in_flight=8, **options)
    try:
        yield client, urls
    finally:
        await client.close()
        for server in servers:
            await server.close()


async def test_engines_are_asked_directly_and_evenly_when_the_router_would_drop_a_field():
    async def generate(request):
        asked.append(str(request.url.origin()))
        assert (await request.json())["return_routed_experts"]
        await asyncio.sleep(0.05)
        return web.json_response(answer())

    asked = []
    async with served(generate, 2) as (client, urls):
        client.engines = lambda: urls
        await asyncio.gather(*(client.generate({"return_routed_experts": True}) for _ in range(8)))
    assert sorted(collections.Counter(asked).values()) == [4, 4]


class Slow:
    """Answers when it is let."""

    def __init__(self):
        self.go = asyncio.Event()
        self.arrived = 0

    async def __call__(self, request):
        self.arrived += 1
        await self.go.wait()
        return web.json_response(answer())


async def settle():
    await asyncio.sleep(0.05)


@pytest.mark.parametrize("what", [Hold.CALLS, Hold.REQUESTS])
async def test_while_it_is_held_nothing_new_is_sent_and_what_is_in_flight_is_waited_for(what):
    engine = Slow()
    async with served(engine) as (client, _):
        first = asyncio.create_task(client.generate({}))
        await settle()
        async with client.held(what):
            idle = asyncio.create_task(client.idle(what))
            second = asyncio.create_task(client.generate({}))
            await settle()
            assert engine.arrived == 1 and not idle.done() and not second.done()
            engine.go.set()
            await asyncio.wait_for(asyncio.gather(first, idle), 5)
            await settle()
            assert engine.arrived == 1 and not second.done(), "until the hold ends"
        await asyncio.wait_for(second, 5)
    assert engine.arrived == 2


async def test_a_user_s_call_that_is_under_way_may_end_before_weights_change_and_a_new_one_waits():
    engine = Slow()
    engine.go.set()
    begun = []

    async def turns(client, name, pause):
        async with client.call():
            begun.append(name)
            await client.generate({})
            await pause.wait()
            await client.generate({})

    async with served(engine) as (client, _):
        pause = asyncio.Event()
        first = asyncio.create_task(turns(client, "first", pause))
        await settle()
        async with client.held(Hold.CALLS):
            second = asyncio.create_task(turns(client, "second", pause))
            idle = asyncio.create_task(client.idle(Hold.CALLS))
            await settle()
            assert begun == ["first"] and not idle.done()
            pause.set()
            await asyncio.wait_for(asyncio.gather(first, idle), 5)
            assert begun == ["first"]
        await asyncio.wait_for(second, 5)


async def test_requests_inside_a_call_wait_too_where_the_engines_stand_still():
    engine = Slow()
    engine.go.set()
    async with served(engine) as (client, _):
        async with client.call():
            async with client.held(Hold.REQUESTS):
                task = asyncio.create_task(client.generate({}))
                await asyncio.wait_for(client.idle(Hold.REQUESTS), 5)
                await settle()
                assert not task.done() and not engine.arrived
        await asyncio.wait_for(task, 5)


async def test_a_cancelled_request_is_not_waited_for():
    engine = Slow()
    async with served(engine) as (client, _):
        task = asyncio.create_task(client.generate({}))
        await settle()
        async with client.held(Hold.REQUESTS):
            task.cancel()
            await asyncio.wait_for(client.idle(Hold.REQUESTS), 5)
        engine.go.set()


async def test_what_waits_and_is_not_wanted_any_more_ends_with_the_hold_s_abort():
    """A rollout that has enough: requests that waited for a slot or for the hold, and a user's call, end at once."""
    engine, wanted = Slow(), [True]
    async with served(engine) as (client, _):
        client.slots = asyncio.Semaphore(1)

        async def ask(**params):
            with ending(lambda: not wanted[0]):
                return await client.generate({"sampling_params": params})

        async def call():
            with ending(lambda: not wanted[0]):
                async with client.call():
                    raise AssertionError("it is not wanted")

        sent, waits = asyncio.create_task(ask()), asyncio.create_task(ask(n=2))
        await settle()
        async with client.held(Hold.REQUESTS):
            later, called = asyncio.create_task(ask()), asyncio.create_task(call())
            beside = asyncio.create_task(client.generate({"sampling_params": {}}))  # an evaluation's: it waits
            await settle()
            assert engine.arrived == 1 and not waits.done() and not later.done() and not called.done()
            wanted[0] = False
            await client.abort()
            engine.go.set()  # as an engine ends what it was sent
            found = [await asyncio.wait_for(one, 5) for one in (sent, waits, later)]
            with pytest.raises(EndedError):
                await asyncio.wait_for(called, 5)
            assert engine.arrived == 1 and not beside.done()
        await asyncio.wait_for(beside, 5)
    assert [len(answers) for answers in found] == [1, 2, 1] and engine.arrived == 2
    assert all(one["output_ids"] == [] and one["meta_info"]["finish_reason"] == {"type": "abort"} for one in found[1])


async def test_who_holds_second_waits_for_the_first_and_the_end_of_the_one_does_not_end_the_other():
    engine = Slow()
    engine.go.set()
    inside = []
    ends = {name: asyncio.Event() for name in ("weights", "surplus")}

    async def holds(client, name):
        async with client.held(Hold.REQUESTS):
            inside.append(name)
            await ends[name].wait()

    async with served(engine) as (client, _):
        first = asyncio.create_task(holds(client, "weights"))
        second = asyncio.create_task(holds(client, "surplus"))
        await settle()
        request = asyncio.create_task(client.generate({}))
        await settle()
        assert inside == ["weights"] and not engine.arrived
        ends["weights"].set()
        await first
        await settle()
        assert inside == ["weights", "surplus"]
        ends["surplus"].set()
        await asyncio.wait_for(asyncio.gather(second, request), 5)


def chunks(incremental):
    """Three chunks of one, two and one tokens, by two versions."""
    out = []
    ids = [5, 6, 7, 8]
    for done, upto, version in ((0, 1, "v1"), (1, 3, "v1"), (3, 4, "v2")):
        part = ids[done:upto] if incremental else ids[:upto]
        piece = answer(part, weight_version=version, completion_tokens=upto)
        piece["meta_info"]["finish_reason"] = {"type": "stop"} if upto == 4 else None
        out.append(piece)
    return out


@pytest.mark.parametrize("incremental", [True, False])
async def test_a_streamed_answer_comes_in_pieces_of_their_own_tokens(incremental):
    async def generate(request):
        assert (await request.json())["stream"] is True
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in chunks(incremental):
            await response.write(b"data: " + json.dumps(piece).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async with served(generate, streams=True) as (client, _):
        pieces = await client.stream({})
    assert [piece["output_ids"] for piece in pieces] == [[5], [6, 7], [8]]
    for piece in pieces:
        assert [entry[1] for entry in piece["meta_info"]["output_token_logprobs"]] == piece["output_ids"]
    assert [piece["meta_info"]["weight_version"] for piece in pieces] == ["v1", "v1", "v2"]


async def test_quiet_waits_for_pieces_that_are_on_their_way(monkeypatch):
    async def generate(request):
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in chunks(True)[:-1]:
            await response.write(b"data: " + json.dumps(piece).encode() + b"\n\n")
            sent.append(1)
            await asyncio.sleep(0.1)
        await go.wait()
        await response.write(b"data: " + json.dumps(chunks(True)[-1]).encode() + b"\n\n")
        return response

    monkeypatch.setattr(client_module, "QUIET", 0.5)
    sent, go = [], asyncio.Event()
    async with served(generate, streams=True) as (client, _):
        await asyncio.wait_for(client.quiet(), 0.2)  # nothing is in flight
        task = asyncio.create_task(client.stream({}))
        while not sent:
            await asyncio.sleep(0.01)
        await client.quiet()
        assert len(sent) == 2 and not task.done(), "both pieces came, and the third only when the engine continues"
        go.set()
        assert len(await task) == 3


async def test_a_stream_that_breaks_off_is_asked_for_again(monkeypatch):
    async def generate(request):
        asked.append(1)
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in chunks(True)[: 1 if len(asked) == 1 else 3]:
            await response.write(b"data: " + json.dumps(piece).encode() + b"\n\n")
        return response

    asked = []
    async with served(generate, streams=True) as (client, _):
        pieces = await client.stream({})
    assert len(pieces) == 3 and len(asked) == 2 and client.retries == 1


async def test_a_refusal_ends_at_once_and_a_dead_fleet_at_the_first_retry():
    async def refuse(request):
        return web.Response(status=400, text="no such field")

    async def broken(request):
        return web.Response(status=503, text="no worker")

    def dead():
        raise EngineError("engine 0 ended with code -9")

    async with served(refuse) as (client, _):
        with pytest.raises(EngineError, match="refused a request: 400 no such field"):
            await client.generate({})
    async with served(broken, alive=dead) as (client, _):
        with pytest.raises(EngineError, match="engine 0 ended with code -9"):
            await client.generate({})


async def test_every_request_names_the_adapter_and_one_for_several_answers_becomes_several():
    async def generate(request):
        asked.append(await request.json())
        return web.json_response(answer(weight_version="v000004"))

    asked = []
    async with served(generate) as (client, _):
        client.adapter = layout.adapter_name("v000004", "0123456789")
        found = await client.generate({"sampling_params": {"n": 3, "temperature": 1.0}})
    assert [one["meta_info"]["weight_version"] for one in found] == ["v000004"] * 3
    assert asked == [{"sampling_params": {"n": 1, "temperature": 1.0}, "lora_path": "v000004-01234567"}] * 3


@pytest.mark.parametrize("ask", ["generate", "stream"])
async def test_an_answer_of_another_version_than_the_adapter_s_is_an_error(ask):
    async def generate(request):
        found = answer(weight_version="v000002")
        if (await request.json()).get("stream"):
            return web.Response(body=b"data: " + json.dumps(found).encode() + b"\n\ndata: [DONE]\n\n")
        return web.json_response(found)

    async with served(generate) as (client, _):
        client.adapter = layout.adapter_name("v000004", "0123456789")
        with pytest.raises(EngineError, match="asked for adapter v000004-01234567 and names version 'v000002'"):
            await getattr(client, ask)({"sampling_params": {}})
