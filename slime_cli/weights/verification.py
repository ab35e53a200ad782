"""Proof that engines hold a version, by the sums that they report of their own tensors. Torch-free until a cast is due.

An engine names its version (``/model_info``) and sums up each tensor that each of its ranks holds
(``/weights_checker``). What a rank should hold follows from the version: its tensors are read a chunk at a time, cut,
fused, padded and cast as the engine does (:mod:`slime_cli.weights.held`), and summed up by the engine's own function
(:mod:`slime_cli.weights.sums`); on one CPU rank most of that is in the manifest already. FP8 in blocks is summed up as
what it stands for (:mod:`slime_cli.weights.dequantised`). Where layout or function are not known, other quantised
models and mixtures of experts among them, nothing is read and engines are compared with each other. The proof says
which of these was shown: agreement is not equality with what was published.
"""

import concurrent.futures
import functools
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from slime_cli import engine_api
from slime_cli.errors import EngineError
from slime_cli.manifests.proof import Proof
from slime_cli.models import architecture
from slime_cli.weights import held, sums
from slime_cli.weights.dequantised import Dequantised, summed_up
from slime_cli.weights.held import Rank
from slime_cli.weights.reading import checked
from slime_cli.weights.transport import Version

_CHECK_TIMEOUT = 1800.0
_FLOATS = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Dtypes in which an engine keeps a tensor as it was sent, or casts it; bytes of an element."""
_OTHER_LAYOUTS = {"enable_dp_attention": False, "ep_size": 1, "moe_dense_tp_size": None}
"""Options of an engine by which its ranks share tensors in other ways than :mod:`slime_cli.weights.held` knows."""


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


class Expected(Protocol):
    """What the ranks of an engine would report of a version's tensors."""

    @property
    def name(self) -> str:
        """The version's."""
        ...

    @property
    def plain(self) -> bool:
        """Nothing is quantised: an engine repacks such tensors, or sums up what they stand for."""
        ...

    def all(
        self, names: Sequence[str], dtype: str, function: type[sums.Sum], ranks: Sequence[Rank]
    ) -> dict[str, list[frozenset[str]]]:
        """For each of the engine's tensors ``names`` and each rank the sums that it may have when the engine computes
        in ``dtype``; empty when no published tensor is known to be it. Two where the version has another dtype: engines
        keep some tensors (a router's bias) as they are."""
        ...

    def rescaled(self, name: str) -> bool:
        """An engine may make weights with other scales of this one (FP8 on Blackwell's GPUs). Where all of these differ
        from what was published and all others agree, it has, and nothing is shown."""
        ...


def verify(version: Version, urls: Sequence[str], expected: Expected | None = None) -> list[Proof]:
    """One proof an engine. Raises EngineError when one reports another version, or other weights than were published or
    than another engine reports. ``expected``: in place of what is read of the version."""
    expected = expected or Sums(version)
    first: list[dict[str, str]] | None = None
    proofs = []
    for url, (info, answer, server) in zip(urls, engine_api.each(urls, lambda url: _asked(url, version.name))):
        ranks = [rank["checksums"] for rank in answer]
        shown = _compare(url, expected, answer, server, info.get("model_path") or "")
        if first is not None and ranks != first:
            raise EngineError(
                f"{url} and {urls[0]} hold different weights after loading {version.name}", "sync them again"
            )
        first = ranks
        less = "agreement" if len(urls) > 1 else "version"
        proofs.append(Proof(url, version.name, "checksum" if shown else less, sum(map(len, ranks))))
    return proofs


def _asked(url: str, version: str) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
    """The engine's model, the sums of each of its ranks, and its options."""
    info = engine_api.get(url, "/model_info")
    if (found := info.get("weight_version")) != version:
        raise EngineError(f"{url} reports weight version {found!r}, not {version!r}", "sync it again")
    answer = engine_api.require(url, "/weights_checker", {"action": "checksum"}, _CHECK_TIMEOUT).json()["ranks"]
    return info, answer, engine_api.get(url, "/server_info")


def _compare(url: str, expected: Expected, answer: list[dict[str, Any]], server: dict[str, Any], model: str) -> bool:
    """Whether every tensor of every rank was compared with published ones. Raises EngineError where one differs."""
    function = sums.function(server)
    ranks = _ranks(answer, server, model)
    if function is None or ranks is None or not expected.plain:
        return False
    dtype = engine_api.dtype(server)
    names = sorted({name for rank in answer for name in rank["checksums"]})
    found = expected.all(names, dtype, function, ranks)
    wrong: set[str] = set()
    for index, rank in enumerate(answer):
        wrong |= {n for n, s in rank["checksums"].items() if found[n][index] and s not in found[n][index]}
    if wrong and wrong == {name for name in names if expected.rescaled(name)}:
        return False  # by the engine: see Expected
    if wrong:
        raise EngineError(
            f"{url} holds other weights than {expected.name} in {len(wrong)} tensors, {min(wrong)} first",
            "sync it again",
        )
    return all(found[name][index] for index, rank in enumerate(answer) for name in rank["checksums"])


