"""Weights through a folder that trainer and engines both see: HF safetensors, loaded by ``/update_weights_from_disk``.

With ``local`` the engines load a copy near them in place of it. Torch-free.
"""

import pathlib
from collections.abc import Callable, Sequence

from slime_cli import engine_api, manifests
from slime_cli.errors import EngineError
from slime_cli.manifests import layout
from slime_cli.manifests.proof import Proof
from slime_cli.models import schemes
from slime_cli.weights import verification
from slime_cli.weights.applying import Copy
from slime_cli.weights.folder import Folder, as_folder, if_whole, opened, remove
from slime_cli.weights.transport import BUFFER, SPOILT, Learner, Version, Writing

LOAD_TIMEOUT = 1800.0


class Disk:
    """The versions of one phase. ``folder`` is the phase's; ``newest`` of them stay, whether they are needed or not."""

    name = "disk"
    can_go_back = True

    def __init__(
        self,
        folder: pathlib.Path,
        newest: int,
        *,
        local: pathlib.Path | None = None,
        buffer: int = BUFFER,
        say: Callable[[str], None] = print,
    ) -> None:
        self.folder = folder
        self.newest = newest
        self.buffer = buffer
        self.copy = Copy(local / layout.APPLIED, say) if local else None

    def write(self, learner: Learner, step: int) -> Folder:
        path = layout.version(self.folder, step)
        learner.publish(str(path), path.name, Writing(buffer=self.buffer))
        return opened(path)

    def send(self, version: Version, engines: Sequence[str], *, flush: bool) -> None:
        near = as_folder(version)
        load(self.copy.bring([near]) if self.copy else near, engines, flush=flush)

    def asked_for(self, version: Version) -> None:
        return None

    def verify(self, version: Version, engines: Sequence[str]) -> list[Proof]:
        return verification.verify(version, engines)

    def kept(self, step: int) -> Folder | None:
        return if_whole(layout.version(self.folder, step))

    def restore(self, version: Version, learner: Learner) -> None:
        learner.load_published(str(as_folder(version).path))

    def prune(self, keep: set[str]) -> None:
        for path in layout.versions(self.folder)[: -self.newest or None]:
            if path.name not in keep:
                remove(path)

    def close(self) -> None:
        if self.copy:
            self.copy.close()


def load(version: Folder, engines: Sequence[str], *, flush: bool) -> None:
    """Every engine loads the version from its folder. Raises EngineError that names those that could not.

    An engine that is not paused finishes its requests before. It never flushes within the update: then it ends by an
    assertion when anything is in it, be it paused requests or a health check that has just been answered (SGLang
    0.5.16). ``flush`` therefore asks for it afterwards, and waits for what is about to end.
    """
    quantised = bool(schemes.settings(manifests.read_json(version.path / "config.json")))

    def one(url: str) -> None:
        if quantised and (ranks := _reloading_ranks(url)):
            _reload(version, url, ranks)
        else:
            _update(version, url)
        if flush:
            engine_api.flush(url)

    engine_api.each(engines, one)


def _update(version: Folder, url: str) -> None:
    """By SGLang's own loader."""
    body = {"model_path": str(version.path.resolve()), "weight_version": version.name, "flush_cache": False}
    answer = engine_api.post(url, "/update_weights_from_disk", body, LOAD_TIMEOUT)
    try:
        said = answer.json()
    except ValueError:
        said = {"message": f"{answer.status_code} {answer.text[:300]}"}
    if not said.get("success"):
        raise EngineError(f"{url} could not load {version.path}: {said.get('message')}", "see the engine's log")


def _reloading_ranks(url: str) -> int:
    """Ranks of an engine that was started with slime's loader of quantised weights; 0 of another."""
    server = engine_api.get(url, "/server_info")
    known = engine_api.has_loader(server, engine_api.RELOADER)
    return int(server.get("tp_size") or 1) if known else 0


def _reload(version: Folder, url: str, ranks: int) -> None:
    """By :mod:`slime_cli.weights.reloading`. The engine reports no version that it has a part of."""
    from slime_cli.weights import shared

    text = shared.folder(str(version.path.resolve()))
    spoilt = {"new_version": version.name + SPOILT, "abort_all_requests": False}
    engine_api.require(url, "/update_weight_version", spoilt, LOAD_TIMEOUT)
    body = {
        "serialized_named_tensors": [text] * ranks,
        "load_format": engine_api.RELOADER,
        "flush_cache": False,
        "weight_version": version.name,
        "disable_draft_model": True,
    }
    engine_api.require(url, "/update_weights_from_tensor", body, LOAD_TIMEOUT)
