"""One answer after the other for one sample. Contracts:

1. what is trained is what was sampled: tokens, log-probabilities and versions of the answers, in their order;
2. an answer that this run aborts, at whichever token, continues inside the response budget that it began with;
3. an abort that this run did not ask for is left as it is;
4. an answer ends where it would have ended without the interruption: at a stop text, at the budget;
5. an engine's answer without evidence is refused.
"""

import asyncio
import base64
import dataclasses
import types

import numpy as np
import pytest

from slime_cli.buffer.types import Sample, Span, Status
from slime_cli.errors import EngineError
from slime_cli.hooks.evidence import Evidence
from slime_cli.rollout import client, turns
from slime_cli.rollout.turns import Asking

PROMPT = [1, 2, 3]
TEXT = "The sum is 12.</a> and more that nobody asked for"
FIRST = 100
"""Token 100 + i is character i of TEXT."""


def decode(tokens):
    return "".join(TEXT[token - FIRST] for token in tokens)


class Engine:
    """Answers TEXT, a token a character, as a stock engine does: up to ``stop`` or ``max_new_tokens``; the n-th request
    is aborted after ``aborts[n]`` tokens."""

    def __init__(self, aborts=(), *, ours=True, streams=False, version_of=lambda place: "v000001"):
        self.aborts = 0
        self.script = list(aborts)
        self.ours = ours
        self.streams = streams
        self.version_of = version_of
        self.bodies = []

    def _answer(self, body):
        self.bodies.append(body)
        params = body["sampling_params"]
        begun = len(body["input_ids"]) - len(PROMPT)
        budget = params["max_new_tokens"]
        assert budget > 0 and body["input_ids"] == [*PROMPT, *range(FIRST, FIRST + begun)]
        text = TEXT[begun : begun + budget]
        reason = "length"
        for stop in params.get("stop") or []:
            if stop in text:
                text = text[: text.index(stop) + len(stop)]
                reason = "stop"
        if self.script and (cut := self.script.pop(0)) is not None and cut < len(text):
            text = text[:cut]
            reason = "abort"
            self.aborts += self.ours
        return begun, text, reason

    def _piece(self, begun, text, reason):
        ids = [FIRST + begun + i for i in range(len(text))]
        scored = [[-float(i) / 100, i, None] for i in ids]
        meta = {"output_token_logprobs": scored, "weight_version": self.version_of(begun), "completion_tokens": 0}
        return {"text": text, "output_ids": ids, "meta_info": meta | {"finish_reason": reason and {"type": reason}}}

    async def generate(self, body):
        found = self._answer(body)
        return [self._piece(*found) for _ in range(body["sampling_params"].get("n", 1))]

    async def stream(self, body):
        begun, text, reason = self._answer(body)
        pieces = [self._piece(begun + i, c, None) for i, c in enumerate(text)] or [self._piece(begun, "", None)]
        pieces[-1]["meta_info"]["finish_reason"] = {"type": reason}
        return pieces


def ask(engine, *, budget=20, stop=None, ends=lambda: False, sample=None):
    asking = Asking(engine, PROMPT, {"max_new_tokens": budget, "stop": stop}, ends=ends, decode=decode)
    sample = sample or Sample(7, 0)
    done = asyncio.run(turns.answer(asking, sample))
    sample.check()
    return sample, done


def whole(length):
    return [*PROMPT, *range(FIRST, FIRST + length)]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("cuts", [[], [0], [1], [19], [0, 0, 1], [10, 0, 5], [1] * 19, [18, 1]])
def test_an_answer_that_was_aborted_continues_and_is_what_it_would_have_been(cuts, streams):
    engine = Engine(cuts, streams=streams)
    sample, done = ask(engine)
    assert done and sample.status is Status.TRUNCATED
    assert sample.tokens == whole(20) and sample.response == TEXT[:20] and sample.response_length == 20
    assert sample.rollout_log_probs == [-float(i) / 100 for i in sample.tokens[3:]]
    assert [body["sampling_params"]["max_new_tokens"] for body in engine.bodies] == [
        20 - sum(cuts[:i]) for i in range(len(cuts) + 1)
    ]
    assert sample.spans == [Span(20, "v000001")] and sample.loss_mask in (None, [1] * 20)


@pytest.mark.parametrize("cut", [0, 1, 7, 19])
def test_what_is_not_continued_now_is_continued_later_from_where_it_was(cut):
    sample, done = ask(Engine([cut]), ends=lambda: True)
    assert not done and sample.status is Status.ABORTED and sample.tokens == (whole(cut) if cut else whole(0))
    again, done = ask(Engine(version_of=lambda place: "v000002"), sample=sample)
    assert done and again.tokens == whole(20) and again.status is Status.TRUNCATED
    assert again.spans == [span for span in (Span(cut, "v000001"), Span(20 - cut, "v000002")) if span.length]


def test_an_abort_at_the_end_of_the_budget_is_a_truncated_answer():
    class Late(Engine):
        async def generate(self, body):
            (found,) = await super().generate(body)
            self.aborts += 1
            found["meta_info"]["finish_reason"] = {"type": "abort"}
            return [found]

    sample, done = ask(Late())
    assert done and sample.status is Status.TRUNCATED and len(sample.tokens) == 23


