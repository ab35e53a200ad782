"""Asking the run's engines from a function of a user's own.

:func:`engine` gives an :class:`Engine`, which continues a sample and appends what came back. Inside a run it asks
through the run's own client (:func:`through` is how the run lends it), so that the limit of requests in flight,
retries, a pause for new weights and an abort are the same for a user's function as for slime. Elsewhere (a notebook, a
contract test) it asks the address in ``args`` through :class:`PlainClient`. Torch-free.
"""

import asyncio
import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any, Protocol

from slime_cli.buffer.types import Sample, Span, Status
from slime_cli.errors import EngineError, UsageError
from slime_cli.hooks.evidence import NOTHING, Evidence
from slime_cli.hooks.protocols import Args

DRAFTS = "drafts"
"""Key in a sample's metadata: what speculative decoding did for it (:func:`keep_drafts`)."""

Answer = dict[str, Any]
STATUS = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}
"""How an engine says that an answer ended."""
TRIES = 5
FREE = 7
"""Tokens that SGLang wants free after a prompt, however short an answer is asked for."""


class EngineClient(Protocol):
    """The client that a run lends to functions: its own, or a scripted one of a test."""

    async def generate(self, body: dict[str, Any]) -> list[Answer]:
        """POST /generate: one answer for each sample that is asked for. Raises EngineError when the engines cannot
        answer. ``meta_info["spans"]``, where the client saw weights change in an answer: ``[[tokens, version], ...]``.
        """
        ...


_LENT: contextvars.ContextVar[EngineClient | None] = contextvars.ContextVar("slime_engine_client", default=None)


@contextlib.contextmanager
def through(client: EngineClient) -> Iterator[None]:
    """Functions that are called in this block, and the tasks that they start, ask through ``client``."""
    token = _LENT.set(client)
    try:
        yield
    finally:
        _LENT.reset(token)


class PlainClient:
    """One request after the other over connections of their own; a lost connection is tried again."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def generate(self, body: dict[str, Any]) -> list[Answer]:
        import aiohttp

        problem = ""
        for attempt in range(TRIES):
            if attempt:
                await asyncio.sleep(0.2 * 2**attempt)
            try:
                async with (
                    aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session,
                    session.post(f"{self.url}/generate", json=body) as answer,
                ):
                    if answer.status == 200:
                        found = await answer.json(content_type=None)  # not every server says that it is JSON
                        return found if isinstance(found, list) else [found]
                    problem = f"{answer.status} {(await answer.text())[:300]}"
                    if answer.status < 500:
                        raise EngineError(f"{self.url}/generate refused a request: {problem}")
            except aiohttp.ClientError as error:
                problem = f"{type(error).__name__}: {error}"
        raise EngineError(f"{self.url}/generate failed {TRIES} times, last: {problem}", "is the endpoint running?")


def engine(args: Args, url: str | None = None) -> "Engine":
    """The run's engines; with ``url`` another server that answers ``/generate``, a judge's for instance."""
    if url is not None:
        return Engine(args, PlainClient(url.rstrip("/")))
    lent = _LENT.get()
    if lent is not None:
        return Engine(args, lent)
    host, port = (getattr(args, f"sglang_router_{part}", None) for part in ("ip", "port"))
    if not host or not port:
        raise UsageError(
            "hooks.engine(args): args names no router, and no run lends its own client",
            "set args.sglang_router_ip and args.sglang_router_port to those of a running `slime serve-rollout`",
        )
    return Engine(args, PlainClient(f"http://{host}:{port}"))


class Engine:
    """Continues samples with the engines' present weights."""

    def __init__(self, args: Args, client: EngineClient) -> None:
        self.args = args
        self.client = client

    async def generate(
        self, sample: Sample, sampling_params: dict[str, Any], *, max_new_tokens: int | None = None
    ) -> Sample:
        """One turn: what the engines continue ``sample.tokens`` with is appended to it, to be trained.

        ``sampling_params["max_new_tokens"]`` bounds the whole response: a turn gets what earlier ones and appended text
        left of it, and of the model's context. ``max_new_tokens`` bounds this turn more tightly. The sample's status
        says how the turn ended: COMPLETED (a stop), TRUNCATED (a bound; nothing is asked where nothing is left) or
        ABORTED (the run ended the request: return the sample as it is). Raises EngineError.
        """
        left = self.room(sample, sampling_params)
        asked = left if max_new_tokens is None else min(left, max_new_tokens)
        if asked <= 0:
            sample.status = Status.TRUNCATED
            return sample
        params = sampling_params | {"max_new_tokens": asked}
        evidence: Evidence = getattr(self.client, "evidence", NOTHING)
        body = {"input_ids": list(sample.tokens), "sampling_params": params, "return_logprob": True}
        answers = await self.client.generate(body | evidence.request(params))
        if len(answers) != 1:
            raise UsageError(f"{len(answers)} answers to one sample", "leave n out of sampling_params")
        append_answer(sample, answers[0])
        evidence.keep(sample, answers[0], params)
        return sample

    def room(self, sample: Sample, sampling_params: dict[str, Any]) -> int:
        """How many more tokens the response may have."""
        from slime_cli.hooks.text import context_length

        budget = sampling_params.get("max_new_tokens")
        context = context_length(self.args)
        bounds = [budget - sample.response_length] if budget is not None else []
        if context is not None:
            free = context - len(sample.tokens)
            bounds.append(free if free >= FREE else 0)
        if not bounds:
            raise UsageError("sampling_params has no max_new_tokens", "say how long a response may be")
        return min(bounds)


