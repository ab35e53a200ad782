"""All trainer ranks as one: each method goes to every rank at once, since what they do is collective, and blocks.

The loop calls it from a thread, one call at a time. Whatever goes wrong in a rank, or in Ray between, is one of our
errors: the rank's own where it raised one, else an EngineError. Torch-free.
"""

import dataclasses
import types
from collections.abc import Sequence
from typing import Any

from slime_cli import disk
from slime_cli.buffer.columns import TrainBatch
from slime_cli.errors import EngineError, SlimeError
from slime_cli.training.settings import Settings
from slime_cli.weights.transport import FULL, Asked, Sending, Writing

RESUME = "the same command resumes from the last commit"


@dataclasses.dataclass(frozen=True)
class Begun:
    """A phase's model, as the ranks have built it."""

    parameters: int
    """Those that rank 0 holds."""
    device: str
    warning: str
    """A sentence that tells the user how it is computed; empty when there is nothing to tell."""
    kernels: str = ""
    """Which fast ways of computing the device was found to have, each with what is used; empty on a CPU."""


@dataclasses.dataclass(frozen=True)
class Trained:
    """A rollout was trained."""

    step: int
    """Optimizer steps of the phase so far, this rollout's included."""
    metrics: dict[str, float]


class Learner:
    """``ranks`` are actors of :class:`slime_cli.cluster.trainer_actor.TrainerRank`; ``ray`` is the connected module."""

    def __init__(self, ray: types.ModuleType, ranks: Sequence[Any]) -> None:
        self.ray = ray
        self.ranks = ranks
        self._master: tuple[str, int] | None = None

    def begin(self, argv: list[str], settings: Settings, model: str, critic_argv: list[str] | None = None) -> Begun:
        """Builds a phase's networks from Megatron's options, with the weights of the HF folder ``model``."""
        if self._master is None:
            (self._master,) = self._get([self.ranks[0].address.remote()])
        return self._get([r.begin.remote(argv, settings, model, critic_argv, self._master) for r in self.ranks])[0]

    def load(self, path: str, *, weights_only: bool) -> int:
        """A checkpoint folder: all of it, to resume, or its weights alone, to start from. The trainer's step."""
        return self._get([rank.load.remote(path, weights_only) for rank in self.ranks])[0]

    def load_published(self, folder: str) -> None:
        """The weights of a published version into the policy, and its step; the optimizer does not hear of it."""
        self._get([rank.load_published.remote(folder) for rank in self.ranks])

    def keep(self, name: str, path: str | None = None) -> None:
        """Keeps the policy's present weights, or a checkpoint's, as ``reference``, ``teacher`` or ``old_actor``."""
        self._get([rank.keep.remote(name, path) for rank in self.ranks])

    def offload(self, parts: Sequence[str]) -> None:
        """``weights``, ``gradients``, ``optimizer``: those leave the devices' memory for the host's."""
        self._get([rank.offload.remote(parts) for rank in self.ranks])

    def onload(self, parts: Sequence[str]) -> None:
        """The reverse of :meth:`offload`."""
        self._get([rank.onload.remote(parts) for rank in self.ranks])

    def train(self, batch: TrainBatch) -> Trained:
        """Every optimizer step of one rollout."""
        reference = self.ray.put(batch)
        answers = self._get([rank.train.remote(reference) for rank in self.ranks])
        return next(answer for answer in answers if answer is not None)

    def save(self, root: str) -> str:
        """Saves a checkpoint under ``root``; its folder. It is complete once :meth:`saved` says so."""
        return self._get([rank.save.remote(root) for rank in self.ranks])[0]

    def saved(self, wait: bool) -> bool:
        """Whether every checkpoint so far is complete and durable; it can be waited for."""
        return all(self._get([rank.saved.remote(wait) for rank in self.ranks]))

    def remove(self, paths: list[str]) -> None:
        """Removes checkpoints with their critics'."""
        self._get([self.ranks[0].remove.remote(paths)])

    def publish(self, folder: str, version: str, how: Writing = FULL) -> int:
        """Writes the present weights as a version, each rank its share; the bytes written."""
        first = self.ranks[0]
        self._get([first.prepare.remote(folder, how)])
        parts = self._get([rank.publish.remote(folder, how) for rank in self.ranks])
        return self._get([first.seal.remote(folder, version, how, parts)])[0]

    def devices(self) -> list[str]:
        """For each rank MACHINE/GPU, with nothing behind the stroke on a CPU: what others share memory with it by."""
        return self._get([rank.device_name.remote() for rank in self.ranks])

    def send(self, how: Sending) -> dict[str, str]:
        """The present weights into engines; by URL, why one does not have all of them."""
        return self._get([rank.send.remote(how) for rank in self.ranks])[0]

    def sums(self, asked: Asked) -> dict[str, list[frozenset[str]]]:
        """Sums of the present weights as engines name and cut them."""
        found = self._get([rank.sums.remote(asked) for rank in self.ranks])
        return {name: sums for of_rank in found for name, sums in of_rank.items()}

    def part(self) -> None:
        """Gives up the group with engines, if there is one."""
        self._get([self.ranks[0].part.remote()])

    def _get(self, references: list[Any]) -> list[Any]:
        """What the ranks answered, in their order."""
        try:
            return self.ray.get(references)
        except self.ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, SlimeError):
                raise error.cause from None
            if full := disk.cause(error.cause) or disk.cause(error):
                raise EngineError(f"the trainer failed: {full}", disk.FIX) from None
            raise EngineError(f"the trainer failed: {error}", RESUME) from None
        except self.ray.exceptions.RayActorError as error:
            raise EngineError(f"a trainer rank died: {error}", RESUME) from None
        except self.ray.exceptions.RayError as error:  # no environment could be made, a node is gone, an object lost
            raise EngineError(f"Ray: {type(error).__name__}: {error}", RESUME) from None
