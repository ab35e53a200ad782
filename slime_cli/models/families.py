"""Megatron's options for each HF architecture, by dest. Torch-free; :mod:`slime_cli.models.architecture` is its one
caller.

Every function takes a ``config.json`` and returns what it says of the model; what Megatron has no option for is a
DataError, never left out in silence. Fields that change nothing in the weights or the logits (dropouts, cache,
multi-token prediction layers, which the main model does not use) are not read.
"""

from collections.abc import Callable
from typing import Any, NoReturn

from slime_cli.errors import DataError

Config = dict[str, Any]
Args = dict[str, Any]
UNSUPPORTED = "give Megatron's options by hand if you know better, or use another checkpoint"


def need(config: Config, field: str) -> Any:
    if config.get(field) is None:
        raise DataError(f"config.json has no {field}", "export the model again with a current transformers")
    return config[field]


def refuse(what: str) -> NoReturn:
    raise DataError(f"config.json: {what}, which Megatron's model here does not have", UNSUPPORTED)


def _only(config: Config, **fields: Any) -> None:
    """Each field, where it is there, has the one value that is supported."""
    for field, value in fields.items():
        if config.get(field, value) not in (value, None):
            refuse(f"{field} is {config[field]!r}, not {value!r}")


# -- parts -------------------------------------------------------------------------------------------------------------


def _common(c: Config) -> Args:
    _only(c, hidden_act="silu", mlp_bias=False)
    return {
        "num_layers": need(c, "num_hidden_layers"),
        "hidden_size": need(c, "hidden_size"),
        "ffn_hidden_size": need(c, "intermediate_size"),
        "num_attention_heads": need(c, "num_attention_heads"),
        "normalization": "RMSNorm",
        "layernorm_epsilon": float(need(c, "rms_norm_eps")),
        "swiglu": True,
        "add_bias_linear": False,
        "position_embedding_type": "rope",
        "max_position_embeddings": need(c, "max_position_embeddings"),
        "seq_length": need(c, "max_position_embeddings"),
        "vocab_size": need(c, "vocab_size"),
        "untie_embeddings_and_output_weights": not c.get("tie_word_embeddings", False),
    }


def _grouped_attention(c: Config) -> Args:
    heads = c["num_attention_heads"]
    _no_sliding_window(c)
    return {
        "group_query_attention": True,
        "num_query_groups": c.get("num_key_value_heads") or heads,
        "kv_channels": c.get("head_dim") or c["hidden_size"] // heads,
    }


def _no_sliding_window(c: Config) -> None:
    layers = c.get("layer_types")
    if layers is not None:
        used = any("sliding" in kind or "chunked" in kind for kind in layers)
    else:
        used = (
            c.get("use_sliding_window")
            and c.get("sliding_window")
            and c.get("max_window_layers", 0) < c["num_hidden_layers"]
        )
    if used:
        refuse("some layers attend within a sliding window")


def _rope_fields(c: Config) -> tuple[str, dict[str, Any]]:
    """Kind and fields; transformers 5 writes ``rope_parameters``, older ones ``rope_scaling`` beside ``rope_theta``."""
    rope = c.get("rope_parameters") or c.get("rope_scaling") or {}
    if any(isinstance(value, dict) for value in rope.values()):
        refuse("layers differ in their rotary embedding")
    return rope.get("rope_type") or rope.get("type") or "default", rope


def _rotary_base(c: Config, rope: dict[str, Any]) -> int:
    base = float(rope.get("rope_theta") or c.get("rope_theta") or 10000)
    if not base.is_integer():
        refuse(f"rope_theta is {base}, not a whole number")
    return int(base)


def _rotary_percent(c: Config, rope: dict[str, Any], default: float = 1.0) -> Args:
    percent = float(rope.get("partial_rotary_factor") or c.get("partial_rotary_factor") or default)
    return {} if percent == 1.0 else {"rotary_percent": percent}


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The part of Llama 3's scaling that Megatron has no option for."""


