"""Evidence of an answer beside the log-probabilities: the tokens that top-p left, the experts that routers chose.

The options ask for it (``--use-top-p-replay``, ``--use-rollout-routing-replay``), and both slime's own generation and
the client of users' functions request it and keep it here. Loads no library of arrays before there is evidence: a dry
run imports this.
"""

import base64
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from slime_cli.buffer.types import Sample
from slime_cli.errors import EngineError


@dataclasses.dataclass(frozen=True)
class Evidence:
    """Nothing more is asked for where neither is set."""

    top_p_replay: bool = False
    """The tokens that ``top_p`` and ``top_k`` of the sampling parameters leave; only where ``top_k`` bounds them."""
    experts_shape: Sequence[int] | None = None
    """[layers, experts a token]: the experts that the routers chose."""

    def request(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of a request with these sampling parameters."""
        from slime_cli.hooks import nucleus

        asked: dict[str, Any] = nucleus.request(params["top_k"]) if self._cuts(params) else {}
        return asked | ({"return_routed_experts": True} if self.experts_shape else {})

    def keep(self, sample: Sample, answer: Mapping[str, Any], params: Mapping[str, Any]) -> None:
        """Puts what ``answer`` tells into ``sample``, which has its tokens already; nothing where it was aborted before
        its first token. Raises EngineError when it tells less than was asked for."""
        from slime_cli.hooks import nucleus

        if not answer["output_ids"]:
            return
        if self._cuts(params):
            nucleus.extend(sample, answer, params.get("top_p", 1.0))
        if self.experts_shape:
            _keep_experts(sample, answer, self.experts_shape)

    def _cuts(self, params: Mapping[str, Any]) -> bool:
        return self.top_p_replay and params.get("top_k", -1) > 0


NOTHING = Evidence()


def _keep_experts(sample: Sample, answer: Mapping[str, Any], shape: Sequence[int]) -> None:
    """Experts of tokens that an earlier request had written stay: a later one chose anew for them, with other weights.

    Raises EngineError when the engine tells nothing of them, or of another model.
    """
    import numpy as np

    encoded = answer["meta_info"].get("routed_experts")
    if encoded is None:
        raise EngineError(
            f"sample {sample.index}: the engine does not say which experts it chose",
            "start it with --sglang-enable-return-routed-experts (slime serve-rollout takes it too)",
        )
    chosen = np.frombuffer(base64.b64decode(encoded), "<i4")
    expected = (len(sample.tokens) - 1) * shape[0] * shape[1]
    if len(chosen) != expected or not 0 <= chosen.min(initial=0) <= chosen.max(initial=0) < 2**15:
        raise EngineError(
            f"sample {sample.index}: {len(chosen)} chosen experts for {len(sample.tokens)} tokens of {shape}, not"
            f" {expected}"
        )
    known = sample.rollout_routed_experts or b""
    sample.rollout_routed_experts = known + chosen.astype("<i2").tobytes()[len(known) :]
    sample.routed_experts_shape = list(shape)
