"""The tensors that a whole HF checkpoint holds: names as they are on disk, and shapes, as ``config.json`` demands.
Torch-free.

:func:`required` is what :mod:`slime_cli.models.whole` compares a folder with. A test compares it with what
transformers itself saves of every architecture. Multi-token-prediction (MTP) layers are not in it: engines and Megatron
do without them.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from slime_cli.errors import DataError
from slime_cli.models import families
from slime_cli.models.families import Config, need

Shape = tuple[int, ...]
Tensors = dict[str, Shape]


EXPERT = re.compile(r"^model\..*\.experts\.\d+\.")
"""The name of a tensor of one expert, of the model itself."""


def required(config: Config, held: Iterable[str] = ()) -> Tensors | None:
    """Name -> shape; None for an architecture that is not known here. DataError for a config that lacks a field.

    ``held``: the names that are there. Qwen3.5's experts may lie each by itself or all of a layer in two tensors.
    """
    name = (config.get("architectures") or ["?"])[0]
    layer = LAYERS.get(name)
    if layer is _qwen3_5_packed and any(EXPERT.search(one) for one in held):
        layer = _qwen3_5_moe
    if layer is None:
        return None
    at = "model.language_model" if name.endswith("ForConditionalGeneration") else "model"
    config = families.text(config)
    rows = need(config, "vocab_size")
    hidden = need(config, "hidden_size")
    out = {f"{at}.embed_tokens.weight": (rows, hidden), f"{at}.norm.weight": (hidden,)}
    if not config.get("tie_word_embeddings", False):
        out["lm_head.weight"] = (rows, hidden)
    for number in range(need(config, "num_hidden_layers")):
        try:
            out |= {f"{at}.layers.{number}.{name}": shape for name, shape in layer(config, number)}
        except IndexError:
            raise DataError(
                f"config.json lists the kinds of fewer than {number + 1} layers", "export the model again"
            ) from None
    return out


def further(name: str, layers: int) -> bool:
    """Whether the tensor belongs to a multi-token-prediction (MTP) layer; ``layers``: how many the model itself has."""
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return name.startswith(("mtp.", "model.mtp_layers.")) or bool(found) and int(found[1]) >= layers


def vision(name: str) -> bool:
    """Whether the tensor belongs to the vision encoder, which text does not go through."""
    return name.startswith("model.visual.")


def computed(name: str) -> bool:
    """The tensor may be there or not: it is computed anew, or is a copy."""
    return name.endswith(("inv_freq", "lm_head.weight"))


# -- parts -------------------------------------------------------------------------------------------------------------

Named = Iterator[tuple[str, Shape]]


def _linear(name: str, rows: int, columns: int, bias: bool = False) -> Named:
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)


def _norms(c: Config) -> Named:
    yield "input_layernorm.weight", (c["hidden_size"],)
    yield "post_attention_layernorm.weight", (c["hidden_size"],)


def _attention(c: Config, *, bias: bool = False, out_bias: bool = False, norms: str = "", gate: int = 1) -> Named:
    """Grouped-query attention. ``norms``: of queries and keys, each "head" or all "heads" in one; ``gate`` 2: queries
    have one.
    """
    hidden = c["hidden_size"]
    heads = need(c, "num_attention_heads")
    groups = c.get("num_key_value_heads") or heads
    width = c.get("head_dim") or hidden // heads
    yield from _linear("self_attn.q_proj", heads * width * gate, hidden, bias)
    yield from _linear("self_attn.k_proj", groups * width, hidden, bias)
    yield from _linear("self_attn.v_proj", groups * width, hidden, bias)
    yield from _linear("self_attn.o_proj", hidden, heads * width, out_bias)
    if norms:
        yield "self_attn.q_norm.weight", (width * (heads if norms == "heads" else 1),)
        yield "self_attn.k_norm.weight", (width * (groups if norms == "heads" else 1),)


def _latent_attention(c: Config) -> Named:
    hidden = c["hidden_size"]
    heads = need(c, "num_attention_heads")
    bias = bool(c.get("attention_bias"))
    nope = need(c, "qk_nope_head_dim")
    rope = need(c, "qk_rope_head_dim")
    value = need(c, "v_head_dim")
    query = c.get("q_lora_rank")
    key = need(c, "kv_lora_rank")
    if query is None:
        yield from _linear("self_attn.q_proj", heads * (nope + rope), hidden)
    else:
        yield from _linear("self_attn.q_a_proj", query, hidden, bias)
        yield "self_attn.q_a_layernorm.weight", (query,)
        yield from _linear("self_attn.q_b_proj", heads * (nope + rope), query)
    yield from _linear("self_attn.kv_a_proj_with_mqa", key + rope, hidden, bias)
    yield "self_attn.kv_a_layernorm.weight", (key,)
    yield from _linear("self_attn.kv_b_proj", heads * (nope + value), key)
    yield from _linear("self_attn.o_proj", hidden, heads * value, bias)


def _indexer(c: Config) -> Named:
    heads = need(c, "index_n_heads")
    width = need(c, "index_head_dim")
    hidden = c["hidden_size"]
    yield from _linear("self_attn.indexer.wq_b", heads * width, need(c, "q_lora_rank"))
    yield from _linear("self_attn.indexer.wk", width, hidden)
    yield from _linear("self_attn.indexer.weights_proj", heads, hidden)
    yield "self_attn.indexer.k_norm.weight", (width,)
    yield "self_attn.indexer.k_norm.bias", (width,)


def _delta_net(c: Config, *, split: bool = False) -> Named:
    """``split``: Qwen3.5's projections, each by itself."""
    keys = need(c, "linear_num_key_heads")
    values = need(c, "linear_num_value_heads")
    key = keys * need(c, "linear_key_head_dim")
    value = values * need(c, "linear_value_head_dim")
    hidden = c["hidden_size"]
    parts = {"qkv": 2 * key + value, "z": value, "b": values, "a": values}
    for name, size in (parts if split else {"qkvz": 2 * key + 2 * value, "ba": 2 * values}).items():
        yield from _linear(f"linear_attn.in_proj_{name}", size, hidden)
    yield "linear_attn.conv1d.weight", (2 * key + value, 1, need(c, "linear_conv_kernel_dim"))
    yield "linear_attn.A_log", (values,)
    yield "linear_attn.dt_bias", (values,)
    yield "linear_attn.norm.weight", (c["linear_value_head_dim"],)
    yield from _linear("linear_attn.out_proj", hidden, value)


