"""Tiny models: what is refused, torch-free."""

import json

import pytest

from slime_cli.errors import UsageError
from slime_cli.models import tiny


@pytest.mark.parametrize("query", ["hidden_size=0", "num_hidden_layers=-1", "num_key_value_heads=3", "vocab_size=319"])
def test_a_shape_that_no_model_has_is_refused(query):
    with pytest.raises(UsageError, match=query.partition("=")[0]):
        tiny.config(f"tiny:qwen3?{query}")


def test_a_folder_with_another_tiny_model_is_not_taken_for_this_one(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny.config("tiny:qwen3")))
    assert tiny.make("tiny:qwen3", tmp_path) == tmp_path
    for uri in ("tiny:qwen3?hidden_size=64", "tiny:qwen3_moe"):
        with pytest.raises(UsageError, match="holds a model with"):
            tiny.make(uri, tmp_path)


def test_a_wider_vocabulary_has_a_token_for_every_row(tmp_path):
    from transformers import AutoTokenizer

    folder = tiny.make("tiny:qwen3?vocab_size=400&hidden_size=32&num_hidden_layers=1", tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == json.loads((folder / "config.json").read_text())["vocab_size"] == 400
    assert tokenizer.decode([399]) == "word399"
    text = "Calculate 12 + 34."
    assert max(tokenizer(text).input_ids) < tiny.VOCABULARY and tokenizer.decode(tokenizer(text).input_ids) == text


def test_a_mimo_has_layers_that_draft(tmp_path):
    from safetensors import safe_open

    folder = tiny.make("tiny:mimo?hidden_size=32&num_hidden_layers=1&num_nextn_predict_layers=2", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    assert (config["architectures"], config["num_nextn_predict_layers"]) == (["MiMoForCausalLM"], 2)
    with safe_open(folder / "model.safetensors", "pt") as held:
        shapes = {name: tuple(held.get_tensor(name).shape) for name in held.keys() if ".mtp_layers.1." in name}
    assert len(shapes) == 16 and shapes["model.mtp_layers.1.input_proj.weight"] == (32, 64)
