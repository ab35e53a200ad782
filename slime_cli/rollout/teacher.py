"""On-policy distillation from an SGLang endpoint: the teacher's log-probabilities of what the student said.

The generator asks for every whole sample, before its reward. Invariants: a sample passes with one finite number for
each response token, or is dropped for a counted reason; no request holds a token that the teacher does not have (stock
SGLang does not check prompt ids, and one beyond the embedding ends its engine); a teacher that answers nobody ends the
run, which the same command resumes.

SGLang's log-probabilities of a prompt are of ``softmax(logits)`` whatever temperature the request names, so the student
must sample at temperature 1 (options/checks/off_policy.py holds it to that).
"""

import asyncio
import dataclasses
import json
import math
import random
from typing import Any

import aiohttp

from slime_cli import manifests
from slime_cli.addresses import is_local
from slime_cli.buffer.types import Sample
from slime_cli.errors import EngineError, UsageError

TRIES = 4
BACKOFF = 0.5
IN_FLIGHT = 64
DEAD_AFTER = 8
"""So many samples in a row without one answer: nobody is there."""
REFUSED_AFTER = 64
"""So many in a row that it answered, but not with log-probabilities: a few long ones may be more than it takes, all of
them not."""
PROBES = 64
"""Tokens, spread over the vocabulary, whose text is compared."""


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Why a sample has no teacher."""

    kind: str
    """``unreachable``, ``timeout``, ``refused``, ``bad_value`` or ``vocabulary``."""
    detail: str


@dataclasses.dataclass(frozen=True)
class Address:
    """Where the teacher is."""

    generate: str
    """Base URL of the requests: a router or an engine."""
    engine: str
    """Base URL of an engine, as far as is known: routers do not pass every question on."""


def address(given: str) -> Address:
    """The address in ``http://host:port``, with ``/generate`` after it or not, or of the endpoint.json of a ``slime
    serve-rollout``."""
    if given.startswith(("http://", "https://")):
        base = given.rstrip("/").removesuffix("/generate").rstrip("/")
        return Address(base, base)
    if "://" in given:
        raise UsageError(
            f"--opd-teacher-url {given}: not an address",
            "write http://host:port/generate, or the path of an endpoint.json",
        )
    endpoint = manifests.read(given, manifests.Endpoint)
    return Address(endpoint.router_url, endpoint.engines[0].url)


class Teacher:
    """One for a phase; belongs to one event loop."""

    def __init__(self, given: str, timeout: float):
        """``timeout``: seconds for one try of one sample."""
        self.address = address(given)
        self.timeout = timeout
        self.highest: int | None = None
        """Largest token id that may be sent; :meth:`check` finds it."""
        self.in_a_row = 0
        """Samples without an answer since the last one that had one."""
        self.retries = 0
        self.details: dict[str, str] = {}
        """Reason -> the text of the first refusal."""
        self._slots = asyncio.Semaphore(IN_FLIGHT)
        self._sessions: dict[bool, aiohttp.ClientSession] = {}

    async def close(self) -> None:
        for session in self._sessions.values():
            await session.close()
        self._sessions.clear()

    # -- before the first sample
    # ------------------------------------------------------------------------------------------

    async def check(self, tokenizer: Any, vocabulary: int) -> None:
        """``vocabulary``: rows of the policy's embedding. UsageError for another tokenizer or too few tokens, as far as
        the teacher lets it be seen; EngineError when it does not answer, or not with log-probabilities."""
        named = max(tokenizer.get_vocab().values())
        probe = sorted({i * named // PROBES for i in range(PROBES + 1)})
        theirs = await self._texts(probe)
        ours = [tokenizer.decode([i], skip_special_tokens=False) for i in probe]
        other = next((i for i, a, b in zip(probe, theirs, ours) if a != b), None)
        if other is not None:
            i = probe.index(other)
            raise UsageError(
                f"the teacher at {self.address.generate} has another tokenizer: token {other} is {theirs[i]!r} to it, "
                f"{ours[i]!r} to the policy",
                "log-probabilities are compared token by token: take a teacher with the policy's tokenizer",
            )
        highest = vocabulary - 1
        if not await self._has(highest):
            highest = named
        if highest == named and not await self._has(named):
            raise UsageError(
                f"the teacher at {self.address.generate} has no token {named}, which the policy's tokenizer has",
                "take a teacher with the policy's tokenizer",
            )
        self.highest = highest
        found = await self._try(Sample(-1, -1, tokens=[0, 0, highest], response_length=2))
        if isinstance(found, Refusal):
            raise EngineError(
                f"the teacher does not answer as SGLang does: {found.detail}", "is --opd-teacher-url right?"
            )

    async def _texts(self, ids: list[int]) -> list[str]:
        """The teacher's text of each token; nothing from routers, and servers without a tokenizer, which cannot say."""
        body = {"tokens": [[i] for i in ids], "skip_special_tokens": False}
        status, text = await self._asked(f"{self.address.engine}/detokenize", body)
        try:
            return list(json.loads(text)["text"]) if status == 200 else []
        except (ValueError, KeyError, TypeError):
            return []

    async def _has(self, token: int) -> bool:
        """True when ``token`` is in the teacher's vocabulary. Asked as an id to report on: such ids are checked, a
        prompt's are not."""
        body = _body([0], 0) | {"token_ids_logprob": [token]}
        status, text = await self._asked(f"{self.address.generate}/generate", body)
        if status != 200 and "out-of-vocabulary" not in text:
            raise EngineError(
                f"the teacher at {self.address.generate} answered {status}: {text[:300]}", "is --opd-teacher-url right?"
            )
        return status == 200

    async def _asked(self, url: str, body: dict) -> tuple[int, str]:
        try:
            return await self._post(url, body)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineError(
                f"the teacher does not answer: {url}: {error or type(error).__name__}",
                "start it, or correct --opd-teacher-url",
            ) from None

    # -- samples
    # -----------------------------------------------------------------------------------------------------------

    async def teach(self, samples: list[Sample], failed: dict[int, str]) -> list[Sample]:
        """Those whose whole trajectory got its ``teacher_log_probs``; the others' go into ``failed`` as
        ``teacher_KIND``."""
        for sample, found in zip(samples, await asyncio.gather(*(self._scored(s) for s in samples))):
            if isinstance(found, Refusal):
                reason = failed.setdefault(sample.index, f"teacher_{found.kind}")
                self.details.setdefault(reason, found.detail)
            else:
                sample.teacher_log_probs = found
        return [sample for sample in samples if sample.index not in failed]

    async def _scored(self, sample: Sample) -> list[float] | Refusal:
        if not sample.response_length:
            return []
        if self.highest is not None and max(sample.tokens) > self.highest:
            return Refusal("vocabulary", f"token {max(sample.tokens)} is not in the teacher's vocabulary")
        found: list[float] | Refusal = Refusal("unreachable", "it was not asked")
        for attempt in range(TRIES):
            if attempt:
                self.retries += 1
                await asyncio.sleep(BACKOFF * 2 ** (attempt - 1) * random.uniform(0.5, 1.5))
            async with self._slots:
                found = await self._try(sample)
            if not isinstance(found, Refusal):
                self.in_a_row = 0
                return found
            if found.kind not in ("unreachable", "timeout"):
                break
        self.in_a_row += 1
        if self.in_a_row >= (DEAD_AFTER if found.kind in ("unreachable", "timeout") else REFUSED_AFTER):
            raise EngineError(
                f"the teacher had no answer to {self.in_a_row} samples in a row, the last time: {found.detail}",
                "repair the teacher; the same command resumes from the last commit",
            )
        return found

    async def _try(self, sample: Sample) -> list[float] | Refusal:
        """One request. The first number asked for is the last prompt token's, for which SGLang answers nothing: the
        prompt before it needs no logits, and its keys and values may come from the teacher's prefix cache."""
        url = f"{self.address.generate}/generate"
        start = max(len(sample.tokens) - sample.response_length - 1, 0)
        try:
            status, text = await self._post(url, _body(sample.tokens, start))
        except TimeoutError:
            return Refusal("timeout", f"{url}: no answer in {self.timeout:g} s")
        except aiohttp.ClientError as error:
            return Refusal("unreachable", f"{url}: {type(error).__name__}: {error}")
        if status != 200:
            again = status == 429 or status >= 500
            return Refusal("unreachable" if again else "refused", f"{url}: HTTP {status}: {text[:300]}")
        return read(text, sample.tokens[start + 1 :])

    async def _post(self, url: str, body: dict[str, Any]) -> tuple[int, str]:
        async with self._session(url).post(url, json=body) as answer:
            return answer.status, await answer.text()

    def _session(self, url: str) -> aiohttp.ClientSession:
        """Local addresses never go through a proxy of the environment."""
        local = is_local(url)
        if local not in self._sessions:
            timeout = aiohttp.ClientTimeout(total=self.timeout)
            self._sessions[local] = aiohttp.ClientSession(timeout=timeout, trust_env=not local)
        return self._sessions[local]


