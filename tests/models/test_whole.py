"""Weights and tokenizer of HF folders: forms that are whole, and what is never called so."""

import json
import pathlib
import re

import pytest

from slime_cli.errors import DataError
from slime_cli.models import architecture, headers, tensors, whole
from tests import checkpoints
from tests.checkpoints import SHARDS

NAME = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def model(tmp_path) -> pathlib.Path:
    return checkpoints.write(tmp_path / "model")


def configure(folder: pathlib.Path, **fields) -> dict:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps(config))
    return config


def in_one_file(folder: pathlib.Path, shapes: dict, dtypes: dict | None = None) -> None:
    for name in (*SHARDS, checkpoints.INDEX):
        (folder / name).unlink(missing_ok=True)
    checkpoints.write_shard(folder / "model.safetensors", shapes, dtypes)


def required(folder: pathlib.Path) -> dict:
    return tensors.required(json.loads((folder / "config.json").read_text()))


def test_whole_in_several_files_or_in_one(model):
    found = whole.check_weights(model)
    assert found.status == "ok" and found.detail.endswith("all 25 tensors of Qwen3ForCausalLM")
    in_one_file(model, required(model))
    (model / "consolidated.safetensors").write_text("not looked at: the same weights once more")
    assert whole.check_weights(model).status == "ok"


def test_a_tied_output_layer_may_be_there_or_not(model):
    configure(model, tie_word_embeddings=True)
    assert whole.check_weights(model).status == "ok"
    in_one_file(model, required(model))
    assert whole.check_weights(model).status == "ok"
    configure(model, tie_word_embeddings=False)
    assert whole.check_weights(model).detail == "lm_head.weight is missing"


def test_a_tied_output_layer_of_other_values_is_said_to_go_unused(model):
    """Whoever saved it meant it: with the embedding in its place, this is another model."""
    configure(model, tie_word_embeddings=True)
    held = headers.read(model).tensors["lm_head.weight"]
    path = model / held.file
    content = bytearray(path.read_bytes())
    content[held.place[1] - 1] ^= 1
    path.write_bytes(content)
    found = whole.check_weights(model)
    assert found.status == "warn" and "lm_head.weight that is there is another one" in found.detail


def test_rotary_frequencies_and_layers_that_predict_further_tokens_may_be_there(model):
    config = configure(model, architectures=["MiMoForCausalLM"], num_nextn_predict_layers=1)
    more = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": (4,),
        "model.mtp_layers.0.norm.weight": (16,),
        "model.layers.2.enorm.weight": (16,),
    }
    in_one_file(model, tensors.required(config) | more)
    assert whole.check_weights(model).status == "ok"
    configure(model, num_nextn_predict_layers=0)
    found = whole.check_weights(model)
    assert found.status == "warn" and "no place for model.layers.2.enorm.weight" in found.detail


def test_another_shape_is_named_with_both(model):
    configure(model, intermediate_size=48)
    found = whole.check_weights(model)
    assert (
        found.status == "fail"
        and "config.json makes it [48, 16]" in found.detail
        and "(and 5 more tensors)" in found.detail
    )
    configure(model, intermediate_size=32, num_hidden_layers=3)
    assert "model.layers.2.input_layernorm.weight is missing (and 10 more tensors)" in whole.check_weights(model).detail


def test_a_quantised_weight_needs_its_scale(model):
    shapes = required(model)
    in_one_file(model, shapes, {NAME: "F8_E4M3"})
    assert whole.check_weights(model).detail == f"{NAME}_scale is missing"
    for suffix in ("_scale", "_scale_inv"):
        in_one_file(model, shapes | {f"{NAME}{suffix}": (1, 1)}, {NAME: "F8_E4M3"})
        assert whole.check_weights(model).status == "ok"


def test_a_packed_weight_needs_scale_and_shape(model):
    shapes = {name: shape for name, shape in required(model).items() if name != NAME} | {
        f"{NAME}_packed": (16, 2),
        f"{NAME}_scale": (16, 1),
    }
    in_one_file(model, shapes)
    assert whole.check_weights(model).detail == f"{NAME}_shape is missing"
    in_one_file(model, shapes | {f"{NAME}_shape": (2,)})
    assert whole.check_weights(model).status == "ok"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"architectures": ["FooForCausalLM"]}, "the tensors of FooForCausalLM are not known here"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised by gptq"),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}},
            "nvfp4-pack-quantized",
        ),
    ],
)
def test_what_is_not_known_is_never_called_whole(model, fields, words):
    configure(model, **fields)
    found = whole.check_weights(model)
    assert found.status == "warn" and words in found.detail and "a missing tensor is not noticed" in found.detail
    (model / SHARDS[0]).write_bytes((model / SHARDS[0]).read_bytes()[:-1])
    assert whole.check_weights(model).status == "fail"


def test_a_tensor_in_two_files_and_an_index_out_of_its_folder(model):
    checkpoints.write_shard(
        model / SHARDS[1],
        {name: shape for name, shape in required(model).items() if "layers.1." in name or "lm_head" in name},
    )
    assert whole.check_weights(model).detail == f"lm_head.weight is in {SHARDS[0]} and in {SHARDS[1]}"
    (model / checkpoints.INDEX).write_text(json.dumps({"weight_map": {NAME: "../other.safetensors"}}))
    assert "not a file beside it" in whole.check_weights(model).detail


