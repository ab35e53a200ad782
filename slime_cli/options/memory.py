"""Memory of one trainer rank and one engine, estimated from Megatron's architecture options alone.

An estimate for planning, printed by ``--dry-run``: the parts that grow with the model and the layout. Activations other
than the logits, fragmentation, communication buffers and CUDA contexts are not in it. GB below are 2**30 bytes.

Parameters of one layer, with hidden h, heads a, key-value heads g, head size d, feed-forward f, ranks r of latent
attention:
  attention  2*h*a*d + 2*h*g*d, h*a*d more with an output gate; linear: h*(2*k + 3*v + 2*heads of v), with widths k of
             keys and v of values over all heads; latent: h*r_q + r_q*a*(d + d_rope) (h*a*(d + d_rope) without r_q)
             + h*(r_kv + d_rope) + r_kv*a*(d + d_v) + a*d_v*h
  norms      2*h (+ 2*d with qk-layernorm; latent: r_q + r_kv)
  feed-forward 3*h*f with SwiGLU, else 2*h*f; in layers of experts 3*h*f_shared + h*E, and E * 3*h*f_expert
Embedding V*h, twice if untied; one final norm h.

One rank holds layers/pp; attention, feed-forward and embeddings /tp; experts /ep and /expert tp (tp unless given). On
the first or
last pipeline stage:
  weights w (2 in bf16 or fp16, else 4) + gradients 4 + Adam's two moments 8 + fp32 master copy 4 if w is 2
  bytes a parameter, optimizer bytes /(dp * cp) with --use-distributed-optimizer, those of experts / their own data
  parallel
  size; the critic of ppo once more; with LoRA gradients and optimizer of the adapters alone;
  logits: those of a chunk of response tokens, w bytes each; twice if w is 4 (themselves and their gradient, which takes
  their place on a GPU). Kept copies (reference, teacher) are in the host's memory.
One engine device: weights w_e/tp_e, and a token's keys and values: 2 * layers * max(g/tp_e, 1) * d * w_e bytes, of
latent
attention layers * (r_kv + d_rope) * w_e.
"""

from dataclasses import dataclass
from typing import Any

from slime_cli.hardware import device as hardware
from slime_cli.options import adapters
from slime_cli.options.checks.placement import layout
from slime_cli.options.derive import longest
from slime_cli.options.resolve import Resolved
from slime_cli.options.spec import expand

GB = 2**30
LOGITS_CHUNK = 256 * 2**20
"""Bytes of logits that are made at once on a CPU without ``--log-probs-chunk-size``. A GPU has room for a sixteenth of
what is free, which is not known here: all of a micro-batch's are counted."""


@dataclass(frozen=True)
class Shape:
    """Parameters by how layouts split them."""

    layers: int
    h: int
    vocab: int
    tied: bool
    attention: int
    """In one layer, as the two below."""
    norms: int
    cached: int
    """Numbers that an engine keeps of a token in a layer; split by tensor parallelism as far as ``heads_cached``
    goes."""
    heads_cached: int
    dense: int
    """Feed-forwards, shared experts and routers of all layers."""
    experts: int
    """In all layers."""

    @property
    def embeddings(self) -> int:
        return self.vocab * self.h * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        return self.layers * (self.attention + self.norms) + self.dense + self.experts + self.embeddings + self.h


