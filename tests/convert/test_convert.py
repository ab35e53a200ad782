"""`slime convert` as a user runs it: HF -> torch_dist -> HF gives every byte back, and what goes wrong is said."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from slime_cli import manifests

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
TOKENIZER_FILES = {
    "tokenizer.json": '{"model": {"type": "WordLevel", "vocab": {}}}',
    "chat_template.jinja": "{{ messages }}",
}
ON_CPU = dict(os.environ, CUDA_VISIBLE_DEVICES="")


def slime(*words: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "slime_cli", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, env=ON_CPU, stdin=subprocess.DEVNULL)


def make(folder: pathlib.Path, tied: bool, dtype: str) -> pathlib.Path:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        dtype=dtype,
        bos_token_id=None,
        eos_token_id=1,
    )
    torch.manual_seed(5)
    model = Qwen3ForCausalLM(config).to(getattr(torch, dtype))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)  # norms too: all ones would hide a mix-up
    model.save_pretrained(folder)
    for name, text in TOKENIZER_FILES.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def tied(tmp_path_factory) -> pathlib.Path:
    return make(tmp_path_factory.mktemp("hf") / "tied", True, "float32")


def tensors(folder: pathlib.Path) -> dict:
    from safetensors.torch import load_file

    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def there_and_back(source: pathlib.Path, folder: pathlib.Path, *layout: str) -> pathlib.Path:
    import torch

    there = slime("convert", "hf-to-dist", "--hf-checkpoint", source, "--save", folder / "dist", *layout)
    assert there.returncode == 0, there.stderr
    back = slime("convert", "dist-to-hf", "--load", folder / "dist", "--save", folder / "hf")
    assert back.returncode == 0, back.stderr
    before = tensors(source)
    after = tensors(folder / "hf")
    assert before.keys() == after.keys()
    for name in before:
        assert before[name].dtype == after[name].dtype and torch.equal(before[name], after[name]), name
    for name in ("config.json", *TOKENIZER_FILES):
        assert (folder / "hf" / name).read_bytes() == (source / name).read_bytes()
    return folder


def test_tied_float32_written_by_two_tensor_parallel_ranks(tied, tmp_path):
    there_and_back(tied, tmp_path, "--tensor-model-parallel-size", "2")
    found = manifests.read(tmp_path / "dist" / "iter_0000000" / "checkpoint.json", manifests.Checkpoint)
    assert found.format == "torch_dist" and found.iteration == 0 and found.dtype == "float32"
    assert found.layout == {"tensor": 2, "pipeline": 1, "data": 1, "context": 1, "expert": 1}
    assert found.source == str(tied) and set(found.source_hashes) == {"config.json", "model.safetensors"}
    assert found.architecture == "Qwen3ForCausalLM" and found.megatron_args["num_layers"] == 2
    assert found.tokenizer_hash and found.chat_template_hash
    assert (tmp_path / "dist" / "latest_checkpointed_iteration.txt").read_text().strip() == "0"
    hf = manifests.read(tmp_path / "hf" / "checkpoint.json", manifests.Checkpoint)
    assert hf.format == "hf" and hf.source == str(tmp_path / "dist" / "iter_0000000")
    assert {p.name for p in tmp_path.iterdir()} == {"dist", "hf"}  # nothing half-made is left

    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hf").config.tie_word_embeddings


def test_untied_bfloat16_by_one_rank(tmp_path):
    there_and_back(make(tmp_path / "source", False, "bfloat16"), tmp_path)


def test_a_rank_that_dies_shows_its_last_lines_and_leaves_nothing(tied, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(tied, source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"model_type": "of_another_transformers"}))
    done = slime("convert", "hf-to-dist", "--hf-checkpoint", source, "--save", tmp_path / "dist")
    assert done.returncode == 4, done.stderr
    assert (
        "its last lines" in done.stderr
        and "Error" in done.stderr
        and 'Traceback (most recent call last):\n  File "<frozen' not in done.stderr
    )
    assert {p.name for p in tmp_path.iterdir()} == {"source"}


def refused(code: int, *words: object) -> str:
    done = slime("convert", *words)
    assert done.returncode == code and "Traceback" not in done.stderr, done.stderr
    return done.stderr


def test_what_can_be_seen_from_files_is_refused_before_anything_starts(tied, tmp_path):
    words = ("hf-to-dist", "--save", tmp_path / "out", "--hf-checkpoint")
    assert "no such folder" in refused(3, *words, tmp_path / "nowhere")

    other = tmp_path / "other"
    shutil.copytree(tied, other)
    (other / "config.json").write_text(json.dumps({"architectures": ["FooForCausalLM"]}))
    said = refused(3, *words, other)
    assert "FooForCausalLM is not supported" in said and "Qwen3ForCausalLM" in said and "LlamaForCausalLM" in said

    shutil.copy(tied / "config.json", other)
    with open(other / "model.safetensors", "r+b") as file:
        file.truncate(1000)
    assert f"{other}: weights: model.safetensors is cut off" in refused(3, *words, other)

    assert "does not divide" in refused(2, *words, tied, "--tensor-model-parallel-size", 3)
    assert "no experts" in refused(2, *words, tied, "--expert-model-parallel-size", 2)
    assert "belong to different models" in refused(3, *words, tied, "--num-layers", 5)
    assert "--num-layers" in refused(2, *words, tied, "--num-layer", 5)
    assert "does not read" in refused(2, *words, tied, "--rollout-batch-size", 5)

    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("kept")
    assert "--force" in refused(2, *words, tied)
    assert "no complete checkpoint" in refused(3, "dist-to-hf", "--load", tmp_path / "out", "--save", tmp_path / "hf")
    assert (tmp_path / "out" / "mine.txt").read_text() == "kept" and not (tmp_path / "hf").exists()


def test_options_that_follow_from_a_config_are_printed_as_a_profile_and_as_flags(tied, tmp_path):
    from slime_cli.options import profiles
    from slime_cli.options.layers import from_argv

    as_profile = slime("convert", "derive", "--hf-checkpoint", tied)
    as_flags = slime("convert", "derive", "--hf-checkpoint", tied / "config.json", "--format", "flags")
    assert as_profile.returncode == as_flags.returncode == 0, as_profile.stderr + as_flags.stderr
    (tmp_path / "model.yaml").write_text(as_profile.stdout)
    layer = profiles.load(str(tmp_path / "model.yaml")).layer
    assert (layer, []) == from_argv(as_flags.stdout.split(), "convert")
    assert layer["megatron", "num_layers"] == 2 and layer["megatron", "add_bias_linear"] is False
    assert "config.json is missing" in refused(3, "derive", "--hf-checkpoint", tmp_path)


def test_multi_token_prediction_layers_are_kept_and_other_strangers_refused(tmp_path):
    import torch
    from safetensors.torch import load_file, save_file

    from slime_cli.convert.origin import kept
    from slime_cli.errors import DataError

    source = make(tmp_path / "source", False, "float32")
    path = source / "model.safetensors"
    further = "model.layers.2.enorm.weight"
    save_file(load_file(path) | {further: torch.ones(3)}, path)
    said: list[str] = []
    ((name, tensor),) = kept(source, {further, "model.layers.0.self_attn.rotary_emb.inv_freq"}, 2, said.append)
    assert (
        name == further
        and tensor.tolist() == [1, 1, 1]
        and "1 tensors of multi-token-prediction (MTP) layers" in said[0]
    )
    assert list(kept(source, {further, f"{further}_scale_inv"}, 2, said.append)) == [] and "left out" in said[1]
    with pytest.raises(DataError, match="no place for 1 tensors, the first: model.layers.1.stranger"):
        list(kept(source, {"model.layers.1.stranger"}, 2, said.append))


def test_a_config_does_not_go_on_to_say_that_weights_are_quantised(tied, tmp_path):
    import torch

    from slime_cli.convert import convert
    from slime_cli.weights import publish

    publish.write(
        [("w", torch.ones(2))], tmp_path / "hf", hf_checkpoint=str(tied), version="v000000", step=0, run="test"
    )
    config = json.loads((tied / "config.json").read_text())
    convert._finish_hf(tmp_path / "hf", config | {"quantization_config": {"quant_method": "fp8"}})
    assert json.loads((tmp_path / "hf" / "config.json").read_text()) == config
    assert {p.name for p in (tmp_path / "hf").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        *TOKENIZER_FILES,
    }