def _ranks(answer: list[dict[str, Any]], server: dict[str, Any], model: str) -> list[Rank] | None:
    """The engine's ranks; None where it is not known how they share tensors."""
    if any(server.get(option, plain) != plain for option, plain in _OTHER_LAYOUTS.items()):
        return None
    if len(answer) == 1:
        return [Rank()]
    told = [rank.get("parallelism_info") for rank in answer]
    if not all(told):
        return None
    heads = _kv_heads(model)
    if server.get("device") == "cpu" and (not heads or any(heads % one["tp_size"] for one in told if one)):
        return None  # SGLang adds heads of zeros on a CPU until they divide
    return [Rank(one["tp_rank"], one["tp_size"], heads) for one in told if one]


@functools.cache
def _kv_heads(model: str) -> int:
    """Heads of keys and values of the model in a folder; 0 where it cannot be read here."""
    if not (pathlib.Path(model) / "config.json").is_file():
        return 0
    config = architecture.read_config(model)
    return config.get("num_key_value_heads") or config.get("num_attention_heads") or 0


class Sums:
    """What the ranks of an engine would report of a version's tensors, computed once for all engines."""

    def __init__(self, version: Version):
        self.version = summed_up(version)
        self.plain = all(tensor.dtype in _FLOATS for tensor in self.version.manifest.tensors.values())
        self._found: dict[tuple, list[frozenset[str]]] = {}

    @property
    def name(self) -> str:
        return self.version.name

    def all(
        self, names: Sequence[str], dtype: str, function: type[sums.Sum], ranks: Sequence[Rank]
    ) -> dict[str, list[frozenset[str]]]:
        # A manifest has most sums of a CPU; on a GPU each tensor is read and summed up, on as many cores as there are.
        workers = 1 if function is sums.Sha else min(8, os.cpu_count() or 1)
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            found = pool.map(lambda name: self.of(name, dtype, function, ranks), names)
            return dict(zip(names, found, strict=True))

    def rescaled(self, name: str) -> bool:
        scales = self.version.scales if isinstance(self.version, Dequantised) else {}
        return any(part in scales for part in held.parts_of(name))

    def of(self, name: str, dtype: str, function: type[sums.Sum], ranks: Sequence[Rank]) -> list[frozenset[str]]:
        """:meth:`all` of one tensor."""
        key = (name, dtype, function, tuple(ranks))
        if key not in self._found:
            self._found[key] = self._sums(name, dtype, function, ranks)
        return self._found[key]

    def _sums(self, name: str, dtype: str, function: type[sums.Sum], ranks: Sequence[Rank]) -> list[frozenset[str]]:
        tensors = self.version.manifest.tensors
        parts = held.parts_of(name)
        if any(part not in tensors for part in parts):
            return [frozenset()] * len(ranks)
        cuts = [tuple(held.cut(part, tensors[part].shape, rank) for part in parts) for rank in ranks]
        known = [cut for cut in dict.fromkeys(cuts) if None not in cut]
        published = {tensors[part].dtype for part in parts}
        if dtype == "auto" and isinstance(self.version, Dequantised):
            dtype = self.version.dtype
        dtypes = published if dtype == "auto" else {dtype, *published}
        found = [dict(zip(known, self._of_cuts(parts, known, wanted, function), strict=True)) for wanted in dtypes]
        return [frozenset(by_cut[cut] for by_cut in found if cut in by_cut) for cut in cuts]

    def _of_cuts(
        self, parts: Sequence[str], cuts: Sequence[tuple[Any, ...]], dtype: str, function: type[sums.Sum]
    ) -> list[str]:
        """The sum of each of ``cuts`` (one of every part) in ``dtype``. Every part is read once."""
        first = self.version.manifest.tensors[parts[0]]
        whole = held.Cut(0, 0, first.shape[0] if first.shape else 1)
        if (
            function is sums.Sha
            and len(parts) == 1
            and (first.dtype, set(cuts)) == (dtype, {(whole,)})
            and first.checksum
        ):
            return [first.checksum] * len(cuts)
        out = [function() for _ in cuts]
        for place, part in enumerate(parts):
            tensor = self.version.manifest.tensors[part]
            wanted = [cut[place] for cut in cuts]
            for index, piece in held.kept(checked(self.version, part), tensor.shape, _FLOATS[tensor.dtype], wanted):
                out[index].update(cast(piece, tensor.dtype, dtype))
        return [found.text() for found in out]


def cast(chunk: bytes, dtype: str, wanted: str) -> bytes:
    """Whole elements of one dtype as those of another, rounded as torch does."""
    if dtype == wanted:
        return chunk
    import torch

    elements = torch.frombuffer(bytearray(chunk), dtype=getattr(torch, dtype))
    return elements.to(getattr(torch, wanted)).view(torch.uint8).numpy().tobytes()
