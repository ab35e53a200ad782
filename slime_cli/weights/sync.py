"""Getting published weights into the engines of an endpoint, and proof that they arrived.

The engines load the version from disk (stock ``/update_weights_from_disk``). Proof: each engine reports the version,
and its weight checker's sum of every tensor equals the sum computed from the published file. Where an engine's layout
or device makes those sums incomparable (tensor parallel engines, the hash of a GPU), all engines must still agree
with each other, where there are several; the result says which of these was shown.
"""

import concurrent.futures
import pathlib

import httpx
import torch
from safetensors.torch import load_file

from slime_cli import manifests
from slime_cli.errors import EngineError
from slime_cli.manifests.proof import Proof
from slime_cli.weights import publish
from slime_cli.weights.matching import ask


def unchanged(urls: list[str], version: str) -> None:
    """Raises EngineError when an engine holds other weights than the ``version`` that the caller sent it last."""
    for url in urls:
        found = ask(url + "/model_info").get("weight_version")
        if found != version:
            raise EngineError(
                f"{url} holds weights {found!r}, which this run did not send (its last were {version!r}): "
                "another process updates this endpoint",
                "end that process, or use an endpoint of your own; the same command resumes from the last commit",
            )


def _post(url: str, path: str, body: dict, timeout: float = 1800) -> dict:
    try:
        answer = httpx.Client(trust_env=False, timeout=timeout).post(url + path, json=body)
    except httpx.HTTPError as error:
        raise EngineError(f"{url}{path}: {type(error).__name__}: {error}", "is the engine still running?") from None
    if answer.status_code != 200:
        raise EngineError(f"{url}{path} answered {answer.status_code}: {answer.text[:300]}")
    return answer.json()


def load(urls: list[str], folder: pathlib.Path, version: str) -> None:
    """Every engine loads ``folder``. Raises EngineError naming the engine that could not."""
    body = {"model_path": str(folder.resolve()), "weight_version": version, "flush_cache": True}

    def one(url: str) -> None:
        result = _post(url, "/update_weights_from_disk", body)
        if not result.get("success"):
            raise EngineError(f"{url} could not load {folder}: {result.get('message')}")

    with concurrent.futures.ThreadPoolExecutor(max(len(urls), 1)) as pool:
        list(pool.map(one, urls))


def verify(urls: list[str], folder: pathlib.Path, version: str) -> list[Proof]:
    """Raises EngineError when an engine reports another version or other weights than those published."""
    manifest = manifests.read(folder / "manifest.json", manifests.Weights)
    named: dict[str, torch.Tensor] = {}
    for file in sorted({t.file for t in manifest.tensors.values()}):
        named |= load_file(folder / file)
    expected: dict[str, str | None] = {}
    proofs = []
    first = None
    for url in urls:
        found = ask(url + "/model_info").get("weight_version")
        if found != version:
            raise EngineError(f"{url} reports weight version {found!r}, not {version!r}", "sync it again")
        ranks = _post(url, "/weights_checker", {"action": "checksum"})["ranks"]
        sums = [rank["checksums"] for rank in ranks]
        server = ask(url + "/server_info")
        comparable = len(sums) == 1 and server.get("device") == "cpu"
        if comparable:
            dtype = _dtype(server, named)
            for name in sums[0]:
                if name not in expected:
                    tensor = publish.as_engine(named, name, dtype)
                    expected[name] = None if tensor is None else publish.checksum(tensor)
            wrong = sorted(n for n, s in sums[0].items() if expected[n] is not None and expected[n] != s)
            if wrong:
                raise EngineError(
                    f"{url} holds other weights than {folder} in {len(wrong)} tensors, {wrong[0]} first",
                    "sync it again",
                )
            comparable = all(expected[n] is not None for n in sums[0])
        if first is not None and sums != first:
            raise EngineError(f"{url} and {urls[0]} hold different weights after loading {version}", "sync them again")
        first = sums
        less = "agreement" if len(urls) > 1 else "version"
        proofs.append(Proof(url, version, "checksum" if comparable else less, sum(map(len, sums))))
    return proofs


def _dtype(info: dict, named: dict[str, torch.Tensor]) -> torch.dtype:
    name = str(info.get("dtype", "auto"))
    return next(iter(named.values())).dtype if name == "auto" else getattr(torch, name.removeprefix("torch."))
