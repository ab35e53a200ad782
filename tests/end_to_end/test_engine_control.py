"""Weights changed while requests are in flight, on genuine engines.

1. Paused requests stand still. They continue after a change of weights, and each chunk tells the version that wrote it.
2. Aborted requests give back what they have, each token with its log-probability, also through the router.
3. An abort reaches what is in an engine, when it runs; not what waits at a paused engine's door.
4. A cache that is not flushed serves the keys and values of old weights; flushing works when nothing is in flight, and
   else leaves the engine as it is.
"""

import concurrent.futures
import json
import threading

import httpx
import pytest
import torch
from safetensors.torch import load_file

from slime_cli import engine_api, manifests
from slime_cli.errors import EngineError
from slime_cli.manifests.proof import verified
from slime_cli.serving import control
from slime_cli.weights import folder as folders
from slime_cli.weights import publish, verification
from slime_cli.weights.transports import disk

LONG = 480
"""Tokens that an answer has, most of what the model's context takes."""
BEGUN = 20
"""Tokens after which it is told so."""


def flush(urls, patience=60):
    engine_api.each(urls, lambda url: engine_api.flush(url, patience))


@pytest.fixture(scope="module")
def endpoint(served):
    return manifests.read(served / "endpoint.json", manifests.Endpoint)


@pytest.fixture(scope="module")
def urls(endpoint):
    return [engine.url for engine in endpoint.engines]


@pytest.fixture(scope="module")
def versions(served, urls, tmp_path_factory):
    """Two versions: the engines' weights as they were, and others."""
    folder = tmp_path_factory.mktemp("versions")
    before = verification.reported(urls[0])
    weights = load_file(served / "model" / "model.safetensors")
    made = {}
    for name, factor in (("v-old", 1.0), ("v-new", 1.25)):
        named = ((key, tensor * factor) for key, tensor in weights.items())
        publish.write(
            named, folder / name, hf_checkpoint=str(served / "model"), version=name, step=0, run="test_engine_control"
        )
        made[name] = folders.opened(folder / name)
    yield made
    disk.load(folders.opened(folder / "v-old", before), urls, flush=True)


@pytest.fixture
def old(versions, urls):
    """The engines hold v-old and have nothing in flight. They are not paused afterwards, even if the test failed."""
    disk.load(versions["v-old"], urls, flush=True)
    yield
    control.resume(urls)
    control.abort_all(urls)


def body(stream=False, tokens=LONG, prompt=(5, 6, 7, 8)):
    sampling = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 1.0}
    return {"input_ids": list(prompt), "sampling_params": sampling, "return_logprob": True, "stream": stream}


class Asked(threading.Thread):
    """A request in flight; ``seen`` has (tokens so far, weight version) of each chunk."""

    def __init__(self, url, **more):
        super().__init__(daemon=True)
        self.url = url
        self.body = body(**more)
        self.seen = []
        self.answer = None
        self.error = None
        self.start()

    def run(self):
        try:
            self._ask()
        except (httpx.HTTPError, KeyError) as error:
            self.error = f"{type(error).__name__}: {error}; last answer: {self.answer}"

    def _ask(self):
        with httpx.Client(trust_env=False, timeout=300) as client:
            if not self.body["stream"]:
                self.answer = client.post(self.url + "/generate", json=self.body).raise_for_status().json()
                return
            with client.stream("POST", self.url + "/generate", json=self.body) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        self.answer = json.loads(line.removeprefix("data: "))
                        meta = self.answer["meta_info"]
                        self.seen.append((meta["completion_tokens"], meta["weight_version"]))

    @property
    def tokens(self):
        return self.seen[-1][0] if self.seen else 0

    def versions(self):
        """The version of every token."""
        out = []
        for count, version in self.seen:
            out += [version] * (count - len(out))
        return out

    def meta(self):
        self.join(240)
        assert not self.is_alive() and self.error is None, self.error
        return self.answer["meta_info"]


def wait_for(asked, tokens):
    """Each of them has that many."""
    pause = threading.Event()
    while any(one.tokens < tokens for one in asked):
        assert all(one.is_alive() or one.tokens >= tokens for one in asked), [one.error for one in asked]
        pause.wait(0.002)


def still(asked, seconds=1.0):
    """How many tokens each has, when nothing has moved for so long, and does not for as long again."""
    pause = threading.Event()
    counts = None
    while counts != (counts := [one.tokens for one in asked]):
        pause.wait(seconds)  # what was on its way to us
    pause.wait(seconds)
    assert [one.tokens for one in asked] == counts
    return counts


def caught(start, command, tries=5):
    """Requests that ``command`` found in flight, and what it gave: on a busy machine they may have ended before."""
    for _ in range(tries):
        asked = start()
        wait_for([one for one in asked if one.body["stream"]], BEGUN)
        found = command(asked)
        if found is not None:
            return asked, found
        for one in asked:
            one.meta()
    raise AssertionError(f"every answer was complete before the engine was told, {tries} times")


def pausing(urls, mode):
    """A command that pauses; how many tokens each request has."""

    def pause(asked):
        control.pause(urls, mode)
        control.pause(urls, mode)  # again, to the same effect
        counts = still(asked)
        if max(counts) < LONG:
            return counts
        return control.resume(urls)

    return pause