def _mlp(
    c: Config,
    width: int,
    at: str = "mlp",
    bias: bool = False,
    names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"),
) -> Named:
    gate, up, down = names
    yield from _linear(f"{at}.{gate}", width, c["hidden_size"], bias)
    yield from _linear(f"{at}.{up}", width, c["hidden_size"], bias)
    yield from _linear(f"{at}.{down}", c["hidden_size"], width, bias)


def _dense(c: Config, bias: bool = False) -> Named:
    yield from _mlp(c, need(c, "intermediate_size"), bias=bias)


def _experts(c: Config, count: int, width: int, at: str = "mlp", **more: Any) -> Named:
    yield from _linear(f"{at}.gate", count, c["hidden_size"])
    for expert in range(count):
        yield from _mlp(c, width, f"{at}.experts.{expert}", **more)


def _routed(c: Config, number: int) -> Named:
    """DeepSeek's and GLM's layers: dense at first, then experts with a bias for choosing them, some of them for all
    tokens.
    """
    if not families.dense_first(c)[number]:
        yield from _dense(c)
        return
    count = need(c, "n_routed_experts")
    width = need(c, "moe_intermediate_size")
    shared = c.get("n_shared_experts") or 0
    yield from _experts(c, count, width)
    yield "mlp.gate.e_score_correction_bias", (count,)
    if shared:
        yield from _mlp(c, shared * width, "mlp.shared_experts")


# -- families ----------------------------------------------------------------------------------------------------------


def _qwen2(c: Config, number: int) -> Named:
    yield from (*_norms(c), *_attention(c, bias=True), *_dense(c))


def _llama(c: Config, number: int) -> Named:
    bias = bool(c.get("attention_bias"))
    yield from (*_norms(c), *_attention(c, bias=bias, out_bias=bias), *_dense(c, bool(c.get("mlp_bias"))))


def _qwen3(c: Config, number: int) -> Named:
    yield from (*_norms(c), *_qwen3_attention(c), *_dense(c))


def _qwen3_attention(c: Config, gate: int = 1) -> Named:
    bias = bool(c.get("attention_bias"))
    yield from _attention(c, bias=bias, out_bias=bias, norms="head", gate=gate)


def _qwen3_moe(c: Config, number: int) -> Named:
    yield from (*_norms(c), *_qwen3_attention(c), *_qwen_experts(c, number))


