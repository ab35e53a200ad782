"""One answer of the engines for one sample: asked for, appended, and continued after an interruption.

Called by :mod:`slime_cli.rollout.generate` and by the client that users' functions get. Invariants: the trained token
ids are the sampled ones, never a re-tokenised text, and each has its own log-probability and the version that wrote it;
an answer that this run interrupted continues inside the response budget that it began with, and ends where it would
have ended, at a stop text across the interruption too.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from slime_cli.buffer.types import Sample, Status
from slime_cli.hooks.client import STATUS, keep_drafts, log_probs_of, spans_of, whole
from slime_cli.hooks.evidence import NOTHING, Evidence
from slime_cli.rollout.client import RouterClient
from slime_cli.rollout.concurrent import side_by_side

Answer = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Asking:
    """The request of one group's samples."""

    client: RouterClient
    prompt: list[int]
    params: dict[str, Any]
    """SGLang's sampling parameters; ``max_new_tokens`` is the response budget."""
    evidence: Evidence = NOTHING
    ends: Callable[[], bool] = lambda: False
    """True when an interrupted answer stays interrupted, because the rollout has what it needs."""
    decode: Callable[[list[int]], str] | None = None

    def body(self, sample: Sample | None, n: int = 1) -> Answer:
        """The request for ``n`` answers from the start, or for the rest of ``sample``."""
        begun = sample.tokens[len(self.prompt) :] if sample is not None and sample.response_length else []
        params = self.params | {"max_new_tokens": self.params["max_new_tokens"] - len(begun), "n": n}
        body = {"input_ids": self.prompt + begun, "sampling_params": params, "return_logprob": True}
        return body | self.evidence.request(params)


async def answer_all(asking: Asking, samples: list[Sample]) -> list[Sample]:
    """Answers to samples of one prompt; those that this run interrupted, to be continued later."""
    fresh = [sample for sample in samples if not sample.response_length]
    alone = samples
    if not asking.client.streams and len(fresh) > 1:
        alone = [sample for sample in samples if sample.response_length]
    jobs = [_alone(asking, sample) for sample in alone]
    if len(alone) < len(samples):
        jobs.append(_together(asking, fresh))
    return [sample for cut_off in await side_by_side(jobs) for sample in cut_off]


async def _together(asking: Asking, samples: list[Sample]) -> list[Sample]:
    """One request for several answers, which the engine computes the prompt for once."""
    before = asking.client.aborts
    found = await asking.client.generate(asking.body(None, len(samples)))
    for sample, one in zip(samples, found, strict=True):
        append(asking, sample, [one])
    cut_off = [sample for sample in samples if _interrupted(asking, sample, before)]
    if not cut_off or asking.ends():
        return cut_off
    return [sample for left in await side_by_side(_alone(asking, s) for s in cut_off) for sample in left]


async def _alone(asking: Asking, sample: Sample) -> list[Sample]:
    return [] if await answer(asking, sample) else [sample]


async def answer(asking: Asking, sample: Sample) -> bool:
    """The sample's answer, or the rest of it; False where this run interrupted it, and it is to be continued later."""
    while asking.params["max_new_tokens"] > sample.response_length:
        before = asking.client.aborts
        ask = asking.client.stream if asking.client.streams else asking.client.generate
        append(asking, sample, await ask(asking.body(sample)))
        if not _interrupted(asking, sample, before):
            return True
        if asking.ends():
            return False
    sample.status = Status.TRUNCATED
    return True


def _interrupted(asking: Asking, sample: Sample, aborts_before: int) -> bool:
    """By this run itself, and not by another process or at its very end."""
    if sample.status is not Status.ABORTED or asking.client.aborts == aborts_before:
        return False
    if sample.response_length >= asking.params["max_new_tokens"]:
        sample.status = Status.TRUNCATED
        return False
    return True


def append(asking: Asking, sample: Sample, pieces: list[Answer]) -> None:
    """Puts the pieces of one answer behind what the sample has. Raises EngineError when its evidence is incomplete."""
    begun = sample.response_length
    text_before = sample.response
    if not begun:
        sample.tokens = list(asking.prompt)
    answer = whole(pieces)
    spans = spans_of(answer)
    sample.append_spans(answer["output_ids"], spans, log_probs=log_probs_of(sample, answer), trained=True)
    for span in spans:
        if span.length and span.version and sample.weight_versions[-1:] != [span.version]:
            sample.weight_versions.append(span.version)
    asking.evidence.keep(sample, answer, asking.params)
    keep_drafts(sample, answer)
    sample.status = STATUS.get(answer["meta_info"]["finish_reason"]["type"], Status.FAILED)
    sample.response = text_before + answer["text"]
    if begun:
        _join(asking, sample, begun, text_before)


def _join(asking: Asking, sample: Sample, begun: int, text_before: str) -> None:
    """Repairs the text where two answers meet: a character whose bytes lie in both, and a stop text that begins in one
    and ends in the other, which no engine saw."""
    if asking.decode is None:
        return
    response = sample.tokens[len(sample.tokens) - sample.response_length :]
    sample.response = asking.decode(response)
    stops = asking.params.get("stop") or []
    for stop in [stops] if isinstance(stops, str) else stops:
        at = sample.response.find(stop, max(0, len(text_before) - len(stop) + 1))
        if stop and 0 <= at < len(text_before):
            upto = next(n for n in range(begun, len(response) + 1) if stop in asking.decode(response[:n])[at:])
            cut(sample, upto)
            sample.response = asking.decode(response[:upto])
            sample.status = Status.COMPLETED
            return


def cut(sample: Sample, length: int) -> None:
    """Leaves the first ``length`` response tokens of ``sample``, with all that is known of them."""
    gone = sample.response_length - length
    if not gone:
        return
    sample.tokens = sample.tokens[:-gone]
    sample.response_length = length
    for name in ("loss_mask", "rollout_log_probs", "teacher_log_probs"):
        if (values := getattr(sample, name)) is not None:
            setattr(sample, name, values[:length])
    if (offsets := sample.rollout_top_p_token_offsets) is not None:
        sample.rollout_top_p_token_offsets = offsets[: length + 1]
        sample.rollout_top_p_token_ids = (sample.rollout_top_p_token_ids or [])[: offsets[length]]
    if sample.rollout_routed_experts is not None:
        width = len(sample.rollout_routed_experts) // (len(sample.tokens) + gone - 1)
        sample.rollout_routed_experts = sample.rollout_routed_experts[: width * (len(sample.tokens) - 1)]
    spans = []
    for span in sample.spans:
        if length > 0:
            spans.append(span._replace(length=min(span.length, length)))
        length -= span.length
    sample.spans = spans


def mask_earlier_versions(sample: Sample) -> None:
    """Leaves only the tokens of the last version to be trained (``--mask-offpolicy-in-partial-rollout``)."""
    versions = [span.version for span in sample.spans if span.version is not None]
    if len({*versions}) > 1:
        mask = sample.loss_mask or [1] * sample.response_length
        own = [span.version == versions[-1] for span in sample.spans for _ in range(span.length)]
        sample.loss_mask = [value if kept else 0 for value, kept in zip(mask, own, strict=True)]
