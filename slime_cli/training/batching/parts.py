"""From a batch to this rank's micro-batches, optimizer step by optimizer step. The trainer calls it, once a rollout.

Every rank plans the same (:mod:`slime_cli.training.batching.packing`) and builds its own share.
"""

import argparse
import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from megatron.core import mpu

from slime_cli.buffer.columns import TrainBatch
from slime_cli.training.algorithm import losses
from slime_cli.training.batching import balance, microbatch, packing, packs
from slime_cli.training.settings import Settings

Part = list[microbatch.MicroBatch]
"""This rank's micro-batches of one optimizer step."""


@dataclasses.dataclass(frozen=True)
class Splitter:
    """Splits batches as the options say."""

    args: argparse.Namespace
    """Megatron's."""
    settings: Settings
    device: torch.device

    def parts(self, batch: TrainBatch) -> tuple[list[Part], list[int]]:
        """The micro-batches of each optimizer step, and how many samples each step dropped."""
        steps = packing.split_steps(batch.sample_index_N.tolist(), self.settings.num_steps_per_rollout)
        made = [self.micro_batches(batch, positions) for positions in steps]
        return [mbs for mbs, _ in made], [dropped for _, dropped in made]

    def micro_batches(self, batch: TrainBatch, positions: Sequence[int]) -> tuple[Part, int]:
        """The micro-batches of one step, which trains the samples at ``positions``, and how many of them it dropped."""
        plan = self._plan(batch, positions)
        weights_N = self.token_weights(batch, positions)
        nucleus = self.settings.policy and self.settings.use_top_p_replay
        mbs = [
            microbatch.build(
                batch,
                own,
                weights_N,
                cut=self.cut,
                device=self.device,
                nucleus=nucleus,
                depths=self.args.mtp_num_layers or 0,
                share_prompts=self.shares_prompts,
            )
            for own in plan.per_rank[mpu.get_data_parallel_rank()]
        ]
        return mbs, len(plan.dropped)

    def _plan(self, batch: TrainBatch, positions: Sequence[int]) -> packing.Schedule:
        s = self.settings
        args = self.args
        lengths = self.cut.whole(batch.lengths_N).tolist()
        costs = None
        if s.balance_data or s.balance_by_flops:
            costs = list(map(balance.Flops.of(args), lengths, batch.response_lengths_N.tolist()))
        return packing.schedule(
            list(positions),
            lengths,
            mpu.get_data_parallel_world_size(),
            max_tokens=s.max_tokens and s.max_tokens * args.context_parallel_size,
            micro_batch_size=args.micro_batch_size,
            oversize=s.oversize,
            pack_by=costs if s.balance_by_flops else None,
            deal_by=costs if s.balance_data else None,
            multiple=args.pipeline_model_parallel_size if args.virtual_pipeline_model_parallel_size else 1,
        )

    @property
    def shares_prompts(self) -> bool:
        """A pack holds the prompt of a group once. It needs attention in rectangles, which a CPU has, and every token
        to count by itself: a router balances its experts over all, a layer that predicts several tokens shifts a pack,
        and a user's model or loss may do anything."""
        args = self.args
        s = self.settings
        rectangles = self.device.type == "cpu" and args.transformer_impl == "local" and args.context_parallel_size == 1
        of_user = s.custom_model_provider_path or s.custom_loss_function_path
        return s.policy and rectangles and not (args.num_experts or args.mtp_num_layers or of_user)

    @property
    def cut(self) -> packs.Cut:
        """Which part of every sequence this rank holds."""
        args = self.args
        split = args.tensor_model_parallel_size if args.sequence_parallel else 1
        return packs.Cut(
            mpu.get_context_parallel_rank(),
            args.context_parallel_size,
            split * (packs.FP8_BLOCK if args.fp8 else 1),
            local=args.transformer_impl == "local",
        )

    def token_weights(self, batch: TrainBatch, positions: Sequence[int]) -> np.ndarray:
        """What a token of each sample counts in the loss of the step that the samples at ``positions`` make, [N]."""
        per_token = self.args.calculate_per_token_loss
        trajectories_N = batch.sample_index_N
        trained_R = np.concatenate([[0], np.cumsum(batch.loss_mask_R, dtype=np.int64)])
        sums_N = trained_R[batch.response_starts_N + batch.response_lengths_N] - trained_R[batch.response_starts_N]
        of_step = len(np.unique(trajectories_N[list(positions)]))
        weights_N = losses.sample_weights(
            torch.from_numpy(sums_N), torch.from_numpy(trajectories_N), of_step, per_token
        ).numpy()
        return weights_N / max(int(sums_N[list(positions)].sum()), 1) if per_token else weights_N
