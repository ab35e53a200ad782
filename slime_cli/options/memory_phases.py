"""Memory of a device in each phase of a rollout, estimated before the run: what :mod:`slime_cli.options.memory`
estimates by part, and who has it when. Torch-free.

Phases: ``generate``; ``log_probs``, the passes without gradients; ``train``, forward, backward and the optimizer's
step; ``publish``, while the engines get new weights. Two sides: ``trainer`` (the fullest rank's device) and ``engine``;
on one device where both are colocated. What is offloaded is not there in the phase.

Activations that the backward pass needs, numbers a token and layer of a dense model: inputs of both norms and of the
feed-forward (3 h), queries, keys and values before and after their rotation with attention's output (3/2 of attention's
parameters / h), both halves of the feed-forward and their product (its parameters / h); divided by tensor parallelism.
(After Korthikanti et al., arXiv 2205.05198, section 4, without dropout.) With full recomputation a layer keeps its
input alone, and one layer's are there at once. Those of experts are not counted.
"""

from typing import Any

from slime_cli.hardware.device import CPU_TOKENS
from slime_cli.options import memory
from slime_cli.options.checks.placement import layout
from slime_cli.options.derive import longest
from slime_cli.options.resolve import Resolved

PHASES = ("generate", "log_probs", "train", "publish")
Parts = dict[str, int]
"""Bytes by part."""


def predicted(
    resolved: Resolved, derived: dict[str, Any] | None = None, device_bytes: int | None = None
) -> dict[str, dict[str, Parts]] | None:
    """``[phase][side]``; None where the model's numbers are unknown. ``device_bytes``: a GPU's memory, of which
    ``--sglang-mem-fraction-static`` is a share."""
    found = memory.estimate(resolved, derived)
    model = memory.shape((derived or {}) | resolved.megatron)
    if found is None or model is None:
        return None
    rank = dict(found["rank"])
    logits = rank.pop("logits", 0)
    kept, one_layer = _activations(resolved, model)
    passes = {"generate": {}, "log_probs": {"activations": one_layer, "logits": logits}, "publish": {}}
    passes["train"] = {"activations": kept, "logits": logits}
    engine = _engine(resolved, found["engine"], device_bytes)
    out: dict[str, dict[str, Parts]] = {}
    s = resolved.slime
    for phase in PHASES if s.loss_type != "sft_loss" else ("train",):
        trainer, engines = rank, engine
        if s.offload_train and phase in ("generate", "publish"):
            trainer = {"weights": rank["weights"]} if phase == "publish" else {}
        if s.offload_rollout and phase != "generate":
            engines = {name: size for name, size in engine.items() if name == "weights" and phase == "publish"}
        out[phase] = {"trainer": {k: v for k, v in (trainer | passes[phase]).items() if v}, "engine": engines}
    return out


def _activations(resolved: Resolved, model: memory.Shape) -> tuple[int, int]:
    """Bytes of a micro-batch's in all layers of a rank, and in one."""
    m = resolved.megatron
    sizes = layout(resolved)
    width = 4 if memory.computed(resolved) == "float32" else 2
    tokens = resolved.slime.max_tokens_per_gpu or m.get("micro_batch_size", 1) * longest(resolved.slime)
    feed_forward = model.dense / model.layers / model.h
    layer = 3 * model.h + 1.5 * model.attention / model.h + feed_forward
    one = int(tokens * layer * width / sizes["tp"])
    layers = -(-model.layers // sizes["pp"])
    if m.get("recompute_granularity") == "full":
        return int(tokens * model.h * width * layers) + one, one
    return one * layers, one


def _engine(resolved: Resolved, estimated: dict[str, int], device_bytes: int | None) -> Parts:
    if not estimated:
        return {}
    weights = estimated["weights"]
    share = resolved.sglang.get("mem_fraction_static")
    tokens = resolved.sglang.get("max_total_tokens")
    if tokens is None and device_bytes is None:
        tokens = CPU_TOKENS
    if tokens is not None:
        return {"weights": weights, "kv_cache": int(tokens) * estimated["keys and values per token"]}
    if share is not None and device_bytes is not None:
        return {"weights": weights, "kv_cache": max(0, int(float(share) * device_bytes) - weights)}
    return {"weights": weights}  # SGLang chooses the share when it starts