def test_an_abort_of_another_s_is_no_interruption():
    sample, done = ask(Engine([5], ours=False))
    assert done and sample.status is Status.ABORTED and sample.response_length == 5


STOP_AT = TEXT.index("</a>") + 4


@pytest.mark.parametrize("cut", [None, 0, 1, STOP_AT - 4, STOP_AT - 3, STOP_AT - 1])
def test_a_stop_text_across_an_interruption_still_ends_the_answer(cut):
    sample, done = ask(Engine([cut]), budget=40, stop=["zzz", "</a>"])
    assert done and sample.response == TEXT[:STOP_AT] and sample.status is Status.COMPLETED
    assert sample.tokens == whole(STOP_AT) and len(sample.rollout_log_probs) == STOP_AT
    assert sum(span.length for span in sample.spans) == STOP_AT


def test_streamed_answers_tell_the_version_of_every_token():
    engine = Engine(streams=True, version_of=lambda place: f"v{place // 8:06d}")
    sample, _ = ask(engine)
    assert sample.spans == [Span(8, "v000000"), Span(8, "v000001"), Span(4, "v000002")]
    assert sample.weight_versions == ["v000000", "v000001", "v000002"] and sample.oldest_step == 0


async def test_fresh_samples_of_a_group_are_one_request_and_begun_ones_have_their_own():
    engine = Engine([None, 5])
    samples = [Sample(i, 0) for i in range(4)]
    asking = Asking(engine, PROMPT, {"max_new_tokens": 20}, ends=lambda: True)
    asking.client.script = [4]
    cut_off = await turns.answer_all(asking, samples[:3])
    assert [s.index for s in cut_off] == [0, 1, 2] and len(engine.bodies) == 1
    cut_off = await turns.answer_all(asking, samples)
    assert not cut_off and [len(body["input_ids"]) - 3 for body in engine.bodies[1:]] == [4, 4, 4, 0]
    assert all(sample.tokens == whole(20) for sample in samples)


def test_only_the_last_version_is_trained_where_that_is_asked_for():
    sample = Sample(0, 0)
    sample.tokens = list(PROMPT)
    sample.append([5, 6], log_probs=[-1.0, -1.0], version="v000001", trained=True)
    turns.mask_earlier_versions(sample)
    assert sample.effective_mask() == [1, 1], "one version alone is on-policy"
    sample.append([7], log_probs=None, version=None, trained=False)
    sample.append([8], log_probs=[-1.0], version="v000002", trained=True)
    turns.mask_earlier_versions(sample)
    assert sample.loss_mask == [0, 0, 0, 1]
    sample.check()


def test_an_answer_without_all_log_probs_is_refused():
    class Silent(Engine):
        async def generate(self, body):
            (found,) = await super().generate(body)
            found["meta_info"]["output_token_logprobs"].pop()
            return [found]

    with pytest.raises(EngineError, match="sample 7: 20 tokens but log-probabilities for 19"):
        ask(Silent())


SHAPE = [3, 2]


def routed(engine_answer, chosen):
    engine_answer["meta_info"]["routed_experts"] = base64.b64encode(chosen.astype("<i4").tobytes()).decode()
    return engine_answer


def test_chosen_experts_of_an_earlier_request_stay():
    client = types.SimpleNamespace(streams=False, aborts=0)
    asking = Asking(client, PROMPT, {"max_new_tokens": 20}, evidence=Evidence(experts_shape=SHAPE))
    sample = Sample(0, 0)
    engine = Engine()
    first = np.arange(4 * 6).reshape(4, *SHAPE)
    turns.append(asking, sample, [routed(engine._piece(0, "Th", "abort"), first)])
    second = 1000 + np.arange(6 * 6).reshape(6, *SHAPE)
    turns.append(asking, sample, [routed(engine._piece(2, "e ", "stop"), second)])
    sample.check()
    found = np.frombuffer(sample.rollout_routed_experts, "<i2").reshape(6, *SHAPE)
    assert (found[:4] == first).all() and (found[4:] == second[4:]).all()
    with pytest.raises(EngineError, match="does not say which experts"):
        turns.append(asking, sample, [engine._piece(4, "s", "stop")])
    with pytest.raises(EngineError, match="36 chosen experts for 9 tokens"):
        turns.append(asking, sample, [routed(engine._piece(4, "s", "stop"), second)])


def test_an_answer_that_was_never_asked_for_leaves_the_sample_as_it_was():
    """The rollout had enough before the request was sent: no token, and no experts or tokens that top-p left."""
    asking = Asking(types.SimpleNamespace(streams=False, aborts=1), PROMPT, {"max_new_tokens": 20, "top_k": 4})
    asking = dataclasses.replace(asking, evidence=Evidence(top_p_replay=True, experts_shape=SHAPE))
    sample = Sample(0, 0)
    turns.append(asking, sample, [client._ended()])
    sample.check()
    assert (sample.status, sample.response_length, sample.spans, sample.weight_versions) == (Status.ABORTED, 0, [], [])