def _rope(c: Config, percent: float = 1.0) -> Args:
    kind, rope = _rope_fields(c)
    out = {"rotary_base": _rotary_base(c, rope)} | _rotary_percent(c, rope, percent)
    if kind == "llama3":
        _only(rope, **LLAMA3)
        out |= {"use_rope_scaling": True, "rope_scaling_factor": float(need(rope, "factor"))}
    elif kind == "linear":
        factor = float(need(rope, "factor"))
        if not factor.is_integer():
            refuse(f"linear rope scaling by {factor}, not a whole number")
        out["rotary_seq_len_interpolation_factor"] = int(factor)
    elif kind != "default":
        refuse(f"rope scaling {kind!r}")
    return out


def _latent_attention(c: Config) -> Args:
    """DeepSeek's attention. Its two inner norms have Megatron's (and SGLang's) epsilon, ``rms_norm_eps``; transformers
    has 1e-6."""
    _only(c, attention_bias=False, rope_interleave=True)
    _no_sliding_window(c)
    kind, rope = _rope_fields(c)
    out = {
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": c.get("q_lora_rank"),
        "kv_lora_rank": need(c, "kv_lora_rank"),
        "qk_head_dim": need(c, "qk_nope_head_dim"),
        "qk_pos_emb_head_dim": need(c, "qk_rope_head_dim"),
        "v_head_dim": need(c, "v_head_dim"),
        "rotary_base": _rotary_base(c, rope),
        "rope_type": "rope",
    }
    _only(c | rope, partial_rotary_factor=1.0)
    if kind == "yarn":
        _only(rope, attention_factor=None, truncate=True)
        out |= {
            "rope_type": "yarn",
            "rotary_scaling_factor": float(need(rope, "factor")),
            "mscale": float(rope.get("mscale") or 1.0),
            "mscale_all_dim": float(rope.get("mscale_all_dim") or 0.0),
            "yarn_original_max_position_embeddings": need(rope, "original_max_position_embeddings"),
            "yarn_beta_fast": float(rope.get("beta_fast") or 32),
            "yarn_beta_slow": float(rope.get("beta_slow") or 1),
        }
    elif kind != "default":
        refuse(f"rope scaling {kind!r}")
    return out


def pattern(layers: list[int]) -> str:
    """A list of layer kinds as Megatron's options spell it: ``[0]*3+[1]*58``."""
    runs: list[list[int]] = []
    for kind in layers:
        if runs and runs[-1][0] == kind:
            runs[-1][1] += 1
        else:
            runs.append([kind, 1])
    return "+".join(f"[{kind}]*{count}" for kind, count in runs)


def _experts(c: Config, count: int, moe_layers: list[int]) -> Args:
    """Softmax routing of the Qwen families is the default here; :func:`_sigmoid_routing` replaces it."""
    out = {
        "num_experts": count,
        "moe_router_topk": need(c, "num_experts_per_tok"),
        "moe_grouped_gemm": True,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": ["aux_loss"],
        "moe_aux_loss_coeff": [0.0],
    }
    if c.get("moe_intermediate_size") is not None:
        out["moe_ffn_hidden_size"] = c["moe_intermediate_size"]
    return out if all(moe_layers) else out | {"moe_layer_freq": pattern(moe_layers)}


def _softmax_routing(c: Config) -> Args:
    """Softmax over the chosen logits equals softmax over all, chosen and normalised."""
    return {"moe_router_score_function": "softmax", "moe_router_pre_softmax": not need(c, "norm_topk_prob")}


def _sigmoid_routing(c: Config) -> Args:
    topk = c["num_experts_per_tok"]
    groups = c.get("n_group") or 1
    chosen = c.get("topk_group") or 1
    _only(c, norm_topk_prob=True, scoring_func="sigmoid", topk_method="noaux_tc")
    out = {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_load_balancing_type": ["seq_aux_loss"],
        "moe_router_topk_scaling_factor": float(c.get("routed_scaling_factor") or 1.0),
    }
    if groups > 1:
        if topk // chosen != 2:
            refuse(
                f"{topk} experts from {chosen} groups (Megatron scores a group by its best {topk // chosen}, the model"
                " by 2)"
            )
        out |= {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}
    return out


