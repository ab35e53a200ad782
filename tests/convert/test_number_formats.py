"""Quantised checkpoints as other code reads them: transformers, and the settings readers of SGLang."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch

from slime_cli.hardware import device as hardware
from test_requantise import convert, read, source  # noqa: F401  (source is a fixture)


def make_model(folder: pathlib.Path) -> pathlib.Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=96,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=128,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        dtype="bfloat16",
        bos_token_id=None,
        eos_token_id=1,
    )
    torch.manual_seed(5)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="400KB")
    return folder


@pytest.mark.timeout(300)
def test_transformers_reads_the_same_weights(tmp_path):
    """Its own FP8 and compressed-tensors readers, which fill in what they do not find with a mere warning."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config

    made = make_model(tmp_path / "made")
    readers = {
        "hf-to-fp8": FineGrainedFP8Config(dequantize=True),
        "hf-to-int4": CompressedTensorsConfig(run_compressed=False),
    }
    for (there, how), back in zip(readers.items(), ("fp8-to-bf16", "int4-to-bf16"), strict=True):
        convert(there, made, tmp_path / there)
        convert(back, tmp_path / there, tmp_path / back)
        ours = read(tmp_path / back)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / there, dtype=torch.bfloat16, quantization_config=how)
        theirs = dict(model.named_parameters())
        assert ours.keys() <= theirs.keys() and all(torch.equal(ours[name], theirs[name].cpu()) for name in ours), there


SGLANG = """
import json, sys
from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from sglang.srt.layers.quantization.compressed_tensors.utils import should_ignore_layer
from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.layers.quantization.utils import is_layer_skipped

fused = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
layers = ["0.self_attn.qkv_proj", "0.mlp.gate_up_proj", "0.mlp.down_proj", "1.mlp.gate", "1.mlp.experts"]
layers += ["2.mlp.gate", "2.mlp.experts"]
out = {}
for folder in sys.argv[1:]:
    found = json.load(open(folder + "/config.json"))["quantization_config"]
    if found["quant_method"] == "fp8":
        config = Fp8Config.from_config(found)
        scheme = [config.weight_block_size, config.is_checkpoint_fp8_serialized]
        kept = [n for n in layers if is_layer_skipped("model.layers." + n, config.ignored_layers, fused)]
    else:
        config = CompressedTensorsConfig.from_config(found)
        weights, inputs = (config.target_scheme_map["Linear"][key] for key in ("weights", "input_activations"))
        grouped = inputs is None and config._is_wNa16_group_channel(weights, inputs)
        scheme = [config._is_fp8_w8a8(weights, inputs), grouped]
        experts = ".0.gate_proj"  # the name that it asks of a layer of experts
        asked = {n: "model.layers." + n + (experts if "experts" in n else "") for n in layers}
        kept = [n for n in layers if should_ignore_layer(asked[n], config.ignore, fused)]
    out[folder.rpartition("/")[2]] = [scheme, kept]
print("FOUND" + json.dumps(out))
"""


@pytest.mark.timeout(300)
@pytest.mark.engine
def test_sglang_takes_the_settings_and_keeps_the_routers(source, tmp_path):  # noqa: F811
    made = {
        "block": ("hf-to-fp8",),
        "channel": ("hf-to-fp8", "--strategy", "channel"),
        "tensor": ("hf-to-fp8", "--strategy", "tensor"),
    }
    made |= {"int4": ("hf-to-int4",), "zero": ("hf-to-int4", "--asymmetric")}
    for name, (command, *words) in made.items():
        convert(command, source, tmp_path / name, *words)
    environment = hardware.engine_environment(dict(os.environ, CUDA_VISIBLE_DEVICES=""))
    command = [sys.executable, "-c", SGLANG, *(str(tmp_path / name) for name in made)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.rpartition("FOUND")[2])
    schemes = {
        "block": [[128, 128], True],
        "channel": [True, False],
        "tensor": [True, False],
        "int4": [False, True],
        "zero": [False, True],
    }
    assert found == {name: [scheme, ["1.mlp.gate", "2.mlp.gate"]] for name, scheme in schemes.items()}