def shape(m: dict[str, Any]) -> Shape | None:
    """From Megatron's options by dest; None when they do not say enough."""
    h, heads, layers, vocab = (
        m.get(name) or 0 for name in ("hidden_size", "num_attention_heads", "num_layers", "vocab_size")
    )
    if not (h and heads and layers and vocab):
        return None
    latent = m.get("multi_latent_attention")
    d = m.get("kv_channels") or h // heads
    groups = m.get("num_query_groups") or heads
    if latent:
        d, rope, value, kv = (
            m.get(n) or 0 for n in ("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "kv_lora_rank")
        )
        q = m.get("q_lora_rank") or 0
        queries = h * q + q * heads * (d + rope) if q else h * heads * (d + rope)
        attention = queries + h * (kv + rope) + kv * heads * (d + value) + heads * value * h
        norms = 2 * h + q + kv
        cached = kv + rope
        groups = 1
    else:
        attention = (3 if m.get("attention_output_gate") else 2) * h * heads * d + 2 * h * groups * d
        attention = _with_linear(m, attention, layers)
        norms = 2 * h + (2 * d if m.get("qk_layernorm") else 0)
        cached = 2 * groups * d
    wide = 3 if m.get("swiglu") else 2
    count = m.get("num_experts") or 0
    sparse = _layers_of_experts(m.get("moe_layer_freq", 1), layers) if count else 0
    feed_forward = wide * h * (m.get("ffn_hidden_size") or 4 * h)
    shared = wide * h * (m.get("moe_shared_expert_intermediate_size") or 0) + h * count
    each = wide * h * (m.get("moe_ffn_hidden_size") or m.get("ffn_hidden_size") or 4 * h)
    return Shape(
        layers=layers,
        h=h,
        vocab=vocab,
        tied=not m.get("untie_embeddings_and_output_weights"),
        attention=attention,
        norms=norms,
        cached=cached,
        heads_cached=groups,
        dense=(layers - sparse) * feed_forward + sparse * shared,
        experts=sparse * count * each,
    )


def _with_linear(m: dict[str, Any], attention: int, layers: int) -> int:
    """Parameters of a layer's attention on average, where some layers have linear attention in its place."""
    if "linear_attention_freq" not in m:
        return attention
    kinds = expand(str(m["linear_attention_freq"])) or []
    keys, values = (
        (m.get(f"linear_num_{x}_heads") or 0) * (m.get(f"linear_{x}_head_dim") or 0) for x in ("key", "value")
    )
    linear = m["hidden_size"] * (2 * keys + 3 * values + 2 * (m.get("linear_num_value_heads") or 0))
    return attention + sum(kinds) * (linear - attention) // layers


def _layers_of_experts(pattern: Any, layers: int) -> int:
    """``moe_layer_freq``: every so many layers, or one 0 or 1 for each."""
    found = pattern if isinstance(pattern, list) else expand(str(pattern))
    return sum(found) if found else -(-layers // int(str(pattern)))


def estimate(resolved: Resolved, derived: dict[str, Any] | None = None) -> dict[str, Any] | None:
    """``parameters``, and bytes by part under ``rank`` (the fullest one) and ``engine``; None if unknown.

    ``derived``: Megatron's options that follow from the checkpoint; those that somebody gave come before them.
    """
    model = shape((derived or {}) | resolved.megatron)
    sizes = layout(resolved)
    if model is None or not sizes["dp"]:
        return None
    return {
        "parameters": model.parameters,
        "rank": _rank(resolved, model, sizes, _trained(resolved, (derived or {}) | resolved.megatron, model)),
        "engine": _engine(resolved, model, sizes) if sizes["engines"] else {},
    }


def computed(resolved: Resolved) -> str:
    """The type that the trainer computes in on this machine, and engines by default."""
    return hardware.trainer_dtype(hardware.find().kind, resolved.megatron)


def _rank(resolved: Resolved, model: Shape, sizes: dict[str, int], trained: float) -> dict[str, int]:
    """``trained``: what :func:`_trained` says."""
    megatron = resolved.megatron
    slime = resolved.slime
    tp = sizes["tp"]
    pp = sizes["pp"]
    part = -(-model.layers // pp) / model.layers
    ends = model.embeddings if pp == 1 else model.vocab * model.h
    split = model.layers * model.attention + model.dense
    expert_tp = megatron.get("expert_tensor_parallel_size") or tp
    experts = part * model.experts / sizes["ep"] / expert_tp
    held = part * (split / tp + model.layers * model.norms) + ends / tp + model.h
    half = computed(resolved) != "float32"
    weight = 2 if half else 4
    shared = held + experts
    if megatron.get("use_distributed_optimizer"):
        expert_dp = max(1, sizes["world_size"] // (pp * sizes["ep"] * expert_tp))
        shared = held / (sizes["dp"] * sizes["cp"]) + experts / expert_dp
    held += experts
    if megatron.get("optimizer_cpu_offload"):
        shared *= 1 - megatron.get("optimizer_offload_fraction", 1.0)
    per_sample = longest(slime)
    tokens = slime.max_tokens_per_gpu or megatron.get("micro_batch_size", 1) * per_sample // sizes["cp"]
    logits = tokens * model.vocab / tp * weight
    chunk = slime.log_probs_chunk_size
    at_once = chunk * model.vocab / tp * weight if chunk else logits if half else LOGITS_CHUNK
    networks = 2 if slime.advantage_estimator == "ppo" and slime.loss_type != "sft_loss" else 1
    moments = 0 if slime.use_stateless_adam else 8
    parts = {
        "weights": networks * held * weight,
        "gradients": networks * held * 4 * trained,
        "optimizer": networks * shared * ((4 if half else 0) + moments) * trained,
        "logits": (1 if half else 2) * min(logits, at_once),
    }
    return {name: int(size) for name, size in parts.items() if size}


def _trained(resolved: Resolved, m: dict[str, Any], model: Shape) -> float:
    """Trained parameters to each of the model's: 1, or those of LoRA adapters, rank * (inputs + outputs) of each linear
    layer. ``m``: Megatron's options by dest."""
    s = resolved.slime
    if s.lora_rank is None:
        return 1.0
    h, heads = model.h, m["num_attention_heads"]
    d = m.get("kv_channels") or h // heads
    f = m.get("ffn_hidden_size") or 4 * h
    sides = {
        "linear_qkv": h + heads * d + 2 * (m.get("num_query_groups") or heads) * d,
        "linear_proj": heads * d + h,
        "linear_fc1": h + (2 if m.get("swiglu") else 1) * f,
        "linear_fc2": f + h,
    }
    adapted = adapters.modules(s.lora_target_modules or [adapters.ALL])
    return s.lora_rank * model.layers * sum(sides[name] for name in adapted) / model.parameters


def _engine(resolved: Resolved, model: Shape, sizes: dict[str, int]) -> dict[str, int]:
    slime = resolved.slime
    tp = sizes["engine_tp"]
    dtype = resolved.sglang.get("dtype")
    width = 4 if (computed(resolved) if dtype in (None, "auto") else dtype) == "float32" else 2
    per_token = model.layers * model.cached // min(tp, model.heads_cached) * width
    per_sample = longest(slime)
    samples = (slime.rollout_batch_size or 0) * slime.n_samples_per_prompt
    at_once = min(slime.sglang_server_concurrency, -(-samples // sizes["engines"]) or slime.sglang_server_concurrency)
    parts = {
        "weights": model.parameters * width // tp,
        "keys and values per token": per_token,
        f"keys and values, {at_once} full samples": per_token * per_sample * at_once,
    }
    return {name: size for name, size in parts.items() if size}
