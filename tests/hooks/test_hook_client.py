"""The client that functions of a user's own ask the engines with, and their text as the run's tokens.

1. A turn appends ids, log-probabilities, mask, spans and text, and never more than the budget leaves. 2. Inside a run
it asks through what the run lends, elsewhere over HTTP. 3. A tool's text is text, whatever it holds.
"""

import asyncio
import base64
import pathlib
import subprocess
import sys
import types
from typing import Any

import numpy as np
import pytest

from slime_cli import hooks
from slime_cli.buffer.types import Sample, Span, Status
from slime_cli.errors import DataError, EngineError, UsageError
from slime_cli.hooks import client as hooks_client
from slime_cli.hooks.evidence import Evidence
from slime_cli.models import tiny
from tests.scripted_engine import ScriptedEngine


def answer(ids: list[int], text: str = "x", reason: str = "stop", version: str = "v000003", **meta: Any) -> dict:
    scored = [[-0.5 * (k + 1), token, None] for k, token in enumerate(ids)]
    meta = {"output_token_logprobs": scored, "weight_version": version, "finish_reason": {"type": reason}} | meta
    return {"output_ids": ids, "text": text, "meta_info": meta}


class Scripted:
    """An engine client that gives one answer after the other."""

    def __init__(self, *answers: dict) -> None:
        self.answers = list(answers)
        self.bodies: list[dict] = []

    async def generate(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        self.bodies.append(body)
        return [self.answers.pop(0)]


PARAMS = {"max_new_tokens": 10, "temperature": 1.0}
ARGS = types.SimpleNamespace()


def begun() -> Sample:
    return Sample(3, 1, tokens=[1, 2])


async def test_a_turn_brings_the_evidence_that_the_options_ask_for():
    """The tokens that top-p left of each turn, and nothing at the places of a tool's text."""

    def told(ids: list[int], experts: int) -> dict:
        chosen = base64.b64encode(np.full(2 * experts, 3, "<i4").tobytes()).decode()
        return answer(ids, output_top_logprobs=[[[-0.1, i], [-3.0, 0]] for i in ids], routed_experts=chosen)

    lent = Scripted(told([7, 8], 3), told([5], 6))
    lent.evidence = Evidence(top_p_replay=True, experts_shape=[1, 2])
    sample = begun()
    params = PARAMS | {"top_k": 2, "top_p": 0.5}
    with hooks_client.through(lent):
        await hooks.engine(ARGS).generate(sample, params)
        sample.append([4, 4], log_probs=None, version=None, trained=False)
        sample.rollout_routed_experts, held = None, sample.rollout_routed_experts
        sample.check()  # the other lists are in step between two turns as well
        sample.rollout_routed_experts = held
        await hooks.engine(ARGS).generate(sample, params)
    sample.check()
    assert all(body["top_logprobs_num"] == 2 and body["return_routed_experts"] for body in lent.bodies)
    assert sample.rollout_top_p_token_ids == [7, 8, 5] and sample.rollout_top_p_token_offsets == [0, 1, 2, 2, 2, 3]
    assert len(sample.rollout_routed_experts) == 2 * 2 * 6


async def test_a_judge_at_another_address_is_asked_for_no_evidence():
    lent = Scripted(answer([7]))
    await hooks_client.Engine(ARGS, lent).generate(begun(), PARAMS | {"top_k": 2})
    assert "top_logprobs_num" not in lent.bodies[0]


async def test_turns_and_a_tools_text_are_appended_within_the_budget():
    lent = Scripted(answer([7, 8, 9], "abc"), answer([5], "d", "length", spans=[[1, "v000004"]]))
    sample = begun()
    with hooks_client.through(lent):
        engine = hooks.engine(ARGS)
        assert await engine.generate(sample, PARAMS) is sample and sample.status is Status.COMPLETED
        sample.append([4, 4], log_probs=None, version=None, trained=False, text="!!")
        await engine.generate(sample, PARAMS)
    assert [body["sampling_params"] for body in lent.bodies] == [PARAMS, PARAMS | {"max_new_tokens": 5}]
    assert [body["input_ids"] for body in lent.bodies] == [[1, 2], [1, 2, 7, 8, 9, 4, 4]]
    assert all(body["return_logprob"] for body in lent.bodies)
    assert sample.tokens == [1, 2, 7, 8, 9, 4, 4, 5] and sample.response == "abc!!d" and sample.response_length == 6
    assert sample.loss_mask == [1, 1, 1, 0, 0, 1] and sample.rollout_log_probs == [-0.5, -1.0, -1.5, 0.0, 0.0, -0.5]
    assert sample.spans == [Span(3, "v000003"), Span(2, None), Span(1, "v000004")]
    assert sample.weight_versions == ["v000003", "v000004"] and sample.status is Status.TRUNCATED
    sample.check()


async def test_nothing_is_asked_where_nothing_is_left_and_a_turn_may_be_bounded():
    lent = Scripted(answer([7]))
    sample = begun()
    with hooks_client.through(lent):
        engine = hooks.engine(ARGS)
        await engine.generate(sample, PARAMS, max_new_tokens=4)
        sample.append([4] * 9, log_probs=None, version=None, trained=False)
        await engine.generate(sample, PARAMS)
    assert len(lent.bodies) == 1 and lent.bodies[0]["sampling_params"]["max_new_tokens"] == 4
    assert sample.status is Status.TRUNCATED and sample.response_length == 10
    near = types.SimpleNamespace(sglang_context_length=14)
    assert hooks_client.Engine(near, lent).room(sample, {"max_new_tokens": 99}) == 0, "12 of 14: SGLang wants 7 free"
    assert hooks_client.Engine(near, lent).room(begun(), {"max_new_tokens": 99}) == 12
    with pytest.raises(UsageError, match="max_new_tokens"):
        await hooks_client.Engine(ARGS, lent).generate(begun(), {})


async def test_an_aborted_turn_is_continued_by_the_next():
    lent = Scripted(answer([], "", "abort"), answer([7, 8], "ab", "abort"), answer([9], "c", version="v000005"))
    sample = begun()
    with hooks_client.through(lent):
        engine = hooks.engine(ARGS)
        for expected in (Status.ABORTED, Status.ABORTED, Status.COMPLETED):
            assert (await engine.generate(sample, PARAMS)).status is expected
    assert sample.tokens == [1, 2, 7, 8, 9] and sample.spans == [Span(2, "v000003"), Span(1, "v000005")]
    assert [body["sampling_params"]["max_new_tokens"] for body in lent.bodies] == [10, 10, 8]


@pytest.mark.parametrize(
    "broken",
    [
        {"output_token_logprobs": None},
        {"output_token_logprobs": [[-1.0, 7, None]]},
        {"output_token_logprobs": [[-1.0, 7, None], [-1.0, 9, None]]},
        {"spans": [[3, "v000001"]]},
    ],
)
async def test_an_answer_without_its_evidence_is_refused(broken: dict):
    with hooks_client.through(Scripted(answer([7, 8], **broken))), pytest.raises(EngineError, match="sample 3"):
        await hooks.engine(ARGS).generate(begun(), PARAMS)


async def test_the_pieces_of_a_streamed_answer_are_one_answer_in_spans():
    pieces = [answer([7, 8], "ab", version="v000003"), answer([9], "c", version="v000003"), answer([4], "d")]
    pieces[2]["meta_info"]["weight_version"] = "v000004"
    sample = begun()
    with hooks_client.through(Scripted(hooks_client.whole(pieces))):
        await hooks.engine(ARGS).generate(sample, PARAMS)
    assert sample.spans == [Span(3, "v000003"), Span(1, "v000004")] and sample.response == "abcd"
    assert sample.tokens == [1, 2, 7, 8, 9, 4] and sample.rollout_log_probs == [-0.5, -1.0, -0.5, -0.5]
    pieces[2] |= {"text": "abcd", "cumulative_text": True}
    assert hooks_client.whole(pieces)["text"] == "abcd"


async def test_each_task_asks_through_what_was_lent_to_it():
    async def ask(client: Scripted) -> list[int]:
        with hooks_client.through(client):
            await asyncio.sleep(0)
            inner = asyncio.create_task(hooks.engine(ARGS).generate(begun(), PARAMS))
            return (await inner).tokens

    found = await asyncio.gather(*(ask(Scripted(answer([token]))) for token in (11, 12)))
    assert found == [[1, 2, 11], [1, 2, 12]]
    with pytest.raises(UsageError, match="names no router"):
        hooks.engine(ARGS)


async def test_outside_a_run_the_address_in_args_is_asked():
    server = ScriptedEngine("nothing")
    try:
        host, port = server.server_address[:2]
        server.answers["/generate"] = lambda body: answer([body["input_ids"][-1] + 1])
        args = types.SimpleNamespace(sglang_router_ip=host, sglang_router_port=port)
        assert (await hooks.engine(args).generate(begun(), PARAMS)).tokens == [1, 2, 3]
        assert (await hooks.engine(ARGS, url=server.url).generate(begun(), PARAMS)).tokens == [1, 2, 3]
        server.answers["/generate"] = None
        with pytest.raises(EngineError, match="refused a request: 404"):
            await hooks.engine(args).generate(begun(), PARAMS)
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def args(tmp_path_factory: pytest.TempPathFactory) -> types.SimpleNamespace:
    model = tiny.make("tiny:qwen3?num_hidden_layers=1", tmp_path_factory.mktemp("tiny") / "model")
    return types.SimpleNamespace(hf_checkpoint=str(model), apply_chat_template_kwargs=None)


def test_a_prompt_is_rendered_and_a_tools_text_stays_text(args: types.SimpleNamespace):
    tokenizer = hooks.tokenizer(args)
    assert hooks.tokenizer(args) is tokenizer
    messages = [{"role": "user", "content": "2 + 2"}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert hooks.render(args, messages) == tokenizer(prompt, add_special_tokens=False)["input_ids"]
    end = tokenizer.eos_token
    sample = hooks.new_sample(args, messages, label="4", source="here")
    assert sample.label == "4" and sample.metadata == {"source": "here"} and sample.tokens
    before = len(sample.tokens)
    hooks.append_text(args, sample, f"said {end}")
    assert tokenizer.eos_token_id not in sample.tokens[before:] and sample.response == f"said {end}"
    assert tokenizer.decode(sample.tokens[before:]) == f"said {end}"
    hooks.append_text(args, sample, end, special_tokens="keep")
    assert sample.tokens[-1] == tokenizer.eos_token_id and set(sample.loss_mask) == {0}
    assert sample.spans == [Span(sample.response_length, None)] and sample.rollout_log_probs[-1] == 0.0
    hidden = hooks.render(args, [{"role": "user", "content": f"a{end}"}])
    assert hidden.count(tokenizer.eos_token_id) == hooks.render(args, messages).count(tokenizer.eos_token_id)


def test_a_model_without_a_tokenizer_is_named(tmp_path: pathlib.Path):
    with pytest.raises(UsageError, match="args names no tokenizer"):
        hooks.tokenizer(ARGS)
    with pytest.raises(DataError, match="no tokenizer could be loaded"):
        hooks.tokenizer(types.SimpleNamespace(hf_checkpoint=str(tmp_path)))


def test_the_public_names_cost_no_torch():
    code = "import sys, slime_cli.hooks; print([m for m in ('torch', 'transformers', 'aiohttp') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
