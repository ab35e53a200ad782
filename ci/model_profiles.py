"""Writes ``slime_cli/profiles/models``: Megatron's options of published models, derived from the fields of their
configs below.

``python ci/model_profiles.py`` rewrites all of them, and the table of them in ``docs/models.md``; tests hold both. The
rules are :mod:`slime_cli.models.families`; nothing here but names and numbers. ``--hf-checkpoint`` alone gives the same
options, so a profile is for planning without the checkpoint (``slime train --dry-run``) and to have the numbers in
view.
"""

import pathlib
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from slime_cli.commands import convert_derive
from slime_cli.models import architecture
from slime_cli.options import profiles


def shape(hidden: int, ffn: int, layers: int, heads: int, groups: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": groups, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    } | more  # fmt: skip


TIED = {"tie_word_embeddings": True}


def qwen2(*numbers: int, **more: Any) -> dict[str, Any]:
    return (
        shape(
            *numbers,
            architectures=["Qwen2ForCausalLM"],
            vocab_size=151936,
            rope_theta=1e6,
            max_position_embeddings=32768,
        )
        | more
    )


def qwen3(*numbers: int, **more: Any) -> dict[str, Any]:
    fields = dict(
        architectures=["Qwen3ForCausalLM"],
        head_dim=128,
        vocab_size=151936,
        rope_theta=1e6,
        max_position_embeddings=40960,
    )
    return shape(*numbers) | fields | more


def qwen3_moe(*numbers: int, ffn: int) -> dict[str, Any]:
    experts = dict(num_experts=128, num_experts_per_tok=8, moe_intermediate_size=ffn, norm_topk_prob=True)
    return qwen3(*numbers, architectures=["Qwen3MoeForCausalLM"], **experts)


def llama3(*numbers: int, factor: float, **more: Any) -> dict[str, Any]:
    rope = dict(
        rope_type="llama3",
        factor=factor,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    fields = dict(
        architectures=["LlamaForCausalLM"], vocab_size=128256, rms_norm_eps=1e-5, rope_theta=5e5, rope_scaling=rope
    )
    return shape(*numbers, max_position_embeddings=131072) | fields | more


def glm4_moe(
    *numbers: int, ffn: int, experts: int, dense: int, scale: float, qk_norm: bool, length: int = 131072
) -> dict[str, Any]:
    fields = dict(
        architectures=["Glm4MoeForCausalLM"], head_dim=128, vocab_size=151552, rms_norm_eps=1e-5, rope_theta=1e6
    )
    attention = dict(
        attention_bias=True, use_qk_norm=qk_norm, partial_rotary_factor=0.5, max_position_embeddings=length
    )
    routing = dict(
        num_experts_per_tok=8,
        n_routed_experts=experts,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
    )
    more = dict(moe_intermediate_size=ffn, first_k_dense_replace=dense, routed_scaling_factor=scale)
    return shape(*numbers) | fields | attention | routing | more


def deepseek(*numbers: int, **more: Any) -> dict[str, Any]:
    latent = dict(kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    routing = dict(
        num_experts_per_tok=8,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        moe_intermediate_size=2048,
    )
    routing |= dict(architectures=["DeepseekV3ForCausalLM"], scoring_func="sigmoid", topk_method="noaux_tc")
    return shape(*numbers) | latent | routing | more


def yarn(factor: float, fast: float) -> dict[str, Any]:
    fields = dict(mscale=1.0, mscale_all_dim=1.0, beta_fast=fast, beta_slow=1.0, original_max_position_embeddings=4096)
    return {"rope_scaling": {"type": "yarn", "factor": factor} | fields}


def deepseek_v3(layers: int) -> dict[str, Any]:
    fields = dict(
        vocab_size=129280,
        rope_theta=1e4,
        max_position_embeddings=163840,
        routed_scaling_factor=2.5,
        first_k_dense_replace=3,
    )
    return (
        deepseek(7168, 18432, layers, 128, 128)
        | fields
        | dict(n_routed_experts=256, n_group=8, topk_group=4)
        | yarn(40.0, 32.0)
    )


KIMI = dict(
    vocab_size=163840, rope_theta=5e4, n_routed_experts=384, first_k_dense_replace=1, routed_scaling_factor=2.827
)
MOONLIGHT = dict(
    vocab_size=163840, rope_theta=5e4, n_routed_experts=64, first_k_dense_replace=1, routed_scaling_factor=2.446,
    q_lora_rank=None, num_experts_per_tok=6, n_shared_experts=2, moe_intermediate_size=1408, rms_norm_eps=1e-5,
    max_position_embeddings=8192,
)  # fmt: skip
FLASH = dict(
    architectures=["Glm4MoeLiteForCausalLM"], vocab_size=154880, rope_theta=1e6, rms_norm_eps=1e-5,
    max_position_embeddings=202752, q_lora_rank=768, qk_nope_head_dim=192, v_head_dim=256, moe_intermediate_size=1536,
    n_routed_experts=64, num_experts_per_tok=4, first_k_dense_replace=1, routed_scaling_factor=1.8,
)  # fmt: skip
MIMO = dict(architectures=["MiMoForCausalLM"], head_dim=128, vocab_size=151680, rms_norm_eps=1e-5, rope_theta=640000)

DELTA = dict(
    linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_value_head_dim=128, linear_num_key_heads=16,
    linear_num_value_heads=32, head_dim=256, rope_theta=1e7, partial_rotary_factor=0.25, max_position_embeddings=262144,
)  # fmt: skip
GLM4 = dict(
    architectures=["Glm4ForCausalLM"], head_dim=128, vocab_size=151552, rms_norm_eps=1e-5, rope_theta=1e4,
    partial_rotary_factor=0.5, max_position_embeddings=32768,
)  # fmt: skip
MINIMAX = dict(
    architectures=["MiniMaxM2ForCausalLM"], head_dim=128, vocab_size=200064, rope_theta=5e6, rotary_dim=64,
    max_position_embeddings=196608, num_local_experts=256, num_experts_per_tok=8, scoring_func="sigmoid",
    use_qk_norm=True, use_routing_bias=True,
)  # fmt: skip


def qwen3_5(*numbers: int, **more: Any) -> dict[str, Any]:
    """As published, within a model that takes images too."""
    kind = "Qwen3_5Moe" if "num_experts" in more else "Qwen3_5"
    inner = shape(*numbers) | DELTA | dict(vocab_size=248320) | more
    return {"architectures": [f"{kind}ForConditionalGeneration"], "text_config": inner}


def delta_experts(count: int, topk: int) -> dict[str, Any]:
    routing = dict(num_experts=count, num_experts_per_tok=topk, norm_topk_prob=True)
    return routing | dict(moe_intermediate_size=512, shared_expert_intermediate_size=512)


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2.5-0.5b": ("Qwen2.5-0.5B", qwen2(896, 4864, 24, 14, 2, **TIED)),
    "qwen2.5-1.5b": ("Qwen2.5-1.5B-Instruct", qwen2(1536, 8960, 28, 12, 2, **TIED)),
    "qwen2.5-3b": ("Qwen2.5-3B", qwen2(2048, 11008, 36, 16, 2, **TIED)),
    "qwen2.5-7b": ("Qwen2.5-7B-Instruct", qwen2(3584, 18944, 28, 28, 4, vocab_size=152064)),
    "qwen2.5-32b": (
        "Qwen2.5-32B",
        qwen2(5120, 27648, 64, 40, 8, vocab_size=152064, rms_norm_eps=1e-5, max_position_embeddings=131072),
    ),
    "qwen3-0.6b": ("Qwen3-0.6B", qwen3(1024, 3072, 28, 16, 8, **TIED)),
    "qwen3-1.7b": ("Qwen3-1.7B", qwen3(2048, 6144, 28, 16, 8, **TIED)),
    "qwen3-4b": ("Qwen3-4B", qwen3(2560, 9728, 36, 32, 8, **TIED)),
    "qwen3-4b-instruct-2507": (
        "Qwen3-4B-Instruct-2507", qwen3(2560, 9728, 36, 32, 8, rope_theta=5e6, max_position_embeddings=262144, **TIED),
    ),
    "qwen3-8b": ("Qwen3-8B", qwen3(4096, 12288, 36, 32, 8)),
    "qwen3-14b": ("Qwen3-14B", qwen3(5120, 17408, 40, 40, 8)),
    "qwen3-32b": ("Qwen3-32B", qwen3(5120, 25600, 64, 64, 8)),
    "qwen3-30b-a3b": ("Qwen3-30B-A3B", qwen3_moe(2048, 6144, 48, 32, 4, ffn=768)),
    "qwen3-235b-a22b": ("Qwen3-235B-A22B", qwen3_moe(4096, 12288, 94, 64, 4, ffn=1536)),
    "qwen3-next-80b-a3b": (
        "Qwen3-Next-80B-A3B",
        shape(2048, 5120, 48, 16, 2, architectures=["Qwen3NextForCausalLM"], vocab_size=151936)
        | DELTA | delta_experts(512, 10),
    ),
    "qwen3.5-9b": ("Qwen3.5-9B", qwen3_5(4096, 12288, 32, 16, 4)),
    "qwen3.5-27b": ("Qwen3.5-27B", qwen3_5(5120, 17408, 64, 24, 4, linear_num_value_heads=48)),
    "qwen3.5-35b-a3b": ("Qwen3.5-35B-A3B and Qwen3.6-35B-A3B", qwen3_5(2048, 512, 40, 16, 2, **delta_experts(256, 8))),
    "llama3.1-8b": ("Llama-3.1-8B", llama3(4096, 14336, 32, 32, 8, factor=8.0)),
    "llama3.2-3b": ("Llama-3.2-3B", llama3(3072, 8192, 28, 24, 8, factor=32.0, head_dim=128, **TIED)),
    "mimo-7b-rl": ("MiMo-7B-RL", qwen2(4096, 11008, 36, 32, 8, **MIMO)),
    "glm4-9b": ("GLM-4-9B-0414 and GLM-Z1-9B-0414", shape(4096, 13696, 40, 32, 2) | GLM4),
    "glm4.5-106b-a12b": (
        "GLM-4.5-Air", glm4_moe(4096, 10944, 46, 96, 8, ffn=1408, experts=128, dense=1, scale=1.0, qk_norm=False),
    ),
    "glm4.5-355b-a32b": (
        "GLM-4.5", glm4_moe(5120, 12288, 92, 96, 8, ffn=1536, experts=160, dense=3, scale=2.5, qk_norm=True),
    ),
    "glm4.6-355b-a32b": (
        "GLM-4.6",
        glm4_moe(5120, 12288, 92, 96, 8, ffn=1536, experts=160, dense=3, scale=2.5, qk_norm=True, length=202752),
    ),
    "glm4.7-30b-a3b": ("GLM-4.7-Flash", deepseek(2048, 10240, 47, 20, 20, **FLASH)),
    "deepseek-v3": ("DeepSeek-V3, V3.1 and R1", deepseek_v3(61)),
    "deepseek-v3-5layer": ("the first 5 layers of DeepSeek-V3, for trials", deepseek_v3(5)),
    "deepseek-v3-20layer": ("the first 20 layers of DeepSeek-V3, for trials", deepseek_v3(20)),
    "kimi-k2": (
        "Kimi-K2-Instruct",
        deepseek(7168, 18432, 61, 64, 64, max_position_embeddings=131072, **KIMI) | yarn(32.0, 1.0),
    ),
    "kimi-k2-thinking": (
        "Kimi-K2-Thinking",
        deepseek(7168, 18432, 61, 64, 64, max_position_embeddings=262144, **KIMI)
        | yarn(64.0, 1.0)
        | {"rms_norm_eps": 1e-5},
    ),
    "minimax-m2": ("MiniMax-M2 and M2.5", shape(3072, 1536, 62, 48, 8) | MINIMAX),
    "moonlight": ("Moonlight-16B-A3B", deepseek(2048, 11264, 27, 16, 16, **MOONLIGHT)),
}  # fmt: skip
"""Profile -> the model's published name, and the fields of its ``config.json`` that its options follow from."""


def text(name: str) -> str:
    """The profile of a model of the table."""
    model, config = MODELS[name]
    return convert_derive.profile(architecture.megatron_args(config), f"Architecture of {model} for Megatron.")


# -- docs/models.md ----------------------------------------------------------------------------------------------------

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "models.md"
BEGIN, END = (
    "<!-- the table below is written by ci/model_profiles.py -->",
    "<!-- the table above is written by ci/model_profiles.py -->",
)


def parameters(a: dict[str, Any]) -> int:
    """Parameters of a model with these options (by dest), without multi-token-prediction (MTP) layers."""
    h, heads = a["hidden_size"], a["num_attention_heads"]
    every = [int("num_experts" in a)] * a["num_layers"]
    sparse = architecture.expand(a["moe_layer_freq"]) if "moe_layer_freq" in a else every
    if a.get("multi_latent_attention"):
        rope, q, kv = a["qk_pos_emb_head_dim"], a.get("q_lora_rank"), a["kv_lora_rank"]
        queries = heads * (a["qk_head_dim"] + rope)
        attention = h * queries if q is None else h * q + q + q * queries
        attention += (
            h * (kv + rope) + kv + kv * heads * (a["qk_head_dim"] + a["v_head_dim"]) + heads * a["v_head_dim"] * h
        )
    else:
        d, groups = a["kv_channels"], a["num_query_groups"]
        qkv = (heads + 2 * groups) * d
        normed = (heads + groups) * d if a.get("qk_layernorm_over_heads") else 2 * d
        attention = h * qkv + heads * d * h + qkv * bool(a.get("add_qkv_bias")) + normed * bool(a.get("qk_layernorm"))
        attention += heads * d * h * bool(a.get("attention_output_gate"))
    dense = 3 * h * a["ffn_hidden_size"]
    experts = a.get("num_experts", 0)
    moe = 3 * h * (experts * a.get("moe_ffn_hidden_size", 0) + a.get("moe_shared_expert_intermediate_size", 0))
    moe += experts * (h + bool(a.get("moe_router_enable_expert_bias")))
    moe += h * bool(a.get("moe_shared_expert_gate"))
    norms = h * (2 + bool(a.get("post_self_attn_layernorm")) + bool(a.get("post_mlp_layernorm")))
    linear = architecture.expand(a["linear_attention_freq"]) if "linear_attention_freq" in a else [0] * a["num_layers"]
    layers = sum(
        norms + (_delta_net(a) if is_linear else attention) + (moe if is_moe else dense)
        for is_linear, is_moe in zip(linear, sparse, strict=True)
    )
    return layers + a["vocab_size"] * h * (2 if a.get("untie_embeddings_and_output_weights") else 1) + h


def _delta_net(a: dict[str, Any]) -> int:
    heads = a["linear_num_value_heads"]
    keys = a["linear_num_key_heads"] * a["linear_key_head_dim"]
    values = heads * a["linear_value_head_dim"]
    projections = a["hidden_size"] * (2 * keys + 2 * values + 2 * heads + values)
    return projections + (2 * keys + values) * a["linear_conv_kernel_dim"] + 2 * heads + a["linear_value_head_dim"]


def table() -> str:
    """A line for each profile, its figures read from the YAML file."""
    lines = [
        "| `--profile` | model | HF architecture | layers | hidden | heads / groups | experts | parameters |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, (model, config) in MODELS.items():
        a = {dest: value for (section, dest), value in profiles.load(name).layer.items() if section == "megatron"}
        heads = f"{a['num_attention_heads']} / {'latent' if a.get('multi_latent_attention') else a['num_query_groups']}"
        experts = f"{a['num_experts']}, {a['moe_router_topk']} a token" if "num_experts" in a else ""
        cells = [
            f"`{name}`",
            model,
            f"`{config['architectures'][0]}`",
            a["num_layers"],
            a["hidden_size"],
            heads,
            experts,
            _short(parameters(a)),
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _short(count: int) -> str:
    unit, letter = (1e9, "B") if count >= 1e9 else (1e6, "M")
    return f"{count / unit:.3g} {letter}" if count < 1e12 else f"{count / 1e12:.3g} T"


def page(old: str) -> str:
    """``old`` with the table between the two marks as it should be."""
    before, rest = old.split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


def main() -> None:
    folder = profiles.FOLDER / "models"
    for path in folder.glob("*.yaml"):
        path.unlink()
    for name in MODELS:
        (folder / f"{name}.yaml").write_text(text(name), encoding="utf-8")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"{len(MODELS)} profiles in {folder}, and their table in {PAGE}")


if __name__ == "__main__":
    main()
