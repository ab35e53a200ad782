"""Versions into the engines of an endpoint, one after the other, and back: what ``slime sync`` does. Torch-free.

A record beside ``endpoint.json`` (:class:`slime_cli.manifests.Synced`) says which versions the engines were given, so
that a push that fails can put the one before back, and one that was killed is known. What an engine holds is asked of
the engine; the record only says where such a version lies. The caller holds the endpoint's claim.
"""

import pathlib
from collections.abc import Callable, Sequence

import msgspec

from slime_cli import engine_api, manifests
from slime_cli.errors import DataError, EngineError
from slime_cli.manifests import layout
from slime_cli.manifests.proof import Proof, verified
from slime_cli.weights import applying, verification
from slime_cli.weights.folder import Folder, if_whole, opened
from slime_cli.weights.transports.disk import load

FIRST = "default"
"""What an engine calls the weights that it was started with."""


class Pushing:
    """``record``: the file; ``endpoint``: its manifest; ``urls``: engines that answer."""

    def __init__(
        self, record: pathlib.Path, endpoint: manifests.Endpoint, urls: Sequence[str], say: Callable[[str], None]
    ) -> None:
        self.record = record
        self.endpoint = endpoint
        self.urls = list(urls)
        self.say = say
        self._copy: applying.Copy | None = None
        self.state = manifests.read(record, manifests.Synced) if record.exists() else manifests.Synced()

    def push(self, version: Folder) -> list[Proof]:
        """Every engine holds ``version``, proven; those that show that they do already are left alone. When that cannot
        be had, those that answer get the version before again, and EngineError says what each engine holds."""
        if self.state.pending is not None and self.state.pending.version != version.name:
            self.say(f"a push of {self.state.pending.version} was not finished")
        before = self._before()
        left = [url for url in self.urls if not self._has(version, url)]
        if not left:
            self.say(f"{len(self.urls)} engine(s) hold {version.name} already")
        given = manifests.Pushed(version=version.name, folder=str(version.path.resolve()))
        self._write(pending=given)
        try:
            self._load(version, left)
            proofs = verification.verify(self._whole(version), self.urls)
        except EngineError as error:
            raise self._back(error, version, before) from None
        history = [known for known in self.state.history if known.version != given.version]
        if before is not None and before.name != given.version and (not history or history[-1].version != before.name):
            history.append(manifests.Pushed(version=before.name, folder=str(before.path)))
        self._write(history=[*history, given])
        return proofs

    def verify(self, version: Folder) -> list[Proof]:
        """What every engine shows of ``version``. Raises EngineError for one that holds something else."""
        return verification.verify(self._whole(version), self.urls)

    def rollback(self) -> list[Proof]:
        """Every engine holds the version before the last one, proven."""
        history = self.state.history
        if len(history) < 2:
            raise DataError(
                f"{self.record}: no version before is recorded", "slime sync push --load DIR sends any version"
            )
        version = self._open(history[-2])
        self._load(version, self.urls)
        proofs = verification.verify(self._whole(version), self.urls)
        self._write(history=history[:-1])
        return proofs

    def held(self) -> Folder:
        """The version that the engines name, wherever it lies. Raises EngineError where they name several, DataError
        for one that is not known here."""
        names = self.names()
        if len(set(names.values())) > 1:
            raise EngineError(
                f"the engines hold different versions: {_listed(names)}", "slime sync push sends one to all"
            )
        name = next(iter(names.values()))
        if (found := self._known(name)) is None:
            raise DataError(f"the engines hold {name}, and where that lies is not known here", "name it: --load DIR")
        return found

    def names(self) -> dict[str, str | None]:
        """What each engine says that it holds; None for one that does not answer."""
        return {url: _reported(url) for url in self.urls}

    def _before(self) -> Folder | None:
        """What all engines hold, if that can be sent again."""
        names = set(self.names().values())
        return self._known(names.pop()) if len(names) == 1 else self._last()

    def _last(self) -> Folder | None:
        """Engines that hold several versions: the last one that all of them had."""
        return self._known(self.state.history[-1].version) if self.state.history else None

    def _known(self, name: str | None) -> Folder | None:
        for pushed in reversed(self.state.history):
            if pushed.version == name:
                try:
                    return self._open(pushed)
                except DataError:
                    return None
        if name and (beside := if_whole(self.record.parent / layout.WEIGHTS / name, name)):
            return beside
        if name == FIRST and pathlib.Path(self.endpoint.model, "config.json").is_file():
            return self._open(manifests.Pushed(version=FIRST, folder=self.endpoint.model))
        return None

    def _open(self, pushed: manifests.Pushed) -> Folder:
        path = pathlib.Path(pushed.folder)
        if pushed.version == FIRST and not (path / layout.MANIFEST).exists():  # the model, which no one published
            none = manifests.Weights(
                version=FIRST, base=None, encoding="full", tensors={}, training_step=0, run=str(path)
            )
            return Folder(path, FIRST, none)
        return opened(path, pushed.version)

    def _whole(self, version: Folder) -> Folder:
        """A delta is applied to a copy beside the endpoint."""
        if version.manifest.base is None:
            return version
        if self._copy is None:
            self._copy = applying.Copy(self.record.parent / layout.WEIGHTS / layout.APPLIED, self.say)
        return self._copy.bring(applying.chain(version))

    def _load(self, version: Folder, urls: Sequence[str]) -> None:
        if urls:
            self.say(f"{len(urls)} engine(s) load {version.name}")
            load(self._whole(version), urls, flush=True)

    def _has(self, version: Folder, url: str) -> bool:
        """The engine has shown that it holds this very version."""
        if _reported(url) != version.name:
            return False
        try:
            return verified(verification.verify(self._whole(version), [url])) is True
        except EngineError:
            return False

    def _back(self, error: EngineError, failed: Folder, before: Folder | None) -> EngineError:
        """Engines that answer hold ``before`` again, if that can be; the error that says what happened."""
        there = [url for url, name in self.names().items() if name is not None]
        if before is None or before.name == failed.name:
            said = f"no version before is known here, so the engines are as they were left: {_listed(self.names())}"
            return EngineError(f"{error.message}; {said}", error.fix)
        try:
            self._load(before, there)
            if there:
                verification.verify(self._whole(before), there)
        except (EngineError, DataError) as second:
            said = f"nor could {before.name} be put back ({second.message}); engines hold: {_listed(self.names())}"
            return EngineError(f"{error.message}; {said}", "start these engines anew: slime serve-rollout")
        self._write()
        return EngineError(f"{error.message}; rolled back, engines hold: {_listed(self.names())}", error.fix)

    def _write(self, *, history: list[manifests.Pushed] | None = None, pending: manifests.Pushed | None = None) -> None:
        self.state = msgspec.structs.replace(
            self.state, history=self.state.history if history is None else history, pending=pending
        )
        manifests.write(self.record, self.state)


def _reported(url: str) -> str | None:
    try:
        return engine_api.get(url, "/model_info", 10).get("weight_version") or FIRST
    except EngineError:
        return None


def _listed(names: dict[str, str | None]) -> str:
    return ", ".join(f"{url} {name or 'does not answer'}" for url, name in names.items())