def whole(meta):
    """Every token of an answer has a log-probability of its own."""
    scored = meta["output_token_logprobs"]
    return len(scored) == meta["completion_tokens"] and all(entry[0] is not None and entry[0] <= 0 for entry in scored)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_requests_stand_still_while_weights_change_and_continue_with_the_new_ones(old, versions, urls, mode):
    asked, counts = caught(lambda: [Asked(url, stream=True) for url in urls for _ in range(3)], pausing(urls, mode))
    disk.load(versions["v-new"], urls, flush=False)
    assert verified(verification.verify(versions["v-new"], urls)) is True
    assert still(asked) == counts
    control.resume(urls)
    control.resume(urls)
    for one, count in zip(asked, counts, strict=True):
        meta = one.meta()
        assert meta["finish_reason"]["type"] == "length" and whole(meta)
        assert one.versions() == ["v-old"] * count + ["v-new"] * (LONG - count)


def test_aborted_requests_give_back_what_they_have(old, endpoint, urls):
    addresses = [*urls, endpoint.router_url]

    def abort(asked):
        control.abort_all(urls)
        metas = [one.meta() for one in asked]
        under_way = [m["finish_reason"]["type"] == "abort" and m.get("completion_tokens", 0) > 0 for m in metas]
        return True if all(under_way) else None

    asked, _ = caught(lambda: [Asked(url, stream=stream) for url in addresses for stream in (True, False)], abort)
    for one in asked:
        meta = one.meta()
        assert whole(meta) and 0 < meta["completion_tokens"] < LONG
        assert len(one.answer["output_ids"]) == meta["completion_tokens"] and meta["weight_version"] == "v-old"
    control.abort_all(urls)  # nothing is there any more
    flush(urls)


def test_an_abort_reaches_what_is_in_a_running_engine(old, urls):
    inside, counts = caught(lambda: [Asked(url, stream=True) for url in urls], pausing(urls, "in_place"))
    at_the_door = [Asked(url, tokens=3) for url in urls]
    control.abort_all(urls)
    assert still(inside) == counts and all(one.is_alive() for one in (*inside, *at_the_door))
    control.resume(urls)
    for one, count in zip(inside, counts, strict=True):
        assert one.meta()["finish_reason"]["type"] == "abort" and count <= one.tokens < LONG
    for one in at_the_door:
        meta = one.meta()
        assert meta["finish_reason"]["type"] == "length" and meta["completion_tokens"] == 3


def scores(url, prompt, **more):
    """Log-probabilities of the five likeliest first tokens of an answer, and how many tokens came from the cache."""
    asked = body(tokens=1, prompt=prompt) | {"top_logprobs_num": 5} | more
    with httpx.Client(trust_env=False, timeout=120) as client:
        meta = client.post(url + "/generate", json=asked).raise_for_status().json()["meta_info"]
    return [entry[0] for entry in meta["output_top_logprobs"][0]], meta["cached_tokens"]


PROMPT = torch.arange(5, 15).repeat(12).tolist()


def test_a_cache_is_of_the_weights_that_made_it_until_it_is_flushed(old, versions, urls):
    (url, *_) = urls
    scores(url, PROMPT)
    disk.load(versions["v-new"], urls, flush=False)
    stale, cached = scores(url, PROMPT)
    assert cached > 0
    flush(urls)
    flush(urls)
    fresh, cached = scores(url, PROMPT)
    assert cached == 0
    disk.load(versions["v-new"], urls, flush=True)
    again, cached = scores(url, PROMPT)
    assert cached == 0 and again == pytest.approx(fresh, abs=1e-5)
    assert max(abs(a - b) for a, b in zip(stale, fresh, strict=True)) > 1e-3


def test_a_request_with_a_key_of_its_own_gets_nothing_that_others_left_in_the_cache(old, endpoint, urls):
    """A request that names its version is safe from older weights without a flush, also through the router."""
    for url in (urls[0], endpoint.router_url):
        assert scores(url, PROMPT, extra_key=f"{url} v-old")[1] == 0
        assert scores(url, PROMPT, extra_key=f"{url} v-old")[1] > 0
        assert scores(url, PROMPT, extra_key=f"{url} v-new")[1] == 0


def test_a_flush_waits_for_requests_that_end_and_leaves_an_engine_with_others_as_it_is(old, urls):
    asked, _ = caught(lambda: [Asked(url, stream=True) for url in urls], pausing(urls, "in_place"))
    with pytest.raises(EngineError, match="prefix cache cannot be flushed"):
        flush(urls, patience=0.3)
    control.resume(urls)
    flush(urls, patience=240)
    for one in asked:
        assert one.meta()["completion_tokens"] == LONG and whole(one.meta())


def test_engines_that_answer_health_checks_load_and_flush(old, versions, urls):
    """A health check generates a token. A flush within an update ends an engine that has not put it away yet."""
    ended = threading.Event()

    def checks(url: str) -> int:
        count = 0
        while not ended.is_set():
            assert httpx.get(f"{url}/health_generate", timeout=60).status_code == 200
            count += 1
        return count

    with concurrent.futures.ThreadPoolExecutor() as pool:
        checked = [pool.submit(checks, url) for url in urls for _ in range(2)]
        try:
            for name in ("v-new", "v-old") * 4:
                disk.load(versions[name], urls, flush=True)
        finally:
            ended.set()
        assert all(future.result() for future in checked)
