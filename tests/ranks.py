"""Learners of ranks in this process that write a version together, each its share, or send it from memory, as the
trainer's ranks do."""

import os
import pathlib

import msgspec
import torch

from slime_cli.manifests import layout
from slime_cli.weights import publish, quantised, sums, tensor_sums
from slime_cli.weights.base import Base
from slime_cli.weights.sending import Sender
from slime_cli.weights.transport import FULL, Asked, Sending, Writing


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
        form = quantised.publishing(self.model) if (self.model / "config.json").exists() else None
        parts = []
        for rank, base in enumerate(self.bases):
            share = publish.owned(self.weights.items(), rank, len(self.bases))
            share = share if form is None else form.through(share)
            parts.append(base.write(share, target, f"{rank:05d}-" if len(self.bases) > 1 else "", how))
        described = publish.described(version, layout.step_of(version) or 0, "r")
        fields = dict(base=how.base, base_digest=how.base_digest, encoding=how.encoding)
        publish.seal(target, parts, msgspec.structs.replace(described, **fields))
        return 0

    def load_published(self, folder: str) -> None:
        self.loaded.append(folder)

    def keep(self, name: str, path: str | None = None) -> None:
        self.kept.append(name)


class MemoryRank:
    """A learner of one rank in this process that has ``weights`` in memory, as of optimizer step ``step``."""

    def __init__(self, weights: dict[str, torch.Tensor], step: int = 0) -> None:
        self.weights = weights
        self.step = step
        self.sender = Sender(0, torch.device("cpu"))
        self.sendings: list[Sending] = []
        self.kept: list[str] = []

    def devices(self) -> list[str]:
        return [f"{os.uname().nodename}/"]

    def send(self, how: Sending) -> dict[str, str]:
        assert how.step == self.step
        self.sendings.append(how)
        size = sum(tensor.nbytes for tensor in self.weights.values())
        return self.sender.send(iter(self.weights.items()), how, 2 * size)

    def sums(self, asked: Asked) -> dict[str, list[frozenset[str]]]:
        function = sums.NAMES[asked.function]
        return tensor_sums.of(self.weights.items(), asked.names, asked.dtype, function, asked.ranks)

    def part(self) -> None:
        self.sender.part()

    def keep(self, name: str, path: str | None = None) -> None:
        self.kept.append(name)