def _body(tokens: list[int], start: int) -> dict[str, Any]:
    """A request for log-probabilities of ``tokens`` after ``start``, and for no new token."""
    params = {"temperature": 1.0, "max_new_tokens": 0}
    return {"input_ids": tokens, "sampling_params": params, "return_logprob": True, "logprob_start_len": start}


def read(text: str, wanted: list[int]) -> list[float] | Refusal:
    """Log-probabilities of the tokens ``wanted`` from an answer of ``/generate``; each must be there, finite, and of
    its token."""
    try:
        answer = json.loads(text)
        answer = answer[0] if isinstance(answer, list) else answer
        entries = answer["meta_info"]["input_token_logprobs"][1:]
        values = [entry[0] for entry in entries]
        ids = [entry[1] for entry in entries]
    except (ValueError, KeyError, TypeError, IndexError):
        return Refusal("bad_value", f"the answer has no meta_info.input_token_logprobs: {text[:200]!r}")
    # SGLang reports the last id of its vocabulary as 0.
    if len(ids) != len(wanted) or any(got not in (want, 0) for got, want in zip(ids, wanted)):
        return Refusal(
            "bad_value",
            f"log-probabilities of {len(ids)} tokens {ids[:5]}..., asked for {len(wanted)}, {wanted[:5]}...",
        )
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in values):
        return Refusal("bad_value", "a log-probability is not a finite number")
    return [float(value) for value in values]
