"""The list of tensors that an architecture must hold is what transformers saves of it, by name and shape."""

import json

import pytest

from slime_cli.errors import DataError
from slime_cli.models import headers, tensors
from slime_cli.models.families import FAMILIES
from tests.models.test_architecture import BASE, MORE

FIELDS = {key: value for key, value in BASE.items() if key != "rope_theta"}
VARIANTS = {
    "Qwen2": [{}, dict(tie_word_embeddings=True)],
    "Qwen3": [dict(head_dim=16), dict(head_dim=16, attention_bias=True)],
    "Llama": [{}, dict(attention_bias=True, mlp_bias=True), dict(head_dim=32)],
    "Qwen3Moe": [dict(head_dim=16), dict(head_dim=16, decoder_sparse_step=2), dict(head_dim=16, mlp_only_layers=[1])],
    "Qwen3Next": [dict(head_dim=16)],
    "Qwen3_5": [dict(head_dim=16), dict(head_dim=16, tie_word_embeddings=True)],
    "Qwen3_5Moe": [dict(head_dim=16)],
    "Glm4": [dict(head_dim=16, pad_token_id=None), dict(head_dim=32, attention_bias=False, pad_token_id=None)],
    "Glm4Moe": [dict(head_dim=16), dict(head_dim=16, attention_bias=False, use_qk_norm=False)],
    "Glm4MoeLite": [{}],
    "GlmMoeDsa": [{}],
    "DeepseekV3": [{}, dict(q_lora_rank=None, n_shared_experts=1), dict(attention_bias=True)],
    "MiniMaxM2": [dict(num_local_experts=4, num_experts_per_tok=2, head_dim=16)],
}
TEXT = ("Qwen3_5", "Qwen3_5Moe")
"""What is published of them takes images too."""
ALIASES = {"MiMoForCausalLM": "Qwen2ForCausalLM", "KimiK2ForCausalLM": "DeepseekV3ForCausalLM"}
"""Not in transformers; the models are those of another architecture."""
CASES = [(prefix, more) for prefix, variants in VARIANTS.items() for more in variants]


@pytest.mark.parametrize(("prefix", "more"), CASES)
def test_the_list_is_what_transformers_saves(prefix, more, tmp_path):
    import transformers

    given = {key: value for key, value in MORE.get(f"{prefix}ForCausalLM", {}).items() if key != "rope_scaling"}
    kind = f"{prefix}{'Text' if prefix in TEXT else ''}Config"
    config = getattr(transformers, kind)(**(FIELDS | given | more))
    getattr(transformers, f"{prefix}ForCausalLM")(config).save_pretrained(tmp_path)
    saved = {name: held.shape for name, held in headers.read(tmp_path).tensors.items()}
    assert tensors.required(json.loads((tmp_path / "config.json").read_text())) == saved


@pytest.mark.parametrize("prefix", TEXT)
def test_the_list_is_what_transformers_saves_of_the_language_model_of_one_with_vision(prefix, tmp_path):
    import transformers

    inner = FIELDS | MORE[f"{prefix}ForCausalLM"] | dict(head_dim=16)
    eyes = dict(depth=1, hidden_size=8, intermediate_size=8, num_heads=1, out_hidden_size=64, num_position_embeddings=4)
    config = getattr(transformers, f"{prefix}Config")(text_config=inner, vision_config=eyes)
    getattr(transformers, f"{prefix}ForConditionalGeneration")(config).save_pretrained(tmp_path)
    saved = {name: held.shape for name, held in headers.read(tmp_path).tensors.items() if not tensors.vision(name)}
    told = json.loads((tmp_path / "config.json").read_text())
    assert tensors.required(told, saved) == saved
    apart = [*tensors.required(told), "mtp.layers.0.mlp.experts.0.gate_proj.weight"]
    assert tensors.required(told, apart) == tensors.required(told)
    packed = [name for name in tensors.required(told) if name.endswith("experts.gate_up_proj")]
    assert len(packed) == (4 if prefix == "Qwen3_5Moe" else 0)


def test_every_architecture_that_megatron_takes_has_a_list():
    assert tensors.LAYERS.keys() == FAMILIES.keys()
    with_vision = {f"{prefix}ForConditionalGeneration" for prefix in TEXT}
    assert {f"{prefix}ForCausalLM" for prefix in VARIANTS} | ALIASES.keys() | with_vision == FAMILIES.keys()
    assert all(tensors.LAYERS[one] is tensors.LAYERS[other] for one, other in ALIASES.items())


def test_an_unknown_architecture_has_none_and_a_config_that_says_too_little_is_refused():
    assert tensors.required({"architectures": ["FooForCausalLM"]}) is None
    with pytest.raises(DataError, match="has no hidden_size"):
        tensors.required({"architectures": ["Qwen3ForCausalLM"], "vocab_size": 3})
    short = (
        BASE | MORE["DeepseekV3ForCausalLM"] | dict(architectures=["DeepseekV3ForCausalLM"], mlp_layer_types=["dense"])
    )
    with pytest.raises(DataError, match="fewer than 2 layers"):
        tensors.required(short)


def test_layers_that_predict_further_tokens():
    names = (
        "mtp.fc.weight",
        "model.mtp_layers.0.norm.weight",
        "model.layers.4.enorm.weight",
        "model.layers.3.mlp.gate.weight",
    )
    assert [tensors.further(name, 4) for name in names] == [True, True, True, False]
