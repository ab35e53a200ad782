"""The tokens that top-p and top-k left to choose from at each position, and the probability of the choice among them.

Stock SGLang samples from the cut distribution and reports log-probabilities of the whole one. It can list the tokens
that were left (``return_sampling_mask``), but its router drops that field of a request; so the cut is made again here,
from the ``--rollout-top-k`` most likely tokens, which both pass on. Whatever top-p leaves is among those. The numbers
are the sampler's own, rounded to float32 once more on their way: a token on the very edge of the mass may be judged
otherwise than it was, but trainer and rollout then judge it alike, and the sampled token is always in.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from slime_cli.buffer.types import Sample
from slime_cli.errors import EngineError


def request(top_k: int) -> dict[str, Any]:
    """Fields of a request that :func:`extend` needs in the answer."""
    return {"top_logprobs_num": top_k}


def cut(log_probs_K: np.ndarray, top_p: float) -> np.ndarray:
    """bool [K] over the most likely tokens in falling order: SGLang keeps those before which at most ``top_p`` has
    gone."""
    p_K = np.exp(log_probs_K.astype(np.float32))
    return np.cumsum(p_K, dtype=np.float32) - p_K <= np.float32(top_p)


def extend(sample: Sample, answer: Mapping[str, Any], top_p: float) -> None:
    """Gives ``sample`` the tokens kept at each position of ``answer``, which was appended to it just before, and takes
    the log-probabilities of those positions anew, among them."""
    tops = answer["meta_info"].get("output_top_logprobs")
    count = len(answer["output_ids"])
    if tops is None or len(tops) != count:
        raise EngineError(f"sample {sample.index}: {count} tokens but the most likely tokens of {tops and len(tops)}")
    first = sample.response_length - count
    ids = list(sample.rollout_top_p_token_ids or [])
    offsets = list(sample.rollout_top_p_token_offsets or [0])[: first + 1]
    offsets += [offsets[-1]] * (first + 1 - len(offsets))  # positions that nobody sampled keep nothing
    log_probs = list(sample.rollout_log_probs or [])
    for place, (token, top) in enumerate(zip(answer["output_ids"], tops), first):
        values_K = np.array([entry[0] for entry in top], np.float64)
        kept = {entry[1]: value for entry, value, stays in zip(top, values_K, cut(values_K, top_p)) if stays}
        kept.setdefault(token, log_probs[place])
        ids += kept
        offsets.append(len(ids))
        log_probs[place] = float(log_probs[place] - np.logaddexp.reduce(list(kept.values())))
    sample.rollout_top_p_token_ids = ids
    sample.rollout_top_p_token_offsets = offsets
    sample.rollout_log_probs = log_probs