def whole(pieces: list[Answer]) -> Answer:
    """The pieces of a streamed answer, each with its own tokens and the version that wrote them, as one answer."""
    if len(pieces) == 1:
        return pieces[0]
    last = pieces[-1]
    metas = [piece["meta_info"] for piece in pieces]
    lists = {
        name: [entry for meta in metas for entry in meta.get(name) or ()]
        for name in ("output_token_logprobs", "output_top_logprobs")
        if any(meta.get(name) for meta in metas)
    }
    spans = [[len(piece["output_ids"]), meta.get("weight_version")] for piece, meta in zip(pieces, metas, strict=True)]
    ids = [token for piece in pieces for token in piece["output_ids"]]
    # an engine may send the text that came before again in each piece
    text = last["text"] if last.get("cumulative_text") else "".join(piece["text"] for piece in pieces)
    return last | {"output_ids": ids, "text": text, "meta_info": last["meta_info"] | lists | {"spans": spans}}


def spans_of(answer: Answer) -> list[Span]:
    """The client's where it saw weights change in the answer, else one of the answer's version."""
    meta = answer["meta_info"]
    spans = meta.get("spans") or [(len(answer["output_ids"]), meta.get("weight_version"))]
    return [Span(length, str(version)) for length, version in spans]


def keep_drafts(sample: Sample, answer: Answer) -> None:
    """Adds up in the sample's metadata what the engine tells of speculative decoding, where it drafts at all: tokens
    that were drafted, those of them that the model would have drawn too, its passes, and the tokens of these."""
    meta = answer["meta_info"]
    if passes := meta.get("spec_verify_ct"):
        told = {
            "accepted": meta.get("spec_num_correct_drafts", 0),
            "proposed": meta.get("spec_num_proposed_drafts", 0),
            "passes": passes,
            "tokens": len(answer["output_ids"]),
        }
        before = sample.metadata.get(DRAFTS, {})
        sample.metadata = sample.metadata | {DRAFTS: {key: before.get(key, 0) + n for key, n in told.items()}}


def log_probs_of(sample: Sample, answer: Answer) -> list[float]:
    """The log-probability of each token of ``answer``. Raises EngineError, which names ``sample``, when the engine does
    not give one of each."""
    ids = answer["output_ids"]
    scored = answer["meta_info"].get("output_token_logprobs")
    if scored is None or len(scored) != len(ids) or any(entry[1] != token for entry, token in zip(scored, ids)):
        raise EngineError(
            f"sample {sample.index}: {len(ids)} tokens but log-probabilities for {scored and len(scored)}"
        )
    return [entry[0] for entry in scored]


def append_answer(sample: Sample, answer: Answer) -> None:
    """Appends an engine's answer to ``sample``. Raises EngineError when its evidence is incomplete.

    The trained token ids are the sampled ones, never a text that was tokenised again, and each has the log-probability
    of itself. Spans are the client's where it saw weights change, else one of the answer's version.
    """
    ids = answer["output_ids"]
    spans = spans_of(answer)
    if sum(span.length for span in spans) != len(ids):
        raise EngineError(f"sample {sample.index}: {len(ids)} tokens in spans of {[span.length for span in spans]}")
    log_probs = log_probs_of(sample, answer)
    sample.append_spans(ids, spans, log_probs=log_probs, trained=True, text=answer["text"])
    keep_drafts(sample, answer)
    if ids and spans[-1].version:
        sample.weight_versions.append(spans[-1].version)
    sample.status = STATUS.get(answer["meta_info"]["finish_reason"]["type"], Status.FAILED)
