"""The teacher endpoint by a scripted one: what it is asked, what counts as an answer, and what happens without one."""

import asyncio
import contextlib
import dataclasses
import json
import types

import pytest
from aiohttp import web

from slime_cli import manifests
from slime_cli.buffer.batch_files import read_parquet, to_parquet
from slime_cli.buffer.columns import TrainBatch
from slime_cli.buffer.types import Group, Sample, Status
from slime_cli.errors import EngineError, UsageError
from slime_cli.rollout import teacher
from slime_cli.rollout.generate import Generator
from slime_cli.rollout.teacher import Refusal, Teacher

VOCABULARY = 50


class Tokenizer:
    """A character for each id, up to a highest one."""

    highest = 40

    def decode(self, ids, skip_special_tokens):
        assert skip_special_tokens is False
        return "".join(chr(65 + i) for i in ids)

    def get_vocab(self):
        return {"a": 3, "z": self.highest}


def answer(body: dict) -> dict:
    """As SGLang answers: nothing for the first token asked about, and its vocabulary's last id under the name 0."""
    tokens = body["input_ids"][body["logprob_start_len"] :]
    entries = [
        [None if i == 0 else -token / 10, token if token < VOCABULARY - 1 else 0, None]
        for i, token in enumerate(tokens)
    ]
    return {"text": "", "output_ids": [], "meta_info": {"input_token_logprobs": entries}}


class Scripted:
    """A server with the embedding of SGLang: it dies of an id that it does not have."""

    def __init__(self):
        self.asked = []
        self.replies = []
        self.vocabulary = VOCABULARY
        self.first = None
        self.waiting = self.most = 0

    async def generate(self, request):
        body = await request.json()
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        await asyncio.sleep(0)
        self.waiting -= 1
        assert max(body["input_ids"]) < self.vocabulary, "the engine is dead"
        reported = body.get("token_ids_logprob")
        if reported:
            if reported[0] >= self.vocabulary:
                return web.json_response(
                    {"error": {"message": f"token_ids_logprob contains out-of-vocabulary token id {reported[0]}"}},
                    status=400,
                )
            return web.json_response(answer(body))
        self.asked.append(body)
        status, text = self.replies.pop(0) if self.replies else (200, None)
        if status is None:
            await asyncio.sleep(text)
        return web.Response(status=status or 200, text=text if isinstance(text, str) else json.dumps(answer(body)))

    async def detokenize(self, request):
        if self.first is None:
            raise web.HTTPNotFound
        return web.json_response({"text": [chr(self.first + ids[0]) for ids in (await request.json())["tokens"]]})


