"""Memory of one trainer rank and one engine, estimated from architecture numbers alone.

An estimate for planning, printed by ``--dry-run``: the parts that grow with the model and the layout. Activations other
than the logits, fragmentation, communication buffers and CUDA contexts are not in it. GB below are 2**30 bytes.

Parameters of one layer, with hidden h, heads a, key-value heads g, head size d, feed-forward f:
  attention  h*a*d + 2*h*g*d + a*d*h        feed-forward  3*h*f with SwiGLU, else 2*h*f
  norms      2*h (+ 2*d with qk-layernorm)  experts       E * 3*h*f_expert + h*E in place of the feed-forward
Embedding V*h, twice if untied; one final norm h.

One rank holds layers/pp; attention, feed-forward and embeddings /tp; experts /ep. On the first or last pipeline stage:
  weights w (2 in bf16 or fp16, else 4) + gradients 4 + Adam's two moments 8 + fp32 master copy 4 if w is 2
  bytes a parameter, optimizer bytes /dp with --use-distributed-optimizer; another w with --use-kl-loss (the reference);
  logits: tokens * V/tp * 4 bytes, twice (themselves and their gradient).
One engine device: weights w_e/tp_e, and keys and values: 2 * layers * max(g/tp_e, 1) * d * w_e bytes a token.
"""

from dataclasses import dataclass
from typing import Any

from slime_cli.options.checks import layout
from slime_cli.options.resolve import Resolved

GB = 2**30


@dataclass(frozen=True)
class Shape:
    """Architecture numbers, in the letters of the module docstring."""

    layers: int
    h: int
    f: int
    a: int
    g: int
    d: int
    vocab: int
    tied: bool
    swiglu: bool = True
    qk_norm: bool = False
    experts: int = 0
    f_expert: int = 0

    @property
    def attention(self) -> int:
        return 2 * self.h * self.a * self.d + 2 * self.h * self.g * self.d

    @property
    def norms(self) -> int:
        return 2 * self.h + (2 * self.d if self.qk_norm else 0)

    @property
    def dense(self) -> int:
        """Feed-forward (or router) parameters that expert parallelism does not split."""
        return self.h * self.experts if self.experts else (3 if self.swiglu else 2) * self.h * self.f

    @property
    def expert(self) -> int:
        return self.experts * 3 * self.h * self.f_expert

    @property
    def embeddings(self) -> int:
        return self.vocab * self.h * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        return self.layers * (self.attention + self.norms + self.dense + self.expert) + self.embeddings + self.h


def shape(resolved: Resolved, hf_config: dict | None = None) -> Shape | None:
    """From Megatron's options, completed by the checkpoint's config.json; None when neither says enough."""
    megatron, hf = resolved.megatron, hf_config or {}

    def number(dest: str, *keys: str, default: int = 0) -> int:
        return next((value for value in (megatron.get(dest), *map(hf.get, keys)) if value), default)

    h, a, layers = number("hidden_size", "hidden_size"), number("num_attention_heads", "num_attention_heads"), 0
    layers, vocab = number("num_layers", "num_hidden_layers"), number("padded_vocab_size", "vocab_size")
    vocab = vocab or number("vocab_size")
    if not (h and a and layers and vocab):
        return None
    f = number("ffn_hidden_size", "intermediate_size", default=4 * h)
    untied = megatron.get("untie_embeddings_and_output_weights", not hf.get("tie_word_embeddings", True))
    return Shape(
        layers=layers,
        h=h,
        f=f,
        a=a,
        g=number("num_query_groups", "num_key_value_heads", default=a),
        d=number("kv_channels", "head_dim", default=h // a),
        vocab=vocab,
        tied=not untied,
        swiglu=bool(megatron.get("swiglu", hf_config is not None)),
        qk_norm=bool(megatron.get("qk_layernorm", "qwen3" in str(hf.get("model_type", "")))),
        experts=number("num_experts", "num_experts", "n_routed_experts"),
        f_expert=number("moe_ffn_hidden_size", "moe_intermediate_size", default=f),
    )


def estimate(resolved: Resolved, hf_config: dict | None = None) -> dict[str, Any] | None:
    """``parameters``, and bytes by part under ``rank`` (the fullest one) and ``engine``; None if unknown."""
    model = shape(resolved, hf_config)
    sizes = layout(resolved)
    if model is None or not sizes["dp"]:
        return None
    return {
        "parameters": model.parameters,
        "rank": _rank(resolved, model, sizes),
        "engine": _engine(resolved, model, sizes) if sizes["engines"] else {},
    }


def _rank(resolved: Resolved, model: Shape, sizes: dict[str, int]) -> dict[str, int]:
    megatron, slime = resolved.megatron, resolved.slime
    tp, pp = sizes["tp"], sizes["pp"]
    layers = -(-model.layers // pp)
    ends = model.embeddings if pp == 1 else model.vocab * model.h
    held = (
        layers * ((model.attention + model.dense) / tp + model.norms + model.expert / sizes["ep"]) + ends / tp + model.h
    )
    half = bool(megatron.get("bf16") or megatron.get("fp16"))
    weight = 2 if half else 4
    share = sizes["dp"] * sizes["cp"] if megatron.get("use_distributed_optimizer") else 1
    per_sample = (slime["rollout_max_prompt_len"] or 0) + (slime["rollout_max_response_len"] or 0)
    tokens = slime["max_tokens_per_gpu"] or megatron.get("micro_batch_size", 1) * per_sample // sizes["cp"]
    parts = {
        "weights": held * weight,
        "gradients": held * 4,
        "optimizer": held * (12 if half else 8) / share,
        "reference": held * weight if slime["use_kl_loss"] else 0,
        "logits": 2 * tokens * model.vocab / tp * 4,
    }
    return {name: int(size) for name, size in parts.items() if size}


def _engine(resolved: Resolved, model: Shape, sizes: dict[str, int]) -> dict[str, int]:
    slime, tp = resolved.slime, sizes["engine_tp"]
    width = 4 if resolved.sglang.get("dtype") == "float32" else 2
    per_token = 2 * model.layers * max(model.g // tp, 1) * model.d * width
    per_sample = (slime["rollout_max_prompt_len"] or 0) + (slime["rollout_max_response_len"] or 0)
    samples = (slime["rollout_batch_size"] or 0) * slime["n_samples_per_prompt"]
    at_once = min(
        slime["sglang_server_concurrency"], -(-samples // sizes["engines"]) or slime["sglang_server_concurrency"]
    )
    parts = {
        "weights": model.parameters * width // tp,
        "keys and values per token": per_token,
        f"keys and values, {at_once} full samples": per_token * per_sample * at_once,
    }
    return {name: size for name, size in parts.items() if size}
