"""Weights straight from the trainer's memory into the engines': ``ipc`` and ``nccl``. Torch-free.

Nothing of a version is on a disk, so there is no way back to one: a resume loads the last commit and sends that. Before
the first bucket every engine is told another version, NAME with :data:`SPOILT` behind it, and NAME when it has all of
it and its cache is flushed. Whoever looks at an engine that was left in between, or gets an answer of it, sees that.
"""

import concurrent.futures
import dataclasses
import functools
import os
import urllib.parse
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Self

from slime_cli import addresses, engine_api, manifests
from slime_cli.errors import DataError, EngineError, UsageError
from slime_cli.hardware import device as hardware
from slime_cli.manifests import layout
from slime_cli.manifests.proof import Proof
from slime_cli.weights import held, sums, verification
from slime_cli.weights.held import Rank
from slime_cli.weights.transport import BUFFER, SPOILT, Asked, Learner, Receiver, Sending, Version

TIMEOUT = 60.0
LOAD_TIMEOUT = 300.0
_DISK = "leave --update-weight-transport out: files suit every engine"


@dataclasses.dataclass(frozen=True)
class InMemory:
    """A :class:`Version` that the ranks have until they train on."""

    name: str
    step: int
    learner: Learner

    @property
    def manifest(self) -> manifests.Weights:
        return manifests.Weights(
            version=self.name, base=None, encoding="full", tensors={}, training_step=self.step, run=""
        )

    def chunks(self, tensor: str) -> Iterator[bytes]:
        raise DataError(f"{self.name}: {tensor} is in the trainer's memory alone", "publish it: slime sync publish")


class Memory:
    """``name``: ``ipc`` for engines that share memory with the ranks, ``nccl`` for a group with them."""

    can_go_back = False

    def __init__(self, name: Literal["ipc", "nccl"], *, buffer: int = BUFFER) -> None:
        self._receiver = functools.cache(receiver)
        self.way: Literal["ipc", "nccl"] = name
        self.name: str = name
        self.buffer = buffer
        self._learner: Learner | None = None
        self._ranks: tuple[str, ...] = ()
        """What :meth:`Learner.devices` says."""
        self._session = engine_api.Session(TIMEOUT)
        self._brackets = functools.cache(_brackets)
        self._asked: Asked | None = None
        """What the engines of the version before were compared with."""
        self._proven: tuple[str, ...] = ()
        """The engines' own names of their tensors: for each it was shown how it is made of the trainer's."""
        self._proven_in: set[str] = set()

    def write(self, learner: Learner, step: int) -> InMemory:
        """Nothing is written: the ranks have it."""
        self._learner = learner
        return InMemory(layout.version_name(step), step, learner)

    def send(self, version: Version, engines: Sequence[str], *, flush: bool) -> None:
        assert isinstance(version, InMemory), f"{version.name} is not in memory"
        self._ranks = self._ranks or tuple(version.learner.devices())
        receivers = engine_api.each(engines, lambda url: self._receiver(url, self._ranks, self.way))
        bracketed = [url for url, needed in zip(engines, engine_api.each(engines, self._brackets)) if needed]
        engine_api.each(engines, lambda url: self._name(url, version.name + SPOILT))
        engine_api.each(bracketed, lambda url: _bracket(url, "begin"))
        alone = self.way == "ipc" and all(receiver.ranks == 1 for receiver in receivers)
        tensors = self._proven if alone and set(engines) <= self._proven_in else ()
        self._proven_in = set()
        how = Sending(self.way, tuple(receivers), version.step, self.buffer, tensors, self._soon(version))
        failed = version.learner.send(how)

        def end(url: str) -> None:
            if url in failed:
                raise EngineError(f"{failed[url]}; {url} has a part of {version.name} and says so", _AGAIN)
            if url in bracketed:
                _bracket(url, "end")
            if flush:
                engine_api.flush(url)
            self._name(url, version.name)

        engine_api.each(engines, end)

    def _soon(self, version: Version) -> Asked | None:
        """What :meth:`verify` is going to ask, where GPUs can sum up beside sending; on processors it takes longer than
        that, and engines do the same meanwhile."""
        if self._asked is None or self._asked.function != sums.Tiles.__name__:
            return None
        return dataclasses.replace(self._asked, step=version.manifest.training_step)

    def _name(self, url: str, version: str) -> None:
        body = {"new_version": version, "abort_all_requests": False}
        self._session.done(url, "/update_weight_version", body)

    def asked_for(self, version: Version) -> None:
        return None

    def verify(self, version: Version, engines: Sequence[str]) -> list[Proof]:
        assert isinstance(version, InMemory)
        with InTrainer(version, self._asked) as expected:
            proofs = verification.verify(version, engines, expected)
        self._asked = expected.asked
        names = expected.asked.names if expected.asked else ()
        if all(proof.kind == "checksum" for proof in proofs) and all(map(held.is_plain, names)):
            self._proven, self._proven_in = names, set(engines)
        return proofs

    def kept(self, step: int) -> None:
        return None

    def restore(self, version: Version, learner: Learner) -> None:
        raise AssertionError(f"{version.name} cannot be restored")

    def prune(self, keep: set[str]) -> None:
        pass

    def close(self) -> None:
        if self._learner is not None:
            self._learner.part()


_AGAIN = "see the engine's log; the same command resumes from the last commit and sends whole weights"