@contextlib.asynccontextmanager
async def serving(timeout=5.0):
    """A scripted server and a teacher that asks it."""
    scripted = Scripted()
    app = web.Application()
    app.add_routes([web.post("/generate", scripted.generate), web.post("/detokenize", scripted.detokenize)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    scripted.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    asking = Teacher(f"{scripted.url}/generate", timeout)
    try:
        yield scripted, asking
    finally:
        await asking.close()
        await runner.cleanup()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(teacher, "BACKOFF", 0.001)
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # must never be used


def sample(index=0, prompt=(1, 2, 3), response=(4, 5), **more) -> Sample:
    return Sample(index, 0, tokens=[*prompt, *response], response_length=len(response), status=Status.COMPLETED, **more)


async def test_asks_for_the_response_alone_and_for_no_new_token():
    async with serving() as (scripted, asking):
        failed = {}
        samples = [sample(), sample(1, prompt=(9,), response=(7, VOCABULARY - 1, 8)), sample(2, response=())]
        assert await asking.teach(samples, failed) == samples and not failed
        assert [s.teacher_log_probs for s in samples] == [[-0.4, -0.5], [-0.7, -4.9, -0.8], []]
        assert scripted.asked[0] == {
            "input_ids": [1, 2, 3, 4, 5],
            "sampling_params": {"temperature": 1.0, "max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": 2,
        }
        assert [body["logprob_start_len"] for body in scripted.asked] == [2, 0]


@pytest.mark.parametrize(
    ("replies", "reason", "tries"),
    [
        ([(503, "busy"), (200, None)], None, 2),
        ([(429, "slow down"), (500, "oops"), (200, None)], None, 3),
        ([(503, "busy")] * 4, "teacher_unreachable", 4),
        ([(None, 1.0)] * 4, "teacher_timeout", 4),
        ([(400, "longer than the context")], "teacher_refused", 1),
        ([(200, "<html>")], "teacher_bad_value", 1),
        ([(200, '{"meta_info": {}}')], "teacher_bad_value", 1),
        ([(200, '{"meta_info": {"input_token_logprobs": [[null, 3], [-0.1, 4]]}}')], "teacher_bad_value", 1),
        ([(200, '{"meta_info": {"input_token_logprobs": [[null, 3], [-0.1, 4], [-0.1, 6]]}}')], "teacher_bad_value", 1),
        ([(200, '{"meta_info": {"input_token_logprobs": [[null, 3], [-0.1, 4], [null, 5]]}}')], "teacher_bad_value", 1),
        ([(200, '{"meta_info": {"input_token_logprobs": [[null, 3], [-0.1, 4], [NaN, 5]]}}')], "teacher_bad_value", 1),
    ],
)
async def test_failures_are_counted_by_reason_and_tried_again_where_that_can_help(replies, reason, tries):
    async with serving(timeout=0.2 if reason == "teacher_timeout" else 20.0) as (scripted, asking):
        scripted.replies[:] = replies
        failed = {}
        kept = await asking.teach([sample(7)], failed)
        assert (failed, len(kept)) == (({7: reason}, 0) if reason else ({}, 1))
        assert len(scripted.asked) == tries and asking.retries == tries - 1


async def test_siblings_share_their_fate():
    async with serving() as (scripted, asking):
        scripted.replies[:] = [(200, None), (400, "no")]
        failed = {}
        samples = [sample(0), sample(0, part=1), sample(1)]
        assert await asking.teach(samples, failed) == samples[2:] and failed == {0: "teacher_refused"}


async def test_an_id_beyond_the_teachers_vocabulary_is_never_sent():
    async with serving() as (scripted, asking):
        scripted.vocabulary = 45  # the policy's embedding is padded to 50 rows, its tokenizer ends at 40
        await asking.check(Tokenizer(), VOCABULARY)
        assert asking.highest == Tokenizer.highest
        failed = {}
        assert await asking.teach([sample(0), sample(1, response=(46,))], failed)
        assert failed == {1: "teacher_vocabulary"}


async def test_a_dead_teacher_ends_the_run_and_a_single_failure_does_not():
    async with serving() as (scripted, asking):
        scripted.replies[:] = [(400, "no")] * (teacher.DEAD_AFTER - 1)
        for i in range(teacher.DEAD_AFTER):  # the last one has an answer
            await asking.teach([sample(i)], {})
        failed = {}
        scripted.replies[:] = [(400, "no")] * 2 * teacher.DEAD_AFTER
        await asking.teach([sample(i) for i in range(2 * teacher.DEAD_AFTER)], failed)
        assert set(failed.values()) == {"teacher_refused"}, "a few long samples are no dead teacher"
        scripted.replies[:] = [(400, "no")] * teacher.REFUSED_AFTER
        with pytest.raises(EngineError, match="no answer to 64 samples in a row.*HTTP 400: no"):
            await asking.teach([sample(i) for i in range(80)], {})
    gone = Teacher(scripted.url, 5.0)
    with pytest.raises(EngineError, match="no answer to 8 samples in a row.*ClientConnectorError"):
        await gone.teach([sample(i) for i in range(20)], {})
    with pytest.raises(EngineError, match="does not answer"):
        await gone.check(Tokenizer(), VOCABULARY)
    await gone.close()


async def test_requests_in_flight_are_bounded(monkeypatch):
    monkeypatch.setattr(teacher, "IN_FLIGHT", 3)
    async with serving() as (scripted, asking):
        assert len(await asking.teach([sample(i) for i in range(40)], {})) == 40
        assert scripted.most <= 3


async def test_a_mismatch_that_can_be_seen_is_refused():
    async with serving() as (scripted, asking):
        scripted.first = 65
        await asking.check(Tokenizer(), VOCABULARY)
        assert asking.highest == VOCABULARY - 1
        scripted.first = 66
        with pytest.raises(UsageError, match="another tokenizer: token 0 is 'B' to it, 'A' to the policy"):
            await asking.check(Tokenizer(), VOCABULARY)
        scripted.first, scripted.vocabulary = None, 40  # a router, which does not say
        with pytest.raises(UsageError, match="no token 40, which the policy's tokenizer has"):
            await asking.check(Tokenizer(), VOCABULARY)
        scripted.vocabulary, scripted.replies[:] = VOCABULARY, [(200, "{}")]
        with pytest.raises(EngineError, match="does not answer as SGLang does"):
            await asking.check(Tokenizer(), VOCABULARY)


def test_addresses(tmp_path):
    for given in ("http://h:1", "http://h:1/", "http://h:1/generate"):
        assert teacher.address(given).generate == "http://h:1"
    engine = manifests.Engine(url="http://h:3", role="regular", devices=[0], pid=1, host="h")
    endpoint = manifests.Endpoint(
        router_url="http://h:2",
        engines=[engine],
        model="m",
        engine_name="sglang",
        engine_version="0",
        owner_pid=1,
        owner_host="h",
        created=0.0,
    )
    manifests.write(tmp_path / "endpoint.json", endpoint)
    assert teacher.address(str(tmp_path / "endpoint.json")) == teacher.Address("http://h:2", "http://h:3")
    with pytest.raises(UsageError, match="not an address"):
        teacher.address("ftp://h")


async def test_the_generator_drops_what_has_no_teacher_before_it_is_rewarded():
    rewarded = []

    async def score_group(samples, args, stops, evaluation):
        rewarded.extend(s.index for s in samples)
        return [1.0] * len(samples)

    async def generate(group, params=None, ends=None):
        return [[dataclasses.replace(one, status=Status.COMPLETED)] for one in group.pending]

    args = types.SimpleNamespace(
        custom_rm_path=None,
        custom_generate_function_path=None,
        dynamic_sampling_filter_path=None,
        rollout_sample_hook_path=None,
    )
    async with serving() as (scripted, asking):
        scripted.replies[:] = [(200, None), (400, "no")]
        generator = Generator(args, None, types.SimpleNamespace(score_group=score_group), teacher=asking)
        generator.generate = generate
        pending = [sample(0), sample(1)]
        for one in pending:
            one.status = Status.PENDING
        answers = await generator.answered(Group(0, None, None, [], pending))
        assert [s.index for s in answers.whole] == rewarded and len(rewarded) == 1
        assert answers.failed == {1 - rewarded[0]: "teacher_refused"} and not answers.unfinished


def test_the_column_travels_with_its_sample(tmp_path):
    one = sample(0, rollout_log_probs=[-1.0, -2.0], teacher_log_probs=[-0.5, -0.25], reward=1.0)
    other = sample(1, response=(4,), rollout_log_probs=[-1.0], teacher_log_probs=[-3.0], reward=0.0)
    (tmp_path / "s.parquet").write_bytes(to_parquet([one, other]))
    back = read_parquet(tmp_path / "s.parquet")
    assert back == [one, other]
    assert TrainBatch.from_samples(back).teacher_log_probs_R.tolist() == [-0.5, -0.25, -3.0]
    other.teacher_log_probs = None
    with pytest.raises(ValueError, match="sample 1 has no teacher_log_probs while others have"):
        TrainBatch.from_samples([one, other])
    other.teacher_log_probs = [-1.0, -1.0]
    with pytest.raises(ValueError, match="teacher_log_probs has 2 entries for 1"):
        other.check()


def test_a_file_from_before_the_column_is_read(tmp_path):
    import pyarrow.parquet as pq

    (tmp_path / "s.parquet").write_bytes(to_parquet([sample(0)]))
    table = pq.read_table(tmp_path / "s.parquet").drop_columns(["teacher_log_probs"])
    pq.write_table(table, tmp_path / "old.parquet")
    assert read_parquet(tmp_path / "old.parquet") == [sample(0)]


def test_an_answer_may_be_a_list_of_one():
    body = {"input_ids": [1, 2, 3], "logprob_start_len": 0}
    assert teacher.read(json.dumps([answer(body)]), [2, 3]) == [-0.2, -0.3]
    assert teacher.read("[]", [2, 3]) == Refusal("bad_value", "the answer has no meta_info.input_token_logprobs: '[]'")
