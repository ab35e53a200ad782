"""Weights as what has changed since the version before: small files, applied to a copy that engines load from a disk.

The ranks write a delta against what they published last (:mod:`slime_cli.weights.base`); this host applies it to its
copy and checks every tensor (:mod:`slime_cli.weights.applying`); engines load the copy by the stock
``/update_weights_from_disk``. An attempt begins with a full version, and so does every ``full_interval``-th, and
whatever follows a write that failed: a chain never runs through what is not known to be whole. Torch-free.
"""

import pathlib
from collections.abc import Callable, Sequence

from slime_cli.manifests import layout
from slime_cli.manifests.proof import Proof
from slime_cli.weights import applying, verification
from slime_cli.weights.encoding import Encoding
from slime_cli.weights.folder import Folder, as_folder, if_whole, opened, remove
from slime_cli.weights.transport import BUFFER, Learner, Version, Writing
from slime_cli.weights.transports.disk import load


class Delta:
    """The versions of one phase, in ``folder``. ``local``: where the copy lies, in place of beside the versions."""

    name = "delta"
    can_go_back = True

    def __init__(
        self,
        folder: pathlib.Path,
        newest: int,
        *,
        encoding: Encoding,
        full_interval: int,
        say: Callable[[str], None],
        local: pathlib.Path | None = None,
        buffer: int = BUFFER,
    ) -> None:
        self.folder = folder
        self.newest = newest
        self.encoding: Encoding = encoding
        self.full_interval = full_interval
        self.buffer = buffer
        self.scratch = local or folder / layout.WEIGHTS
        self.copy = applying.Copy(self.scratch / layout.APPLIED, say)
        self._last: Folder | None = None
        """The version that every rank keeps as its base."""
        self._since = 0
        """Deltas since the last full version."""
        self._sent: Folder | None = None
        """The copy as it was checked before engines loaded it."""

    def write(self, learner: Learner, step: int) -> Folder:
        path = layout.version(self.folder, step)
        base, self._last = self._last, None
        if base is not None and (self._since + 1 >= self.full_interval or base.name == path.name):
            base = None
        how = Writing(
            encoding=self.encoding if base else "full",
            base=base and base.name,
            base_digest=applying.identity(base.manifest) if base else "",
            keep=True,
            scratch=str(self.scratch),
            buffer=self.buffer,
        )
        learner.publish(str(path), path.name, how)
        self._since = self._since + 1 if base else 0
        self._last = opened(path)
        return self._last

    def send(self, version: Version, engines: Sequence[str], *, flush: bool) -> None:
        self._sent = self._applied(version)
        load(self._sent, engines, flush=flush)

    def asked_for(self, version: Version) -> None:
        return None

    def verify(self, version: Version, engines: Sequence[str]) -> list[Proof]:
        sent = self._sent
        return verification.verify(sent if sent and sent.name == version.name else self._applied(version), engines)

    def kept(self, step: int) -> Folder | None:
        version = if_whole(layout.version(self.folder, step))
        return version if version and applying.is_whole(version) else None

    def restore(self, version: Version, learner: Learner) -> None:
        learner.load_published(str(self._applied(version).path))

    def prune(self, keep: set[str]) -> None:
        """Bases stay for as long as a version needs them that stays."""
        there = {path.name: path for path in layout.versions(self.folder)}
        staying = set(list(there)[-self.newest or len(there) :]) | keep
        for name in list(staying):
            while name in there and (base := _base(there[name])) is not None:
                staying.add(base)
                name = base
        for name, path in there.items():
            if name not in staying:
                remove(path)

    def close(self) -> None:
        self.copy.close()

    def _applied(self, version: Version) -> Folder:
        return self.copy.bring(applying.chain(as_folder(version)))


def _base(path: pathlib.Path) -> str | None:
    version = if_whole(path)
    return version.manifest.base if version else None
