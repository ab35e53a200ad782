"""Log-probabilities and entropy over logits that tensor parallelism has split by vocabulary.

Both come from one reading of the logits: of each row the maximum ``m``, ``s = sum(exp(z - m))`` and
``w = sum(exp(z - m) (z - m))``, with z the logits over the temperature. Then ``log p = z - m - log s`` and the entropy
is ``log s - w / s``. The backward pass needs these and the logits as they were made: neither a float32 copy nor
probabilities are kept. Where the gradient of a row is 0, so is that of its logits, NaN and infinity included. On a GPU
kernels do the readings (:mod:`slime_cli.hardware.cuda.softmax`); in plain torch it is the same mathematics.
"""

from typing import Any, Literal

import torch
from megatron.core import mpu
from torch.autograd.function import FunctionCtx

from slime_cli.hardware import kernels

LOWEST = -1e30
"""The least maximum of a row, so that a slice of nothing but -inf has differences that are numbers."""
FAR = -200.0
"""``exp`` of it is 0 in float32: a logit of -inf adds 0 to the entropy, and not 0 * inf."""

After = Literal["read", "spent"]
"""What becomes of the logits: somebody may ``read`` them again, or they are ``spent`` and their gradient takes their
place in memory."""


def token_values(
    logits_TV: torch.Tensor,
    targets_T: torch.Tensor,
    temperature: float,
    *,
    entropy: Literal["no", "value", "gradient"] = "gradient",
    after: After = "read",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target under ``softmax(logits / temperature)`` and its position's entropy in nats, both
    float32 [T] and differentiable; the entropy is 0 without ``entropy``, and has no gradient with ``value``.

    ``logits_TV`` is this rank's vocabulary slice ``[T, V / tp]``; targets are ids of the whole vocabulary.
    """
    log_probs_T, entropy_T = _Softmax.apply(logits_TV, targets_T, temperature, entropy != "no", after)
    return log_probs_T, entropy_T if entropy == "gradient" else entropy_T.detach()


def token_log_probs(
    logits_TV: torch.Tensor, targets_T: torch.Tensor, temperature: float, keep_TV: torch.Tensor | None = None
) -> torch.Tensor:
    """The log-probabilities alone. ``keep_TV`` (bool, as the logits): the softmax is over these alone, which the target
    must be one of."""
    after: After = "read"
    if keep_TV is not None:
        logits_TV = logits_TV.masked_fill(~keep_TV, -torch.inf)
        after = "spent"
    return token_values(logits_TV, targets_T, temperature, entropy="no", after=after)[0]


def token_entropy(logits_TV: torch.Tensor, temperature: float) -> torch.Tensor:
    """The entropy alone."""
    nobody_T = torch.full(logits_TV.shape[:1], -1, device=logits_TV.device)
    return token_values(logits_TV, nobody_T, temperature)[1]


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        logits_TV: torch.Tensor,
        targets_T: torch.Tensor,
        temperature: float,
        entropy: bool,
        after: After,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits_TV = logits_TV.contiguous()
        own_T = targets_T - mpu.get_tensor_model_parallel_rank() * logits_TV.size(1)
        read = kernels.softmax(logits_TV.device)
        found_4T = (read.statistics if read else statistics)(logits_TV, own_T, temperature, entropy=entropy)
        highest_T, total_T, weighted_T, logit_T = _over_ranks(found_4T, own_T, logits_TV.size(1))
        log_total_T = total_T.log()
        entropy_T = log_total_T - weighted_T / total_T if entropy else torch.zeros_like(log_total_T)
        ctx.save_for_backward(logits_TV, own_T, torch.stack([highest_T, log_total_T, entropy_T]))
        ctx.set_materialize_grads(False)
        more: Any = ctx
        more.temperature, more.after = temperature, after
        return logit_T - log_total_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        of_log_prob_T, of_entropy_T = grad_outputs
        if of_log_prob_T is None and of_entropy_T is None:
            return None, None, None, None, None
        logits_TV, own_T, softmax_3T = ctx.saved_tensors
        nothing_T = torch.zeros_like(softmax_3T[0])
        given_2T = torch.stack([nothing_T if g is None else g for g in (of_log_prob_T, of_entropy_T)])
        read = kernels.softmax(logits_TV.device)
        out_TV = logits_TV.detach() if ctx.after == "spent" else torch.empty_like(logits_TV)
        (read.gradient if read else gradient)(
            logits_TV, own_T, softmax_3T, given_2T, ctx.temperature, out_TV, entropy=of_entropy_T is not None
        )
        return out_TV, None, None, None, None


def statistics(logits_TV: torch.Tensor, targets_T: torch.Tensor, temperature: float, *, entropy: bool) -> torch.Tensor:
    """``m``, ``s``, ``w`` of each row (the module's head) and the target's z, float32 [4, T]. The last is 0 where the
    target is not in this slice of the vocabulary; ``w`` is 0 without ``entropy``."""
    z_TV = _scaled(logits_TV, temperature)
    highest_T = z_TV.amax(-1).clamp_(min=LOWEST)
    owned_T = (targets_T >= 0) & (targets_T < z_TV.size(1))
    logit_T = z_TV.gather(-1, (targets_T * owned_T)[:, None])[:, 0].masked_fill(~owned_T, 0.0)
    from_TV = z_TV - highest_T[:, None]
    exp_TV = from_TV.exp() if entropy else from_TV.exp_()
    total_T = exp_TV.sum(-1)
    weighted_T = exp_TV.mul_(from_TV.clamp_(min=FAR)).sum(-1) if entropy else torch.zeros_like(total_T)
    return torch.stack([highest_T, total_T, weighted_T, logit_T])


def gradient(
    logits_TV: torch.Tensor,
    targets_T: torch.Tensor,
    softmax_3T: torch.Tensor,
    gradients_2T: torch.Tensor,
    temperature: float,
    out_TV: torch.Tensor,
    *,
    entropy: bool,
) -> None:
    """The logits' gradient into ``out_TV``, given ``m``, ``log s`` and the entropy, and the gradients of
    log-probability and entropy: ``(g (1[target] - p) - g_H p (log p + H)) / temperature``. Needs no communication."""
    highest_T, log_total_T, entropy_T = softmax_3T
    of_log_prob_T, of_entropy_T = gradients_2T
    log_p_TV = _scaled(logits_TV, temperature) - highest_T[:, None]
    log_p_TV -= log_total_T[:, None]
    p_TV = log_p_TV.exp()
    if entropy:
        factor_TV = log_p_TV.clamp_(min=FAR).add_(entropy_T[:, None]).mul_(-of_entropy_T[:, None])
        found_TV = p_TV.mul_(factor_TV.sub_(of_log_prob_T[:, None]))
    else:
        found_TV = p_TV.mul_(-of_log_prob_T[:, None])
    owned_T = (targets_T >= 0) & (targets_T < found_TV.size(1))
    found_TV.scatter_add_(-1, (targets_T * owned_T)[:, None], (of_log_prob_T * owned_T)[:, None])
    idle_T = (of_log_prob_T == 0) & (of_entropy_T == 0)
    found_TV.index_fill_(0, idle_T.nonzero()[:, 0], 0.0)
    out_TV.copy_(found_TV if temperature == 1.0 else found_TV.div_(temperature))


def _scaled(logits_TV: torch.Tensor, temperature: float) -> torch.Tensor:
    return logits_TV.float() if temperature == 1.0 else logits_TV.float() / temperature


def _over_ranks(found_4T: torch.Tensor, own_T: torch.Tensor, width: int) -> torch.Tensor:
    """The statistics of whole rows from those of this rank's slice: ``m``, ``s``, ``w`` and the target's ``z - m``."""
    highest_T, total_T, weighted_T, logit_T = found_4T
    owned_T = (own_T >= 0) & (own_T < width)
    if mpu.get_tensor_model_parallel_world_size() == 1:
        return torch.stack([highest_T, total_T, weighted_T, logit_T - highest_T])
    group = mpu.get_tensor_model_parallel_group()
    above_T = highest_T.clone()
    torch.distributed.all_reduce(above_T, torch.distributed.ReduceOp.MAX, group=group)
    moved_T = highest_T - above_T
    less_T = moved_T.exp()
    parts = [less_T * total_T, less_T * (weighted_T + moved_T * total_T), (logit_T - above_T) * owned_T]
    sums_3T = torch.stack(parts)
    torch.distributed.all_reduce(sums_3T, group=group)
    return torch.cat([above_T[None], sums_3T])
