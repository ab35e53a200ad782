"""What is read off the last hidden states: log-probabilities and entropies, without ever holding the logits of a pack.

Megatron's model hands its hidden states, output layer and weight to an ``output_processor``; these are such. Only the
rows that predict a response token are projected onto the vocabulary. Where all their logits have :func:`room`, they
stay until the backward pass writes their gradient over them; else it is done a chunk at a time, and a chunk's logits
are thrown away and made again in the backward pass: memory follows chunk x vocabulary, whatever the pack's length, and
the price is one more projection of those rows.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from megatron.core import mpu
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch.utils.checkpoint import checkpoint

from slime_cli.hardware import kernels
from slime_cli.training.batching.microbatch import MicroBatch, Predicting
from slime_cli.training.network.logprobs import token_log_probs, token_values

CPU_BYTES = 256 * 2**20
"""Size of a chunk's logits on a CPU, where larger ones are no faster."""
GPU_SHARE = 16
"""One part in so many of a GPU's free memory is for a chunk's logits: activations need the most of it."""


def room(device: torch.device) -> int:
    """Bytes for a chunk's logits, unless ``--log-probs-chunk-size`` says how many rows a chunk has. Collective: the
    ranks cut alike, since a chunk's statistics are summed over the vocabulary's parts."""
    if device.type != "cuda":
        return CPU_BYTES
    kernels.softmax(device)
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = torch.tensor(torch.cuda.mem_get_info(device)[0] + held, device=device)
    torch.distributed.all_reduce(free, torch.distributed.ReduceOp.MIN)
    return max(CPU_BYTES, int(free) // GPU_SHARE)


def hidden_rows(hidden_SBH: torch.Tensor, mb: Predicting, sequence_parallel: bool) -> torch.Tensor:
    """Hidden states at the places that predict a response token, [R, 1, H], whole on every tensor-parallel rank."""
    if sequence_parallel:
        # Every rank continues with all rows, and the projection sums their gradients over ranks: here they are only
        # split.
        hidden_SBH = gather_from_sequence_parallel_region(hidden_SBH, tensor_parallel_output_grad=False)
    return hidden_SBH[mb.where_R]


@contextlib.contextmanager
def _without_sequence_parallel(layer: Any) -> Iterator[None]:
    """The output layer takes whole rows meanwhile (:func:`hidden_rows` has gathered them)."""
    before = layer.sequence_parallel
    layer.sequence_parallel = False
    try:
        yield
    finally:
        layer.sequence_parallel = before


def projector(
    output_layer: torch.nn.Module,
    output_weight: torch.Tensor | None,
    scale_logits: Callable[[torch.Tensor], torch.Tensor],
    **unused: Any,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """From rows [n, 1, H] to this rank's slice of their logits [n, V / tp], with what Megatron gave the processor."""

    def project(rows_R1H: torch.Tensor) -> torch.Tensor:
        with _without_sequence_parallel(output_layer):
            logits_R1V, _ = output_layer(rows_R1H, weight=output_weight, runtime_gather_output=False)
        return scale_logits(logits_R1V).squeeze(1)

    return project


def logits(mb: MicroBatch, **given: Any) -> torch.Tensor:
    """All logits of the response rows at once, [R, V / tp]: for a user's loss, and for comparisons."""
    return projector(**given)(hidden_rows(given["hidden_states"], mb, given["config"].sequence_parallel))


def values(mb: MicroBatch, **given: Any) -> torch.Tensor:
    """The critic's values at the response rows, float32 [R]."""
    values_SB1, _ = given["output_layer"](given["hidden_states"])
    return values_SB1[mb.where_R].flatten().float()


def log_probs(
    mb: Predicting,
    *,
    temperature: float,
    entropy: Literal["no", "value", "gradient"] = "no",
    chunk: int | None = None,
    room: int = CPU_BYTES,
    **given: Any,
) -> torch.Tensor:
    """Log-probability of each response token, and its position's entropy where asked: float32 [2, R] (zeros without).

    ``entropy``: ``value`` is without a gradient. Where the micro-batch says what sampling had left to choose from, the
    log-probability is the one among that; the entropy is of the whole distribution always. ``chunk``: rows that are
    projected at once; as many as :func:`room` has bytes for without it.
    """
    project = projector(**given)
    rows_R1H = hidden_rows(given["hidden_states"], mb, given["config"].sequence_parallel)
    width = given["output_layer"].output_size_per_partition
    chunk = chunk or max(1, room // (rows_R1H.element_size() * width))
    rank = mpu.get_tensor_model_parallel_rank()
    vocabulary = range(rank * width, (rank + 1) * width)

    def of_chunk(rows_C1H: torch.Tensor, targets_C: torch.Tensor, first: int) -> torch.Tensor:
        logits_CV = project(rows_C1H)
        if mb.nucleus is None:
            return torch.stack(token_values(logits_CV, targets_C, temperature, entropy=entropy, after="spent"))
        out_C = token_log_probs(logits_CV, targets_C, temperature, mb.nucleus.keep(first, len(targets_C), vocabulary))
        _, entropy_C = token_values(logits_CV, targets_C, temperature, entropy=entropy)
        return torch.stack([out_C, entropy_C])

    if len(rows_R1H) <= chunk:
        return of_chunk(rows_R1H, mb.targets_R, 0)
    again: Any = functools.partial(checkpoint, of_chunk, use_reentrant=False) if torch.is_grad_enabled() else of_chunk
    firsts = range(0, len(rows_R1H), chunk)
    return torch.cat(
        [again(h, t, i) for h, t, i in zip(rows_R1H.split(chunk), mb.targets_R.split(chunk), firsts)], dim=1
    )