class InTrainer:
    """What the ranks of an engine would report of weights that the trainer has: summed up where they are, once for all
    engines. ``before``: what the last version was asked about; the trainer answers that of this one while engines sum
    up theirs."""

    plain = True
    """Engines that repack tensors were refused."""

    def __init__(self, version: InMemory, before: Asked | None = None) -> None:
        self.name = version.name
        self.version = version
        self.asked: Asked | None = None
        """What was asked last."""
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "sums")
        self._found: dict[Asked, concurrent.futures.Future[dict[str, list[frozenset[str]]]]] = {}
        if before is not None:
            self._ask(dataclasses.replace(before, step=version.step))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown()

    def all(
        self, names: Sequence[str], dtype: str, function: type[sums.Sum], ranks: Sequence[Rank]
    ) -> dict[str, list[frozenset[str]]]:
        self.asked = Asked(tuple(names), dtype, function.__name__, tuple(ranks), self.version.step)
        return self._ask(self.asked).result()

    def rescaled(self, name: str) -> bool:
        return False

    def _ask(self, asked: Asked) -> concurrent.futures.Future[dict[str, list[frozenset[str]]]]:
        if asked not in self._found:
            self._found[asked] = self._pool.submit(self.version.learner.sums, asked)
        return self._found[asked]


def receiver(url: str, ranks: Sequence[str], way: Literal["ipc", "nccl"]) -> Receiver:
    """The engine as one that takes weights from memory. ``ranks``: of the trainer, what :meth:`Learner.devices` says
    of them. Raises UsageError for an engine that cannot."""
    server = engine_api.get(url, "/server_info")
    for option, plain in _PLAIN.items():
        if (found := server.get(option) or plain) != plain:
            flag = f"--{option.replace('_', '-')} {found}"
            raise UsageError(f"{url} runs with {flag}: it takes weights from files alone", _DISK)
    if way == "nccl" and server.get("speculative_draft_model_path"):
        raise UsageError(
            f"--update-weight-transport nccl: {url} drafts with layers that SGLang loads nothing into from a group, so"
            " they would keep old weights",
            "--update-weight-transport disk and ipc reach them",
        )
    sources = (0,) * int(server.get("tp_size") or 1)
    on_gpus = str(server.get("device")).startswith("cuda")
    if way == "nccl":
        if on_gpus and _here(url, ranks[:1]) and ranks[0].partition("/")[2] in _gpus(server):
            raise UsageError(
                f"--update-weight-transport nccl: {url} and the trainer's first rank are on one GPU, and NCCL takes no"
                " two processes there",
                "--update-weight-transport ipc is for engines on the trainer's GPUs",
            )
        return Receiver(url, sources)
    if not _here(url, ranks):
        raise UsageError(
            f"--update-weight-transport ipc: {url} and the trainer's ranks are not all on this machine, and memory is"
            " shared on one machine",
            _DISK,
        )
    loader = engine_api.has_loader(server, engine_api.LOADER)
    return Receiver(url, _by_device(url, server, ranks) if on_gpus else sources, loader)


_PLAIN: dict[str, Any] = {"pp_size": 1, "dp_size": 1, "nnodes": 1, "quantization": None}
"""Options of an engine with which its ranks share tensors in other ways, or repack them once they are loaded."""


def _here(url: str, ranks: Sequence[str]) -> bool:
    """The engine and all of these trainer ranks are on this machine."""
    here = os.uname().nodename
    mine = addresses.is_mine(urllib.parse.urlsplit(url).hostname or "")
    return mine and all(rank.partition("/")[0] == here for rank in ranks)


def _gpus(server: dict[str, Any]) -> list[str]:
    """The GPU of each rank of an engine on this machine, as :meth:`Learner.devices` names them."""
    known = hardware.gpus()
    first, step = int(server.get("base_gpu_id") or 0), int(server.get("gpu_id_step") or 1)
    places = [first + place * step for place in range(int(server.get("tp_size") or 1))]
    return [known[place] if place < len(known) else f"number {place}" for place in places]


def _by_device(url: str, server: dict[str, Any], ranks: Sequence[str]) -> tuple[int, ...]:
    """For each rank of the engine, the trainer rank on the same GPU."""
    by_gpu = {rank.partition("/")[2]: number for number, rank in enumerate(ranks)}
    gpus = _gpus(server)
    if others := [gpu for gpu in gpus if gpu not in by_gpu]:
        raise UsageError(
            f"--update-weight-transport ipc: {url} computes on GPU {others[0]}, where no trainer rank is",
            "--colocate puts them on the same GPUs; --update-weight-transport nccl is for others",
        )
    return tuple(by_gpu[gpu] for gpu in gpus)


def _brackets(url: str) -> bool:
    """Whether the engine wants to be told where an update begins and ends: SGLang 0.5.23 does, 0.5.16 does not."""
    answer = engine_api.post(url, "/begin_weight_update", {}, TIMEOUT)
    if answer.status_code not in (200, 404):
        raise EngineError(f"{url}/begin_weight_update answered {answer.status_code}: {answer.text[:300]}", _DISK)
    if answer.status_code == 200:
        _bracket(url, "end")
    return answer.status_code == 200


def _bracket(url: str, which: Literal["begin", "end"]) -> None:
    engine_api.require(url, f"/{which}_weight_update", {}, LOAD_TIMEOUT)
