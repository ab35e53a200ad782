"""Which experts a token goes to, recorded in one pass and followed in others, through Megatron's own router replay.

A router that decides anew at each pass sends a token elsewhere once its scores have moved by a rounding, and a
probability ratio then compares two different networks. ``--use-routing-replay`` records the choices of the old policy's
pass and follows them in the steps of that rollout (GSPO, arXiv 2507.18071, section 5.3);
``--use-rollout-routing-replay`` follows the engine's choices, in the old policy's pass as well (R3, arXiv 2510.11370).
Scores stay the present network's: only the choice is replayed.
"""

import contextlib
from collections.abc import Iterator

import torch
from megatron.core import mpu
from megatron.core.transformer.moe.router_replay import RouterReplayAction as Action

from slime_cli.training.batching.microbatch import MicroBatch, filled

FREE = "free"
RECORD = "record"
FOLLOW = "follow"


def mode(replays: bool, records: bool = False) -> str:
    """A pass of the policy, by whether it replays experts that were chosen before, or records those to replay."""
    return RECORD if records else FOLLOW if replays else FREE


class Routers:
    """The routers of a network on this rank, by virtual pipeline stage."""

    def __init__(self, model: list[torch.nn.Module], sequence_parallel: bool) -> None:
        found = [[getattr(m, "router_replay", None) for m in chunk.modules()] for chunk in model]
        self.chunks = [[replay for replay in chunk if replay is not None] for chunk in found]
        self.sequence_parallel = sequence_parallel

    @contextlib.contextmanager
    def during(self, mb: MicroBatch, chunk: int, mode: str) -> Iterator[None]:
        """One forward pass of a virtual pipeline stage. ``FOLLOW`` needs ``mb.routes``, which ``RECORD`` fills.

        A layer that is computed again in the backward pass follows what its forward pass did: micro-batches come back
        in the order in which they went.
        """
        replays = self.chunks[chunk] if mode != FREE else []
        for n, replay in enumerate(replays):
            if mode == FOLLOW:
                replay.set_target_indices(mb.routes[chunk, n].to(mb.tokens_T.device, torch.long))
            replay.set_router_replay_action(Action.REPLAY_FORWARD if mode == FOLLOW else Action.RECORD)
        yield
        for n, replay in enumerate(replays):
            if mode == RECORD:
                mb.routes[chunk, n] = replay.get_recorded_indices().to(torch.int16)
            replay.set_router_replay_action(Action.REPLAY_BACKWARD)

    def forget(self) -> None:
        """The pass is over: routers decide for themselves again."""
        for replay in sum(self.chunks, []):
            replay.clear_indices()
            replay.clear_router_replay_action()

    def take(self, mb: MicroBatch) -> None:
        """Lays out the engine's choices for :meth:`during`: this rank's layers, and its tokens under sequence
        parallelism."""
        routes_TLK = filled(mb.routed_experts_TLK)
        mb.routed_experts_TLK = None
        if self.sequence_parallel:
            routes_TLK = routes_TLK.chunk(mpu.get_tensor_model_parallel_world_size())[
                mpu.get_tensor_model_parallel_rank()
            ]
        for chunk, replays in enumerate(self.chunks):
            for n, replay in enumerate(replays):
                mb.routes[chunk, n] = routes_TLK[:, replay.layer_number - 1].contiguous()
