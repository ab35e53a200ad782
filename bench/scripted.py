"""Scripted parts for the loop, which take the time that they are told to: a learner, a reward, a user's generate
function. Only the loop's own code is measured then. Called by :mod:`bench.schedules`.
"""

import asyncio
import dataclasses
import pathlib
import time
from typing import Any

from slime_cli.buffer.columns import TrainBatch
from slime_cli.buffer.types import Sample
from slime_cli.cluster.learner import Begun, Trained

SECONDS = 0.5
"""That a rollout is generated in, and that it is trained in."""
TOKENS = 8


async def slow(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """A generate function (``bench.scripted.slow``). Trajectories end one after the other, the last after SECONDS."""
    place = sample.index % args.n_samples_per_prompt
    await asyncio.sleep(SECONDS * (1 - 0.5 * place / args.n_samples_per_prompt))
    return dataclasses.replace(
        sample,
        tokens=[*sample.tokens, *range(5, 5 + TOKENS)],
        response_length=TOKENS,
        rollout_log_probs=[-1.0] * TOKENS,
    )


class Learner:
    """Trains for SECONDS; its weights are two tensors."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.step = 0

    def begin(self, argv: list[str], settings: Any, model: str, critic_argv: list[str] | None = None) -> Begun:
        return Begun(parameters=0, device="none", warning="")

    def load(self, path: str, *, weights_only: bool) -> int:
        return self.step

    def load_published(self, folder: str) -> None:
        pass

    def keep(self, name: str, path: str | None = None) -> None:
        pass

    def train(self, batch: TrainBatch) -> Trained:
        time.sleep(SECONDS)
        self.step += 1
        return Trained(self.step, {"loss": 0.0, "grad_norm": 1.0})

    def save(self, root: str) -> str:
        return f"{root}/iter_{self.step:07d}"

    def saved(self, wait: bool) -> bool:
        return True

    def remove(self, paths: list[str]) -> None:
        pass

    def publish(self, folder: str, version: str, how: object = None) -> int:
        import torch

        from slime_cli.weights import publish

        tensors = {"model.norm.weight": torch.ones(64), "model.embed_tokens.weight": torch.ones(64, 64)}
        path = pathlib.Path(folder)
        publish.write(
            iter(tensors.items()), path, hf_checkpoint=self.model, version=version, step=self.step, run="bench"
        )
        return 0


class Rewards:
    """One for every trajectory."""

    async def score_group(
        self, samples: list[Sample], args: Any, stops: Any = (), evaluation: bool = False
    ) -> list[float]:
        return [1.0 for _ in samples]
