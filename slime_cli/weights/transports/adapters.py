"""LoRA adapters under names of their own: PEFT folders that engines load beside their base, which never changes.

``/load_lora_adapter`` loads a version under a name that has its number and a digest of its bytes, every request asks
for that name (``lora_path``), and an engine refuses one that it never had. What an engine computes with it is compared
with what the trainer computed when it wrote the version: log-probabilities of a probe. Torch-free.

The version before is unloaded once the new one is there. Stock SGLang (0.5.16) unloads when an adapter's requests have
ended, and does not count those that it aborted before they began: then it waits for ever, and loads no other. So what
aborts requests is refused beside this transport, and adapters that others left in an engine stay there.
"""

import hashlib
import math
import pathlib
from collections.abc import Sequence

from slime_cli import engine_api, manifests
from slime_cli.errors import EngineError
from slime_cli.manifests import layout
from slime_cli.manifests.proof import Proof
from slime_cli.weights.folder import Folder, as_folder, if_whole, opened, remove
from slime_cli.weights.transport import Learner, Version, Writing

TIMEOUT = 600.0
BOUNDS = {"float32": 1e-3}
"""The largest difference of a log-probability of the probe, by the type that an engine computes in."""
OTHERWISE = 0.5


class Adapters:
    """The versions of one phase. ``folder`` is the phase's; ``newest`` of them stay, whether they are needed or not."""

    name = "adapters"
    can_go_back = True

    def __init__(self, folder: pathlib.Path, newest: int) -> None:
        self.folder = folder
        self.newest = newest
        self._loaded: dict[str, str] = {}
        """Engine -> the adapter that it was sent last."""

    def write(self, learner: Learner, step: int) -> Folder:
        path = layout.version(self.folder, step)
        learner.publish(str(path), path.name, Writing(encoding="adapter"))
        return opened(path)

    def send(self, version: Version, engines: Sequence[str], *, flush: bool) -> None:
        folder = as_folder(version)

        adapter = self.asked_for(version)

        def one(url: str) -> None:
            if adapter not in loaded(url):
                body = {"lora_name": adapter, "lora_path": str(folder.path.resolve())}
                _post(url, "/load_lora_adapter", body)
            body = {"new_version": folder.name, "abort_all_requests": False}
            engine_api.require(url, "/update_weight_version", body, TIMEOUT)
            before = self._loaded.get(url, adapter)
            self._loaded[url] = adapter
            if before != adapter:
                _post(url, "/unload_lora_adapter", {"lora_name": before})
            if flush:
                engine_api.flush(url)

        engine_api.each(engines, one)

    def asked_for(self, version: Version) -> str:
        return layout.adapter_name(version.name, _digest(version.manifest))

    def verify(self, version: Version, engines: Sequence[str]) -> list[Proof]:
        folder = as_folder(version)
        probe = manifests.read(folder.path / layout.PROBE, manifests.Probe)
        return engine_api.each(engines, lambda url: _proof(url, folder, self.asked_for(version), probe))

    def kept(self, step: int) -> Folder | None:
        found = if_whole(layout.version(self.folder, step))
        return found if found and found.manifest.encoding == "adapter" else None

    def restore(self, version: Version, learner: Learner) -> None:
        raise AssertionError("--keep-old-actor is refused with adapters")

    def prune(self, keep: set[str]) -> None:
        for path in layout.versions(self.folder)[: -self.newest or None]:
            if path.name not in keep:
                remove(path)

    def close(self) -> None:
        pass


def loaded(url: str) -> list[str]:
    """Names of the adapters that an engine has."""
    found = engine_api.get(url, "/v1/models").get("data") or []
    return [str(model["id"]) for model in found if model.get("parent")]


def _digest(manifest: manifests.Weights) -> str:
    """Hex digits that follow from the tensors, by name."""
    sums = "".join(f"{name}{tensor.checksum}" for name, tensor in sorted(manifest.tensors.items()))
    return hashlib.sha256(sums.encode()).hexdigest()


def _post(url: str, path: str, body: dict[str, str]) -> None:
    """Raises EngineError unless the engine did it."""
    answer = engine_api.post(url, path, body, TIMEOUT)
    try:
        said = answer.json()
    except ValueError:
        said = {}
    if answer.status_code != 200 or not said.get("success"):
        why = said.get("error_message") or answer.text.strip()[:300]
        raise EngineError(f"{url}{path}: {body['lora_name']}: {why}", "see the engine's log")


def _proof(url: str, version: Folder, adapter: str, probe: manifests.Probe) -> Proof:
    """Raises EngineError where the engine names another version or computes something else than the trainer did."""
    found = engine_api.get(url, "/model_info").get("weight_version")
    if found != version.name:
        raise EngineError(f"{url} reports weight version {found!r}, not {version.name!r}", "sync it again")
    body = {
        "input_ids": probe.tokens,
        "lora_path": adapter,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    answer = engine_api.require(url, "/generate", body, TIMEOUT).json()
    theirs = [entry[0] for entry in answer["meta_info"]["input_token_logprobs"]][1:]
    if len(theirs) != len(probe.log_probs):
        message = f"{url}: {len(theirs)} log-probabilities of a probe of {len(probe.tokens)} tokens"
        raise EngineError(message, "this is a defect: report it")
    bound = BOUNDS.get(engine_api.dtype(engine_api.get(url, "/server_info")), OTHERWISE)
    gaps = [abs(a - b) for a, b in zip(theirs, probe.log_probs, strict=True)]
    worst = max(gaps, key=lambda gap: (math.isnan(gap), gap))
    if not worst <= bound:
        raise EngineError(
            f"{url} computes something else with adapter {adapter} than the trainer did: log-probabilities of"
            f" {len(theirs)} tokens differ by up to {worst:.3g}, and {bound:g} is what rounding may make of them",
            "do engine and trainer have the same base? --lora-sync merged sends whole weights and compares checksums",
        )
    return Proof(url, version.name, "log_probs", len(version.manifest.tensors))
