"""Training metrics: sums over trained tokens, added up over micro-batches, ranks and steps before anything is divided.

A metric is a tensor of token values (reported as its mean over trained tokens), :class:`Among` (its mean over some of
them) or a pair (values, weights) that is already normalised over the global batch (reported as its weighted sum). Names
are slime's, without the ``train/`` prefix.
"""

import dataclasses

import torch
from megatron.core import mpu

from slime_cli.training.algorithm.losses import masked


@dataclasses.dataclass(frozen=True)
class Among:
    """Token values that count at some of the trained tokens only; a rollout that has none of them has no such metric.
    Every micro-batch of a step must report it, those without such a token too."""

    values_R: torch.Tensor
    counts_R: torch.Tensor
    """bool."""


Metric = torch.Tensor | Among | tuple[torch.Tensor, torch.Tensor]
Report = dict[str, Metric]

MAXIMA = ("train_rollout_logprob_abs_diff",)
"""Metrics whose maximum over the tokens they count is reported too, as ``NAME_max``."""
COUNTS = ("oversize_dropped", "skipped_steps", "critic_skipped_steps")
"""Scalars of a step that a rollout adds up."""


def of_micro_batch(report: Report, mask_R: torch.Tensor) -> dict[str, torch.Tensor]:
    """Detached sums of one micro-batch; ``tokens`` counts its trained tokens."""
    out = {"tokens": mask_R.sum().double()}
    for name, values in report.items():
        if isinstance(values, tuple):
            values_R, weight_R = values
            out[f"sum:{name}"] = (masked(values_R.detach().double(), mask_R) * weight_R).sum()
            continue
        counts_R = mask_R
        if isinstance(values, Among):
            values, counts_R = values.values_R, mask_R & values.counts_R
            out[f"count:{name}"] = counts_R.sum().double()
        kept_R = masked(values.detach().double(), counts_R)
        out[f"mean:{name}"] = kept_R.sum()
        if name in MAXIMA:
            out[f"max:{name}"] = kept_R.max()
    return out


def of_depths(losses_D: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same of the losses of multi-token prediction (MTP): of each depth, and their mean."""
    losses_D = losses_D.detach().double()
    each = {f"sum:mtp_{depth}_loss": loss for depth, loss in enumerate(losses_D, 1)}
    return each | {"sum:mtp_loss": losses_D.mean()}


def over_ranks(reports: list[dict[str, torch.Tensor]], **scalars: float) -> dict[str, float] | None:
    """Totals of a step over micro-batches and data-parallel ranks. Collective on the last pipeline stage; None
    elsewhere."""
    if not mpu.is_pipeline_last_stage(ignore_virtual=True):
        return None
    group = mpu.get_data_parallel_group(with_context_parallel=True)
    sums = [k for k in reports[0] if not k.startswith("max:")]
    maxima = [k for k in reports[0] if k.startswith("max:")]
    out = {}
    for keys, operation, fold in ((sums, "SUM", torch.sum), (maxima, "MAX", torch.amax)):
        if keys:
            values = fold(torch.stack([torch.stack([r[k] for k in keys]) for r in reports]), dim=0)
            torch.distributed.all_reduce(values, getattr(torch.distributed.ReduceOp, operation), group=group)
            out |= dict(zip(keys, values.tolist()))
    return out | {f"step:{k}": float(v) for k, v in scalars.items()}


def over_steps(reports: list[dict[str, float] | None]) -> dict[str, float] | None:
    """Metrics of a rollout by their public names; None on ranks that do not report."""
    told = [r for r in reports if r is not None]
    if not told or mpu.get_tensor_model_parallel_rank() or mpu.get_data_parallel_rank(with_context_parallel=True):
        return None
    tokens = sum(r["tokens"] for r in told)
    out: dict[str, float] = {"tokens": tokens, "steps": len(told)}
    for key in told[0]:
        kind, _, name = key.partition(":")
        having = [r for r in told if key in r]
        values = [r[key] for r in having]
        counted = sum(r.get(f"count:{name}", r["tokens"]) for r in having)
        if not counted and f"count:{name}" in told[0]:
            continue
        if kind == "mean":
            out[name] = sum(values) / max(counted, 1)
        elif kind == "max":
            out[f"{name}_max"] = max(values)
        elif kind in ("sum", "step"):
            out[name] = sum(values) if name in COUNTS else sum(values) / len(values)
    return out