def dense_first(c: Config) -> list[int]:
    """1 for every layer with experts: all but the first ones."""
    kinds = c.get("mlp_layer_types")
    if kinds:
        return [int(kind == "sparse") for kind in kinds]
    _only(c, moe_layer_freq=1)
    dense = min(c.get("first_k_dense_replace") or 0, c["num_hidden_layers"])
    return [0] * dense + [1] * (c["num_hidden_layers"] - dense)


def _shared_experts(c: Config) -> Args:
    shared = c.get("n_shared_experts") or 0
    return {"moe_shared_expert_intermediate_size": shared * c["moe_intermediate_size"]} if shared else {}


def _routed(c: Config) -> Args:
    need(c, "moe_intermediate_size")
    return _experts(c, need(c, "n_routed_experts"), dense_first(c)) | _sigmoid_routing(c) | _shared_experts(c)


# -- families ----------------------------------------------------------------------------------------------------------


def qwen2(c: Config) -> Args:
    return _common(c) | _grouped_attention(c) | _rope(c) | {"add_qkv_bias": True}


def qwen3(c: Config) -> Args:
    _only(c, attention_bias=False)
    return _common(c) | _grouped_attention(c) | _rope(c) | {"qk_layernorm": True}


def llama(c: Config) -> Args:
    _only(c, attention_bias=False)
    return _common(c) | _grouped_attention(c) | _rope(c)


def sparse_layers(c: Config) -> list[int]:
    """1 for every layer with experts, of the Qwen families."""
    step = c.get("decoder_sparse_step") or 1
    dense = c.get("mlp_only_layers") or []
    return [int(i not in dense and (i + 1) % step == 0) for i in range(need(c, "num_hidden_layers"))]


def expert_count(c: Config) -> int:
    return c.get("num_experts") or need(c, "num_local_experts")  # by the latter name since transformers 5


def linear_layers(c: Config) -> list[int]:
    """1 for every layer with linear attention."""
    if c.get("layer_types"):
        return [int(kind == "linear_attention") for kind in c["layer_types"]]
    every = c.get("full_attention_interval") or 4
    return [int((i + 1) % every != 0) for i in range(need(c, "num_hidden_layers"))]


def qwen3_moe(c: Config) -> Args:
    need(c, "moe_intermediate_size")
    return qwen3(c) | _experts(c, expert_count(c), sparse_layers(c)) | _softmax_routing(c)


def _gated_layers(c: Config) -> Args:
    """Three gated-delta-net layers to one of attention; norms are stored around zero, attention has an output gate."""
    _only(c, attention_bias=False)
    names = ("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim")
    delta = {name: need(c, name) for name in (*names, "linear_num_key_heads", "linear_num_value_heads")}
    return (
        _common(c)
        | _grouped_attention(c)
        | _rope(c, 0.25)
        | delta
        | {
            "qk_layernorm": True,
            "attention_output_gate": True,
            "experimental_attention_variant": "gated_delta_net",
            "linear_attention_freq": pattern(linear_layers(c)),
            "layernorm_zero_centered_gamma": True,
        }
    )


def _gated_experts(c: Config) -> Args:
    return (
        _experts(c, need(c, "num_experts"), [1])
        | {"moe_router_score_function": "softmax", "moe_router_pre_softmax": False}
        | {
            "moe_shared_expert_intermediate_size": need(c, "shared_expert_intermediate_size"),
            "moe_shared_expert_gate": True,
        }
    )


def qwen3_next(c: Config) -> Args:
    _only(c, decoder_sparse_step=1, norm_topk_prob=True)
    if c.get("mlp_only_layers"):
        refuse("mlp_only_layers is not empty")
    return _gated_layers(c) | _gated_experts(c)


def text(c: Config) -> Config:
    """The language model's part of the config of one that takes images too."""
    inner = c.get("text_config")
    return c if inner is None else {"tie_word_embeddings": c.get("tie_word_embeddings", False)} | inner


def qwen3_5(c: Config) -> Args:
    """Qwen3.5 and 3.6; of a model with vision, the language model, which text alone goes through as if it were all."""
    return _gated_layers(text(c))