@pytest.mark.parametrize("header", [b'{"a": 1}', b"[]", b'{"a": {"dtype": "F32", "shape": [1]}}', b"\xff\xfe"])
def test_a_header_of_another_form_is_damage(tmp_path, header):
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match="x.safetensors"):
        headers.header(path)


def test_check_raises_what_is_wrong_and_says_what_may_be(model):
    said = []
    whole.check(model, said.append)
    assert not said
    configure(model, architectures=["FooForCausalLM"])
    whole.check(model, said.append)
    assert len(said) == 1 and "FooForCausalLM" in said[0]
    with pytest.raises(DataError, match="config.json is missing"):
        whole.check(model.parent, said.append)


# -- tokenizer ---------------------------------------------------------------------------------------------------------


def tokenizer(folder: pathlib.Path, **fields) -> whole.Finding:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return whole.check_tokenizer(folder)


def test_ids_up_to_the_last_row_are_fine(model):
    assert tokenizer(model, added_tokens=[{"id": 31, "content": "<x>"}]).status == "ok"
    found = tokenizer(model, added_tokens=[{"id": 32, "content": "<x>"}])
    assert found.status == "fail" and found.detail == "'<x>' has id 32, and the embedding has 32 rows (0 to 31)"


def test_ids_of_unigrams_are_their_places(model):
    pieces = [[f"p{i}", 0.0] for i in range(33)]
    assert tokenizer(model, model={"type": "Unigram", "vocab": pieces[:32]}).status == "ok"
    assert "'p32' has id 32" in tokenizer(model, model={"type": "Unigram", "vocab": pieces}).detail


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("added_tokens.json", {"<late>": 40}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"40": {"content": "<late>"}}}),
    ],
)
def test_ids_of_tokens_added_later(model, file, content):
    (model / file).write_text(json.dumps(content))
    assert "'<late>' has id 40" in whole.check_tokenizer(model).detail


def test_without_a_fast_tokenizer_nothing_is_compared_and_that_is_said(model):
    (model / "tokenizer.json").unlink()
    assert whole.check_tokenizer(model).status == "fail"
    (model / "tokenizer.model").write_text("")
    found = whole.check_tokenizer(model)
    assert found.status == "warn" and "not compared" in found.detail


@pytest.mark.parametrize("fields", [{"model": {}}, {"model": None}, {"added_tokens": [{}]}])
def test_a_tokenizer_of_another_form_is_damage(model, fields):
    assert tokenizer(model, **fields).status == "fail"


def test_rows_of_a_text_model_within_another(model):
    configure(model, vocab_size=None, text_config={"vocab_size": 20})
    assert "'z' has id 25, and the embedding has 20 rows" in whole.check_tokenizer(model).detail


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "is not a JSON object"),
        ("", "is empty"),
        (
            json.dumps(checkpoints.CONFIG | {"num_hidden_layers": "2"}),
            'num_hidden_layers takes a number, got "2" in quotes',
        ),
        (json.dumps(checkpoints.CONFIG | {"torch_dtype": "torch.fp32"}), "the dtype 'torch.fp32' is none of float32"),
    ],
)
def test_a_config_of_another_form_is_named_by_every_reader(text, said, model):
    (model / "config.json").write_text(text)
    assert said in whole.check_config(model).detail
    whole.check_weights(model)
    with pytest.raises(DataError, match=said):
        architecture.read_config(str(model))


def test_a_pointer_in_the_place_of_a_file_is_named(model):
    (model / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 7\n")
    assert "Git LFS pointer" in whole.check_tokenizer(model).detail


def test_an_empty_file_of_weights_is_named(model):
    (model / SHARDS[1]).write_bytes(b"")
    assert whole.check_weights(model).detail == f"{SHARDS[1]} is empty"


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        ("~/model", r"\$HOME"),
        ("tiny:qwen3", "--run-dir"),
        ("org/name", "hf download org/name"),
        ("model/config.json", "give its folder, model$"),
        ("nowhere", "give the folder of an HF checkpoint"),
    ],
)
def test_what_is_no_folder_is_answered_with_what_was_meant(given, fix, model, monkeypatch):
    monkeypatch.chdir(model.parent)
    with pytest.raises(DataError) as found:
        architecture.read_config(given)
    assert re.search(fix, found.value.fix)


def test_a_megatron_checkpoint_is_named_where_an_hf_one_belongs(tmp_path):
    (tmp_path / "iter_0000000").mkdir()
    assert "that is a Megatron checkpoint" in whole.check_config(tmp_path).fix


@pytest.mark.parametrize(
    ("settings", "status", "said"),
    [
        (dict(quant_method="fp8", weight_block_size=[128, 128]), "ok", "FP8, a scale a block of 128 x 128"),
        (dict(quant_method="gptq", bits=4), "warn", "quantised by gptq, and new weights cannot be made so here"),
    ],
)
def test_how_a_model_is_quantised_is_said(model, settings, status, said):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    found = whole.check_config(model)
    assert found.status == status and said in found.detail
