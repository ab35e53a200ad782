"""Proof that an engine holds the version that was sent to it. Torch-free.

Made by whoever verifies a version (``slime sync``, the loop's publisher); read by the report of a run.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

Kind = Literal["checksum", "log_probs", "agreement", "version"]

SHOWN: dict[Kind, str] = {
    "checksum": "every tensor's checksum equals the published one",
    "log_probs": "its log-probabilities of a probe with this adapter are the trainer's",
    "agreement": "all engines hold the same weights, which were not compared with the published ones",
    "version": "the engine names this version, and its weights were compared with nothing",
}


@dataclasses.dataclass(frozen=True)
class Proof:
    """The proof of one engine."""

    url: str
    version: str
    kind: Kind
    """:data:`SHOWN` says what it means."""
    tensors: int


def verified(proofs: Sequence[Proof]) -> bool | str | None:
    """The result for all engines together: True where each was compared with what was published, "log_probs" where what
    they compute was compared with what the trainer does, "agreement" where some were compared with one another only,
    None where nothing but the version's name was shown."""
    kinds = {proof.kind for proof in proofs}
    if kinds == {"checksum"}:
        return True
    if kinds == {"log_probs"}:
        return "log_probs"
    return "agreement" if kinds and kinds <= {"checksum", "agreement"} else None