def _qwen_experts(c: Config, number: int) -> Named:
    if not families.sparse_layers(c)[number]:
        yield from _dense(c)
        return
    yield from _experts(c, families.expert_count(c), need(c, "moe_intermediate_size"))
    if c.get("shared_expert_intermediate_size"):
        yield from _mlp(c, c["shared_expert_intermediate_size"], "mlp.shared_expert")
        yield from _linear("mlp.shared_expert_gate", 1, c["hidden_size"])


def _qwen3_next(c: Config, number: int) -> Named:
    attention = _delta_net(c) if families.linear_layers(c)[number] else _qwen3_attention(c, gate=2)
    yield from (*_norms(c), *attention, *_qwen_experts(c, number))


def _qwen3_5_attention(c: Config, number: int) -> Named:
    linear = families.linear_layers(c)[number]
    yield from (*_norms(c), *(_delta_net(c, split=True) if linear else _qwen3_attention(c, gate=2)))


def _qwen3_5(c: Config, number: int) -> Named:
    yield from (*_qwen3_5_attention(c, number), *_dense(c))


def _qwen3_5_moe(c: Config, number: int) -> Named:
    yield from (*_qwen3_5_attention(c, number), *_qwen_experts(c, number))


def _qwen3_5_packed(c: Config, number: int) -> Named:
    """As Qwen publishes them, the experts of a layer in two tensors."""
    count = families.expert_count(c)
    width = need(c, "moe_intermediate_size")
    apart = [one for one in _qwen_experts(c, number) if ".experts." not in one[0]]
    yield from (*_qwen3_5_attention(c, number), *apart)
    yield "mlp.experts.gate_up_proj", (count, 2 * width, c["hidden_size"])
    yield "mlp.experts.down_proj", (count, c["hidden_size"], width)


def _glm4(c: Config, number: int) -> Named:
    yield from (*_norms(c), *_attention(c, bias=c.get("attention_bias", True)))
    for name in ("post_self_attn_layernorm", "post_mlp_layernorm"):
        yield f"{name}.weight", (c["hidden_size"],)
    yield from _linear("mlp.gate_up_proj", 2 * need(c, "intermediate_size"), c["hidden_size"])
    yield from _linear("mlp.down_proj", c["hidden_size"], c["intermediate_size"])


def _glm4_moe(c: Config, number: int) -> Named:
    attention = _attention(c, bias=bool(c.get("attention_bias")), norms="head" if c.get("use_qk_norm") else "")
    yield from (*_norms(c), *attention, *_routed(c, number))


def _deepseek_v3(c: Config, number: int) -> Named:
    yield from (*_norms(c), *_latent_attention(c), *_routed(c, number))


def _glm5(c: Config, number: int) -> Named:
    yield from _deepseek_v3(c, number)
    kinds = c.get("indexer_types")
    if (kinds[number] != "shared") if kinds else (c.get("index_topk_freq") or 1) == 1:
        yield from _indexer(c)


def _minimax_m2(c: Config, number: int) -> Named:
    count = families.expert_count(c)
    at = "block_sparse_moe"
    yield from (*_norms(c), *_attention(c, norms="heads" if c.get("use_qk_norm", True) else ""))
    yield from _experts(c, count, need(c, "intermediate_size"), at, names=("w1", "w3", "w2"))
    if c.get("use_routing_bias", True):
        yield f"{at}.e_score_correction_bias", (count,)


LAYERS: dict[str, Callable[[Config, int], Named]] = {
    "Qwen2ForCausalLM": _qwen2,
    "MiMoForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "Qwen3NextForCausalLM": _qwen3_next,
    "LlamaForCausalLM": _llama,
    "Qwen3_5ForCausalLM": _qwen3_5,
    "Qwen3_5ForConditionalGeneration": _qwen3_5,
    "Qwen3_5MoeForCausalLM": _qwen3_5_moe,
    "Qwen3_5MoeForConditionalGeneration": _qwen3_5_packed,
    "Glm4ForCausalLM": _glm4,
    "Glm4MoeForCausalLM": _glm4_moe,
    "Glm4MoeLiteForCausalLM": _deepseek_v3,
    "GlmMoeDsaForCausalLM": _glm5,
    "DeepseekV3ForCausalLM": _deepseek_v3,
    "KimiK2ForCausalLM": _deepseek_v3,
    "MiniMaxM2ForCausalLM": _minimax_m2,
}
"""HF architecture -> the tensors of one of its layers. Those of :data:`slime_cli.models.families.FAMILIES`, a test sees
to it.
"""
