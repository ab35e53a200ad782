"""Log-probabilities and entropy over logits that tensor parallelism has split by vocabulary."""

from typing import Any

import torch
from megatron.core import mpu
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from torch.autograd.function import FunctionCtx


def token_log_probs(
    logits_TV: torch.Tensor, targets_T: torch.Tensor, temperature: float, keep_TV: torch.Tensor | None = None
) -> torch.Tensor:
    """Log-probability of each target under ``softmax(logits / temperature)``, float32 [T], differentiable.

    ``logits_TV`` is this rank's vocabulary slice ``[T, V / tp]``; targets are ids of the whole vocabulary. ``keep_TV``
    (bool, as the logits): the softmax is over these alone, which the target must be one of.
    """
    scaled_TV = logits_TV.float() if temperature == 1.0 else logits_TV.float() / temperature
    if keep_TV is not None:
        scaled_TV = scaled_TV.masked_fill(~keep_TV, -torch.inf)
    # Megatron's loss wants [s, b, V] and may overwrite its input, which is ours alone only where .float() made a copy.
    scaled_TV = scaled_TV.clone() if scaled_TV.data_ptr() == logits_TV.data_ptr() else scaled_TV
    return -vocab_parallel_cross_entropy(scaled_TV.unsqueeze(1), targets_T.unsqueeze(1)).squeeze(1)


class _Entropy(torch.autograd.Function):
    """H = log Z - sum(p z) over a split vocabulary; dH/dz = -p (log p + H), which needs no communication."""

    @staticmethod
    def forward(ctx: FunctionCtx, logits_TV: torch.Tensor) -> torch.Tensor:
        group = mpu.get_tensor_model_parallel_group()
        highest_T = logits_TV.amax(-1)
        torch.distributed.all_reduce(highest_T, torch.distributed.ReduceOp.MAX, group=group)
        # exp is 0 in float32 from -104 on already; bounded, a logit of -inf adds 0 and not 0 * inf.
        shifted_TV = (logits_TV - highest_T[:, None]).clamp_(min=-200)
        exp_TV = shifted_TV.exp()
        sums_2T = torch.stack([exp_TV.sum(-1), (exp_TV * shifted_TV).sum(-1)])
        torch.distributed.all_reduce(sums_2T, group=group)
        log_z_T = sums_2T[0].log()
        entropy_T = log_z_T - sums_2T[1] / sums_2T[0]
        ctx.save_for_backward(shifted_TV, log_z_T, entropy_T)
        return entropy_T

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> torch.Tensor:
        (grad_T,) = grad_outputs
        shifted_TV, log_z_T, entropy_T = ctx.saved_tensors
        log_p_TV = shifted_TV - log_z_T[:, None]
        return -grad_T[:, None] * log_p_TV.exp() * (log_p_TV + entropy_T[:, None])


def token_entropy(logits_TV: torch.Tensor, temperature: float) -> torch.Tensor:
    """Entropy in nats of ``softmax(logits / temperature)`` at each position, float32 [T], differentiable."""
    return _Entropy.apply(logits_TV.float() / temperature)
