"""The seam between publishing and the ways by which weights reach engines. Torch-free.

The loop's publisher (:mod:`slime_cli.loop.publishing`) and ``slime sync`` know these two types and nothing below them:
a :class:`Version` is a name, what its tensors are and a way to read them; that it lies on a disk is the affair of
:mod:`slime_cli.weights.transports.disk`. A transport may keep the ranks that wrote a version and send from their
memory; it then has nothing to go back to, and says so. All methods block: the loop calls them through a thread.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal, Protocol

import msgspec

from slime_cli import manifests
from slime_cli.manifests.proof import Proof
from slime_cli.weights.held import Rank

BUFFER = 512 << 20
"""Bytes that a rank has in memory beside the model while it writes: ``--update-weight-buffer-size``."""
SPOILT = "-incomplete"
"""Behind a version's name: what an engine reports while it may have a part of it."""


@dataclasses.dataclass(frozen=True)
class Writing:
    """How the ranks write a version."""

    encoding: Literal["full", "xor", "overwrite", "adapter"] = "full"
    base: str | None = None
    """The version that a delta is made against, which the ranks published last."""
    base_digest: str = ""
    keep: bool = False
    """The ranks keep what they write, as the base of the next version."""
    scratch: str | None = None
    """The folder where they keep it."""
    buffer: int = BUFFER


FULL = Writing()


@dataclasses.dataclass(frozen=True)
class Receiver:
    """An engine that takes weights from the ranks' memory."""

    url: str
    sources: tuple[int, ...]
    """For each rank of the engine's model, the trainer rank that it shares memory with, or the one that sends."""
    loader: bool = False
    """It was started with slime's own: :data:`slime_cli.engine_api.LOADER`."""

    @property
    def ranks(self) -> int:
        return len(self.sources)


@dataclasses.dataclass(frozen=True)
class Asked:
    """Which sums of the present weights the ranks compute."""

    names: tuple[str, ...]
    """As an engine names its tensors."""
    dtype: str
    function: str
    """A name of :data:`slime_cli.weights.sums.NAMES`."""
    ranks: tuple[Rank, ...]
    """Those that share the engine's model."""
    step: int


@dataclasses.dataclass(frozen=True)
class Sending:
    """How the ranks send the weights that they have."""

    way: Literal["ipc", "nccl"]
    receivers: tuple[Receiver, ...]
    step: int
    """The optimizer step that the weights must be those of."""
    buffer: int = BUFFER
    tensors: tuple[str, ...] = ()
    """All tensors of engines of one rank, by their own names: where these were proven, engines get them as they keep
    them. Empty: they get the model's, and look for the place of each."""
    asked: Asked | None = None
    """Sums that will be asked for next: ranks on GPUs compute them of the tensors that they send."""


class Part(msgspec.Struct, frozen=True):
    """What one rank has written of a version."""

    tensors: dict[str, manifests.Tensor]
    patches: dict[str, manifests.Patch] = {}
    log_probs: dict[int, float] = {}
    """Those of an adapter's probe that this rank has computed, by place in it."""


class Version(Protocol):
    """Weights under a name."""

    @property
    def name(self) -> str:
        """What engines report once they hold it."""
        ...

    @property
    def manifest(self) -> manifests.Weights:
        """Dtype, shape and checksum of every tensor, by its HF name."""
        ...

    def chunks(self, tensor: str) -> Iterator[bytes]:
        """The tensor's bytes in order, whole elements at a time, never much of a tensor at once."""
        ...


class Learner(Protocol):
    """The trainer's ranks as one, as far as a transport and the publisher need them."""

    def publish(self, folder: str, version: str, how: Writing = FULL) -> int:
        """Writes the policy's present weights with a manifest, as HF safetensors unless ``how`` says otherwise; bytes
        written."""
        ...

    def load_published(self, folder: str) -> None:
        """The weights of such a folder into the policy."""
        ...

    def keep(self, name: str, path: str | None = None) -> None:
        """The policy's present weights, or those of a checkpoint, are kept under a name."""
        ...

    def devices(self) -> list[str]:
        """By rank, what tells its GPU from all others; empty on a CPU."""
        ...

    def send(self, how: Sending) -> dict[str, str]:
        """The policy's present weights into engines; by URL, why an engine does not have all of them. It is then to be
        taken for spoilt."""
        ...

    def sums(self, asked: Asked) -> dict[str, list[frozenset[str]]]:
        """By the engine's name of a tensor, for each of its ranks, the sums that it may have; empty where that is not
        known."""
        ...

    def part(self) -> None:
        """Gives up the group with engines that :meth:`send` made, if there is one."""
        ...


class Transport(Protocol):
    """One way to bring the trainer's weights into engines and to prove that they are there."""

    name: str
    can_go_back: bool
    """Versions stay where a resume can send them again: :meth:`kept` may find one, and :meth:`restore` can read it."""

    def write(self, learner: Learner, step: int) -> Version:
        """The policy's present weights, those after optimizer step ``step``. Collective on the ranks."""
        ...

    def send(self, version: Version, engines: Sequence[str], *, flush: bool) -> None:
        """Every engine holds ``version`` afterwards and reports its name, or EngineError names those that do not.

        ``flush`` also drops what the engines' prefix caches hold of older weights, which needs engines without
        requests; for engines that are paused with requests in them it is False.
        """
        ...

    def asked_for(self, version: Version) -> str | None:
        """The LoRA adapter that requests have to name; None where engines answer with the version that they hold."""
        ...

    def verify(self, version: Version, engines: Sequence[str]) -> list[Proof]:
        """What can be shown of each engine. Raises EngineError for one that holds something else."""
        ...

    def kept(self, step: int) -> Version | None:
        """The version of ``step``, if an earlier attempt or this one left it whole."""
        ...

    def restore(self, version: Version, learner: Learner) -> None:
        """The version into the policy's weights; its optimizer does not change."""
        ...

    def prune(self, keep: set[str]) -> None:
        """Takes away what it stores of versions whose names are not in ``keep``."""
        ...

    def close(self) -> None:
        """Gives back what ranks and engines keep for it. Called at an orderly end."""
        ...
