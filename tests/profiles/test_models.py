"""The shipped model profiles say what is derived from their models' configs, and add up to the published parameter counts."""

import importlib.util
import pathlib

import pytest

from slime_cli.options import catalogue, profiles
from slime_cli.options.resolve import resolve
from slime_cli.weights import architecture

path = pathlib.Path(__file__).parents[2] / "ci" / "model_profiles.py"
spec = importlib.util.spec_from_file_location("model_profiles", path)
table = importlib.util.module_from_spec(spec)
spec.loader.exec_module(table)


def args(name: str) -> dict:
    return architecture.megatron_args(table.MODELS[name][1])


def test_the_files_are_those_that_the_script_writes():
    found = {file.stem: file.read_text() for file in (profiles.FOLDER / "models").glob("*.yaml")}
    assert found == {name: table.text(name) for name in table.MODELS}, "run ci/model_profiles.py"


@pytest.mark.parametrize("name", table.MODELS)
def test_a_profile_is_read_as_what_is_derived(name):
    defaults = {dest: options[0].default for dest, options in catalogue.load("megatron").by_dest.items()}
    read = {dest: value for (section, dest), value in profiles.load(name).layer.items() if section == "megatron"}
    assert defaults | read == defaults | args(name)


@pytest.mark.parametrize("name", table.MODELS)
def test_a_profile_agrees_with_its_checkpoint(name):
    architecture.check_given(args(name), resolve([], [name]).megatron, "the checkpoint")


def parameters(a: dict) -> int:
    """Without layers that predict further tokens."""
    h, heads = a["hidden_size"], a["num_attention_heads"]
    every = [int("num_experts" in a)] * a["num_layers"]
    sparse = architecture.expand(a["moe_layer_freq"]) if "moe_layer_freq" in a else every
    if a.get("multi_latent_attention"):
        rope, q, kv = a["qk_pos_emb_head_dim"], a.get("q_lora_rank"), a["kv_lora_rank"]
        queries = heads * (a["qk_head_dim"] + rope)
        attention = h * queries if q is None else h * q + q + q * queries
        attention += h * (kv + rope) + kv + kv * heads * (a["qk_head_dim"] + a["v_head_dim"]) + heads * a["v_head_dim"] * h
    else:
        d, groups = a["kv_channels"], a["num_query_groups"]
        qkv = (heads + 2 * groups) * d
        attention = h * qkv + heads * d * h + qkv * bool(a.get("add_qkv_bias")) + 2 * d * bool(a.get("qk_layernorm"))
    dense = 3 * h * a["ffn_hidden_size"]
    experts = a.get("num_experts", 0)
    moe = 3 * h * (experts * a.get("moe_ffn_hidden_size", 0) + a.get("moe_shared_expert_intermediate_size", 0))
    moe += experts * (h + bool(a.get("moe_router_enable_expert_bias")))
    layers = sum(attention + 2 * h + (moe if is_moe else dense) for is_moe in sparse)
    return layers + a["vocab_size"] * h * (2 if a["untie_embeddings_and_output_weights"] else 1) + h


PUBLISHED = {
    "qwen2.5-0.5b": 494_032_768, "qwen2.5-1.5b": 1_543_714_304, "qwen2.5-3b": 3_085_938_688, "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352, "qwen3-0.6b": 596_049_920, "qwen3-1.7b": 1_720_574_976, "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360, "qwen3-14b": 14_768_307_200, "qwen3-32b": 32_762_123_264, "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560, "llama3.1-8b": 8_030_261_248, "llama3.2-3b": 3_212_749_824,
    "deepseek-v3": 671_026_419_200,
}  # fmt: skip
"""As their safetensors count them."""
ROUNDED = {
    "glm4.5-106b-a12b": 106e9, "glm4.5-355b-a32b": 353e9, "glm4.7-30b-a3b": 30e9, "kimi-k2": 1.03e12, "kimi-k2-thinking": 1.03e12,
    "moonlight": 16e9,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_as_many_as_published(name):
    assert parameters(args(name)) == PUBLISHED[name]


@pytest.mark.parametrize("name", ROUNDED)
def test_parameters_are_about_as_many_as_published(name):
    assert parameters(args(name)) == pytest.approx(ROUNDED[name], rel=0.02)
