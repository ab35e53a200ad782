"""Proof that engines hold a version, by the sums that they report of their own tensors. Torch-free until a cast is due.

An engine names its version (``/model_info``) and sums up each tensor that it holds (``/weights_checker``). Where one
rank holds the whole model on a CPU, those are SHA-256 over the same bytes that were published, so they are compared
with the version's manifest; a tensor that the engine fuses of several, pads or casts is read and summed up a chunk at a
time. Sums of tensor parallel ranks or of a GPU are of other bytes or by another function: nothing is read for those,
and engines are compared with each other. The proof says which of these was shown.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence

from slime_cli import engine_api
from slime_cli.errors import DataError, EngineError
from slime_cli.manifests.proof import Proof
from slime_cli.weights.transport import Version

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""How SGLang's dense models name what HF keeps apart, in the order in which they put it together, row under row."""
_PADDED = re.compile(r"(.*\.)?(embed_tokens|lm_head)\.weight")
_ROWS = 64
"""SGLang pads the vocabulary to a multiple of these."""
_CHECK_TIMEOUT = 1800.0


def reported(url: str) -> str | None:
    """The version that the engine says it holds."""
    return engine_api.get(url, "/model_info").get("weight_version")


def unchanged(held: Mapping[str, str]) -> None:
    """Raises EngineError when an engine (its URL) reports another version than the one that the caller sent it last."""
    for url, version in held.items():
        if (found := reported(url)) != version:
            raise EngineError(
                f"{url} holds weights {found!r}, which this run did not send (its last were {version!r}): "
                "another process updates this endpoint",
                "end that process, or use an endpoint of your own; the same command resumes from the last commit",
            )


def verify(version: Version, urls: Sequence[str]) -> list[Proof]:
    """One proof an engine. Raises EngineError when one reports another version, or other weights than were published or
    than another engine reports."""
    sums = Sums(version)
    first: list[dict[str, str]] | None = None
    proofs = []
    for url in urls:
        if (found := reported(url)) != version.name:
            raise EngineError(f"{url} reports weight version {found!r}, not {version.name!r}", "sync it again")
        ranks = _rank_sums(url)
        server = engine_api.get(url, "/server_info")
        comparable = len(ranks) == 1 and server.get("device") == "cpu"
        shown = comparable and _compare(url, sums, ranks[0], engine_api.dtype(server))
        if first is not None and ranks != first:
            raise EngineError(
                f"{url} and {urls[0]} hold different weights after loading {version.name}", "sync them again"
            )
        first = ranks
        less = "agreement" if len(urls) > 1 else "version"
        proofs.append(Proof(url, version.name, "checksum" if shown else less, sum(map(len, ranks))))
    return proofs


def _rank_sums(url: str) -> list[dict[str, str]]:
    """For each rank of the engine: tensor -> sum."""
    answer = engine_api.require(url, "/weights_checker", {"action": "checksum"}, _CHECK_TIMEOUT)
    return [rank["checksums"] for rank in answer.json()["ranks"]]


def _compare(url: str, sums: "Sums", held: dict[str, str], dtype: str) -> bool:
    """Whether every tensor was compared with a published one. Raises EngineError where one differs."""
    expected = {name: sums.of(name, dtype) for name in held}
    wrong = sorted(name for name, found in held.items() if expected[name] and found not in expected[name])
    if wrong:
        raise EngineError(
            f"{url} holds other weights than {sums.version.name} in {len(wrong)} tensors, {wrong[0]} first",
            "sync it again",
        )
    return all(expected.values())


class Sums:
    """What an unsharded engine on a CPU would report of a version's tensors, computed once for all engines."""

    def __init__(self, version: Version):
        self.version = version
        self._found: dict[tuple[str, str], frozenset[str]] = {}

    def of(self, name: str, dtype: str) -> frozenset[str]:
        """Sums that the engine's tensor ``name`` may have when it computes in ``dtype``; empty when no published tensor
        is known to be it. Two where the version has another dtype: engines keep some tensors (a router's bias) as they
        are.
        """
        if (name, dtype) not in self._found:
            self._found[name, dtype] = self._sums(name, dtype)
        return self._found[name, dtype]

    def _sums(self, name: str, dtype: str) -> frozenset[str]:
        tensors = self.version.manifest.tensors
        parts = parts_of(name)
        if any(part not in tensors for part in parts):
            return frozenset()
        published = {tensors[part].dtype for part in parts}
        dtypes = published if dtype == "auto" else {dtype, *published}
        padding = _padding(name, tensors[parts[0]].shape)
        return frozenset(self._sum(parts, wanted, padding) for wanted in dtypes)

    def _sum(self, parts: Sequence[str], dtype: str, padding: int) -> str:
        tensors = self.version.manifest.tensors
        if len(parts) == 1 and not padding and tensors[parts[0]].dtype == dtype:
            return tensors[parts[0]].checksum
        whole = hashlib.sha256()
        size = 0
        for part in parts:
            for chunk in self._chunks(part):
                held = cast(chunk, tensors[part].dtype, dtype)
                whole.update(held)
                size += len(held)
        whole.update(bytes(size // tensors[parts[0]].shape[0] * padding if padding else 0))
        return shortened(whole)

    def _chunks(self, tensor: str) -> Iterator[bytes]:
        """Raises DataError when what is read is not what was published."""
        found = hashlib.sha256()
        for chunk in self.version.chunks(tensor):
            found.update(chunk)
            yield chunk
        if shortened(found) != self.version.manifest.tensors[tensor].checksum:
            raise DataError(
                f"{self.version.name}: {tensor} is not what was published, its bytes have changed since",
                "publish the version again",
            )


def parts_of(name: str) -> list[str]:
    """HF names of the tensors that the engine's tensor ``name`` is made of."""
    for fused, parts in FUSED.items():
        if f".{fused}." in name:
            return [name.replace(fused, part) for part in parts]
    return [name]


def _padding(name: str, shape: Sequence[int]) -> int:
    """Rows of zeros that the engine adds."""
    return -shape[0] % _ROWS if shape and _PADDED.fullmatch(name) else 0


def cast(chunk: bytes, dtype: str, wanted: str) -> bytes:
    """Whole elements of one dtype as those of another, rounded as torch does."""
    if dtype == wanted:
        return chunk
    import torch

    elements = torch.frombuffer(bytearray(chunk), dtype=getattr(torch, dtype))
    return elements.to(getattr(torch, wanted)).view(torch.uint8).numpy().tobytes()


def shortened(hashed: "hashlib._Hash") -> str:
    """As manifests and the engines' weight checker write a sum: its first 8 bytes in hex."""
    return hashed.digest()[:8].hex()
