"""Megatron's options from HF configs: real dests, the parser's own spelling, and no feature left out in silence."""

import pytest

from slime_cli.errors import DataError, UsageError
from slime_cli.models import architecture
from slime_cli.models.families import FAMILIES
from slime_cli.options import catalogue
from slime_cli.options.layers import from_argv
from slime_cli.options.spec import to_words

BASE = dict(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    rms_norm_eps=1e-5,
    max_position_embeddings=512,
    vocab_size=96,
    rope_theta=1e6,
)
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=32)
ROUTED = EXPERTS | dict(
    n_routed_experts=8, n_shared_experts=2, first_k_dense_replace=1, routed_scaling_factor=2.5, norm_topk_prob=True
)
LATENT = dict(q_lora_rank=32, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24)
YARN = dict(
    type="yarn",
    factor=40,
    mscale=1.0,
    mscale_all_dim=1.0,
    beta_fast=32,
    beta_slow=1,
    original_max_position_embeddings=4096,
)
DELTA = dict(
    linear_conv_kernel_dim=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    shared_expert_intermediate_size=32,
)
GATED = EXPERTS | DELTA | dict(num_experts=8, norm_topk_prob=True)
INDEXER = dict(index_topk=8, index_head_dim=8, index_n_heads=2)
MORE = {
    "Qwen3MoeForCausalLM": EXPERTS | dict(num_experts=8, norm_topk_prob=True),
    "Qwen3NextForCausalLM": GATED,
    "Qwen3_5ForCausalLM": DELTA,
    "Qwen3_5ForConditionalGeneration": dict(text_config=BASE | DELTA),
    "Qwen3_5MoeForCausalLM": GATED,
    "Qwen3_5MoeForConditionalGeneration": dict(text_config=BASE | GATED),
    "MiniMaxM2ForCausalLM": dict(num_local_experts=4, num_experts_per_tok=2, head_dim=16),
    "Glm4MoeForCausalLM": ROUTED | dict(attention_bias=True, use_qk_norm=True),
    "Glm4MoeLiteForCausalLM": ROUTED | LATENT,
    "GlmMoeDsaForCausalLM": ROUTED | LATENT | INDEXER,
    "DeepseekV3ForCausalLM": ROUTED | LATENT | dict(rope_scaling=YARN),
    "KimiK2ForCausalLM": ROUTED | LATENT,
}


def derive(name: str, **more) -> dict:
    return architecture.megatron_args(BASE | MORE.get(name, {}) | {"architectures": [name]} | more)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_megatrons_parser_reads_back_what_is_derived(name):
    args = derive(name)
    table = catalogue.load("megatron")
    assert set(args) <= set(table.by_dest)
    read = {dest: value for (_, dest), value in from_argv(architecture.argv(args), "convert")[0].items()}
    left_out = {dest: value for dest, value in args.items() if dest not in read}
    assert read | left_out == args
    assert all(table.by_dest[dest][0].default == value for dest, value in left_out.items())
    for dest, value in read.items():
        assert to_words(table.option_for(dest, value), value)


def test_dense_families():
    qwen2, qwen3, llama = (derive(f"{name}ForCausalLM") for name in ("Qwen2", "Qwen3", "Llama"))
    assert (
        qwen2["add_qkv_bias"] and "qk_layernorm" not in qwen2 and qwen3["qk_layernorm"] and "add_qkv_bias" not in llama
    )
    assert (
        qwen3["layernorm_epsilon"] == 1e-5 and qwen3["add_bias_linear"] is False and qwen3["rotary_base"] == 1_000_000
    )
    assert qwen3["kv_channels"] == 16 and derive("Qwen3ForCausalLM", head_dim=32)["kv_channels"] == 32
    tied = derive("Qwen3ForCausalLM", tie_word_embeddings=True)
    assert qwen3["untie_embeddings_and_output_weights"] and not tied["untie_embeddings_and_output_weights"]
    assert "--disable-bias-linear" in architecture.argv(qwen3) and "--norm-epsilon" in architecture.argv(qwen3)


def test_both_spellings_of_rope_mean_the_same():
    old = derive("DeepseekV3ForCausalLM")
    rope = YARN | {"rope_type": "yarn", "rope_theta": 1e6}
    new = derive("DeepseekV3ForCausalLM", rope_scaling=None, rope_theta=None, rope_parameters=rope)
    assert (
        old == new and old["rope_type"] == "yarn" and old["rotary_scaling_factor"] == 40 and old["yarn_beta_fast"] == 32
    )


