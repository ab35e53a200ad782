"""What follows from the device: the type that the trainer and its engines compute in."""

import json

import pytest

from slime_cli.hardware import device
from slime_cli.options.resolve import resolve
from slime_cli.serving import engine


@pytest.mark.parametrize(
    ("kind", "megatron", "dtype"),
    [
        ("cuda", {}, "bfloat16"),
        ("cuda", {"bf16": True}, "bfloat16"),
        ("cuda", {"fp16": True}, "float16"),
        ("cpu", {}, "float32"),
        ("cpu", {"bf16": True}, "bfloat16"),
        ("cpu", {"bf16": False}, "float32"),
    ],
)
def test_what_the_trainer_computes_in(kind, megatron, dtype):
    assert device.trainer_dtype(kind, megatron) == dtype


@pytest.mark.parametrize(
    ("kind", "given", "config", "dtype"),
    [
        ("cuda", {}, {"torch_dtype": "float32"}, "bfloat16"),
        ("cpu", {}, {"torch_dtype": "bfloat16"}, "float32"),
        ("cuda", {"dtype": "half"}, {}, "half"),
        ("cuda", {}, {"quantization_config": {"quant_method": "awq"}}, "auto"),
        ("cpu", {}, {"quantization_config": {"quant_method": "fp8"}}, "float32"),
    ],
)
def test_engines_are_told_to_compute_in_the_trainer_s_type_unless_the_user_or_the_weights_say_otherwise(
    monkeypatch, tmp_path, kind, given, config, dtype
):
    monkeypatch.setattr(device, "find", lambda: device.Device(kind, 1, kind))
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = [word for dest, value in given.items() for word in (f"--sglang-{dest}", value)]
    argv = engine.engine_argv(resolve(words, [], "serve-rollout"), str(tmp_path))
    assert argv[argv.index("--dtype") + 1] == dtype
