"""A learner of ranks in this process that write a version together, each its share, as the trainer's ranks do."""

import pathlib

import msgspec
import torch

from slime_cli.manifests import layout
from slime_cli.weights import publish
from slime_cli.weights.base import Base
from slime_cli.weights.transport import FULL, Writing


class Ranks:
    """``weights``: what the policy holds now. ``loaded``: folders that were put into it."""

    def __init__(self, model: pathlib.Path, weights: dict[str, torch.Tensor], ranks: int = 1) -> None:
        self.model = model
        self.weights = weights
        self.bases = [Base() for _ in range(ranks)]
        self.loaded: list[str] = []
        self.kept: list[str] = []
        self.ways: list[Writing] = []
        """How each version was written."""

    def publish(self, folder: str, version: str, how: Writing = FULL) -> int:
        self.ways.append(how)
        target = pathlib.Path(folder)
        publish.prepare(target, str(self.model), delta=how.base is not None)
        parts = []
        for rank, base in enumerate(self.bases):
            share = publish.owned(self.weights.items(), rank, len(self.bases))
            parts.append(base.write(share, target, f"{rank:05d}-" if len(self.bases) > 1 else "", how))
        described = publish.described(version, layout.step_of(version) or 0, "r")
        fields = dict(base=how.base, base_digest=how.base_digest, encoding=how.encoding)
        publish.seal(target, parts, msgspec.structs.replace(described, **fields))
        return 0

    def load_published(self, folder: str) -> None:
        self.loaded.append(folder)

    def keep(self, name: str, path: str | None = None) -> None:
        self.kept.append(name)