def test_llama3_scaling_and_what_megatron_cannot_do_of_it():
    scaling = dict(
        rope_type="llama3",
        factor=32.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    found = derive("LlamaForCausalLM", rope_scaling=scaling)
    assert found["use_rope_scaling"] is True and found["rope_scaling_factor"] == 32.0
    with pytest.raises(DataError, match="original_max_position_embeddings is 4096"):
        derive("LlamaForCausalLM", rope_scaling=scaling | {"original_max_position_embeddings": 4096})


def test_experts():
    found = derive("DeepseekV3ForCausalLM", n_group=4, topk_group=2, num_experts_per_tok=4)
    assert found["moe_layer_freq"] == "[0]*1+[1]*3" and found["moe_shared_expert_intermediate_size"] == 64
    assert found["moe_router_num_groups"] == 4 and found["moe_router_group_topk"] == 2
    assert found["moe_router_score_function"] == "sigmoid" and found["moe_router_enable_expert_bias"]
    assert "group_query_attention" not in found and found["multi_latent_attention"]
    assert "q_lora_rank" not in derive("DeepseekV3ForCausalLM", q_lora_rank=None)
    qwen = derive("Qwen3MoeForCausalLM")
    assert (
        "moe_layer_freq" not in qwen
        and qwen["moe_router_score_function"] == "softmax"
        and qwen["moe_router_pre_softmax"] is False
    )
    assert derive("Qwen3MoeForCausalLM", norm_topk_prob=False)["moe_router_pre_softmax"] is True
    assert derive("Qwen3MoeForCausalLM", decoder_sparse_step=2)["moe_layer_freq"] == "[0]*1+[1]*1+[0]*1+[1]*1"
    assert derive("Glm4MoeForCausalLM")["rotary_percent"] == 0.5


def test_layers_of_slimes_own():
    delta = derive("Qwen3_5ForCausalLM")
    assert delta["linear_attention_freq"] == "[1]*3+[0]*1" and delta["rotary_percent"] == 0.25
    assert delta["layernorm_zero_centered_gamma"] and delta["attention_output_gate"] and "num_experts" not in delta
    assert derive("Qwen3_5ForConditionalGeneration") == delta
    assert derive("Qwen3_5MoeForConditionalGeneration") == derive("Qwen3_5MoeForCausalLM")
    apart = {"text_config": {k: v for k, v in (BASE | GATED).items() if k != "intermediate_size"}}
    assert derive("Qwen3_5MoeForConditionalGeneration", **apart)["ffn_hidden_size"] == 32
    glm4 = derive("Glm4ForCausalLM")
    assert glm4["post_self_attn_layernorm"] and glm4["post_mlp_layernorm"] and glm4["rotary_interleaved"]
    assert glm4["rotary_percent"] == 0.5 and glm4["add_qkv_bias"]
    minimax = derive("MiniMaxM2ForCausalLM", rotary_dim=8)
    assert minimax["rotary_percent"] == 0.5 and minimax["qk_layernorm_over_heads"]
    assert minimax["moe_ffn_hidden_size"] == 128 and minimax["moe_router_enable_expert_bias"]


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("Qwen2ForCausalLM", dict(use_sliding_window=True, sliding_window=128, max_window_layers=2), "sliding window"),
        ("Qwen3ForCausalLM", dict(layer_types=["full_attention", "sliding_attention"]), "sliding window"),
        ("Qwen3ForCausalLM", dict(attention_bias=True), "attention_bias is True"),
        ("LlamaForCausalLM", dict(mlp_bias=True), "mlp_bias is True"),
        ("Qwen3ForCausalLM", dict(hidden_act="gelu"), "hidden_act is 'gelu'"),
        ("Qwen3ForCausalLM", dict(rope_scaling=YARN), "rope scaling 'yarn'"),
        ("LlamaForCausalLM", dict(rope_scaling=dict(type="dynamic", factor=2.0)), "rope scaling 'dynamic'"),
        ("DeepseekV3ForCausalLM", dict(rope_interleave=False), "rope_interleave is False"),
        ("DeepseekV3ForCausalLM", dict(norm_topk_prob=False), "norm_topk_prob is False"),
        ("DeepseekV3ForCausalLM", dict(n_group=4, topk_group=2, num_experts_per_tok=2), "2 experts from 2 groups"),
        ("DeepseekV3ForCausalLM", dict(kv_lora_rank=None), "has no kv_lora_rank"),
        ("MiniMaxM2ForCausalLM", dict(use_qk_norm=False), "use_qk_norm is False"),
        ("MiniMaxM2ForCausalLM", dict(attn_type_list=[1, 0, 1, 1]), "linear attention"),
        ("Qwen3NextForCausalLM", dict(mlp_only_layers=[1]), "mlp_only_layers is not empty"),
        ("Qwen3ForCausalLM", dict(quantization_config=dict(quant_method="gptq", bits=4)), "quantised by gptq"),
        ("DeepseekV3ForCausalLM", dict(quantization_config=dict(quant_method="compressed-tensors")), "quantised"),
    ],
)
def test_what_megatron_has_no_option_for_is_refused(name, fields, said):
    with pytest.raises(DataError, match=said):
        derive(name, **fields)


def test_a_sliding_window_that_no_layer_uses_is_none():
    derive("Qwen2ForCausalLM", use_sliding_window=False, sliding_window=128)
    derive("Qwen2ForCausalLM", use_sliding_window=True, sliding_window=128, max_window_layers=4)
    derive("Qwen3ForCausalLM", layer_types=["full_attention"] * 4)


def test_options_given_besides_may_not_make_another_model():
    derived = derive("DeepseekV3ForCausalLM")
    for words in (
        "--moe-layer-freq [0,1,1,1]",
        "--moe-aux-loss-coeff 0.001",
        "--seq-length 4096",
        "--moe-router-topk 2",
    ):
        given = {dest: value for (_, dest), value in from_argv(words.split(), "convert")[0].items()}
        architecture.check_given(derived, given, "DIR")
    for words in ("--moe-layer-freq [1,1,1,1]", "--norm-epsilon 1e-6", "--num-layers 5", "--moe-router-topk 3"):
        given = {dest: value for (_, dest), value in from_argv(words.split(), "convert")[0].items()}
        with pytest.raises(UsageError, match=words.split()[0]):
            architecture.check_given(derived, given, "DIR")


def test_deepseeks_own_quantisation_is_read():
    quantised = dict(quant_method="fp8", fmt="e4m3", weight_block_size=[128, 128], activation_scheme="dynamic")
    assert derive("DeepseekV3ForCausalLM", quantization_config=quantised) == derive("DeepseekV3ForCausalLM")


def test_an_unknown_architecture_is_none():
    assert architecture.megatron_args({"architectures": ["FooForCausalLM"]}) is None