def qwen3_5_moe(c: Config) -> Args:
    inner = text(c)
    without = {"intermediate_size": need(inner, "moe_intermediate_size")} | inner  # there is no dense layer
    return _gated_layers(without) | _gated_experts(inner)


def glm4(c: Config) -> Args:
    """GLM-4 and GLM-Z1, 9B and 32B: a norm behind attention and feed-forward, rotary pairs side by side."""
    out = _common(c) | _grouped_attention(c) | _rope(c, 0.5)
    norms = {"post_self_attn_layernorm": True, "post_mlp_layernorm": True}
    return out | norms | {"add_qkv_bias": c.get("attention_bias", True), "rotary_interleaved": True}


def glm4_moe(c: Config) -> Args:
    """GLM-4.5, 4.6, 4.7."""
    out = _common(c) | _grouped_attention(c) | _rope(c, 0.5) | _routed(c)
    return out | {"add_qkv_bias": bool(c.get("attention_bias")), "qk_layernorm": bool(c.get("use_qk_norm"))}


def deepseek_v3(c: Config) -> Args:
    """DeepSeek V3, V3.1, R1, Moonlight, Kimi K2; GLM-4.7-Flash by another name."""
    return _common(c) | _latent_attention(c) | _routed(c)


def glm5(c: Config) -> Args:
    """DeepSeek's attention with an indexer that chooses the keys."""
    out = deepseek_v3(c)
    if c.get("indexer_types") and "shared" in c["indexer_types"] or (c.get("index_topk_freq") or 1) > 1:
        refuse("layers share their indexers")
    return out | {
        "experimental_attention_variant": "dsa",
        "dsa_indexer_n_heads": need(c, "index_n_heads"),
        "dsa_indexer_head_dim": need(c, "index_head_dim"),
        "dsa_indexer_topk": need(c, "index_topk"),
        "dsa_indexer_rope_interleaved": bool(c.get("indexer_rope_interleave")),
        "dsa_indexer_rotate_activation": False,
        "dsa_indexer_k_norm_epsilon": 1e-6,
    }


def minimax_m2(c: Config) -> Args:
    """M2, M2.1, M2.5: norms of queries and keys over all heads, experts by sigmoid with a bias."""
    _only(c, use_qk_norm=True, use_routing_bias=True, scoring_func="sigmoid", shared_intermediate_size=0)
    if any(kind != 1 for kind in c.get("attn_type_list") or ()):
        refuse("some layers have linear attention")
    experts = {**c, "moe_intermediate_size": need(c, "intermediate_size"), "norm_topk_prob": True}
    of_heads = c["rotary_dim"] / need(c, "head_dim") if c.get("rotary_dim") else 1.0
    return (
        _common(c)
        | _grouped_attention(c)
        | _rope(c, of_heads)
        | {"qk_layernorm": True, "qk_layernorm_over_heads": True}
        | _experts(experts, expert_count(c), [1])
        | _sigmoid_routing({"n_group": None, **experts, "scoring_func": "sigmoid"})
    )


FAMILIES: dict[str, Callable[[Config], Args]] = {
    "Qwen2ForCausalLM": qwen2,
    "MiMoForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "Qwen3MoeForCausalLM": qwen3_moe,
    "Qwen3NextForCausalLM": qwen3_next,
    "Qwen3_5ForCausalLM": qwen3_5,
    "Qwen3_5ForConditionalGeneration": qwen3_5,
    "Qwen3_5MoeForCausalLM": qwen3_5_moe,
    "Qwen3_5MoeForConditionalGeneration": qwen3_5_moe,
    "LlamaForCausalLM": llama,
    "Glm4ForCausalLM": glm4,
    "Glm4MoeForCausalLM": glm4_moe,
    "Glm4MoeLiteForCausalLM": deepseek_v3,
    "GlmMoeDsaForCausalLM": glm5,
    "DeepseekV3ForCausalLM": deepseek_v3,
    "KimiK2ForCausalLM": deepseek_v3,
    "MiniMaxM2ForCausalLM": minimax_m2,
}
"""HF architecture -> the function that knows it. All of them are known to megatron-bridge as well, but for dense GLM-4
(:mod:`slime_cli.hardware.megatron_bridge`)."""
