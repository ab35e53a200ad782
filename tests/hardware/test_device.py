"""What follows from the device: the type that the trainer and its engines compute in."""

import types

import pytest

from slime_cli.hardware import device
from slime_cli.serving import engine


@pytest.mark.parametrize(
    ("kind", "megatron", "dtype"),
    [
        ("cuda", {}, "bfloat16"), ("cuda", {"bf16": True}, "bfloat16"), ("cuda", {"fp16": True}, "float16"),
        ("cpu", {}, "float32"), ("cpu", {"bf16": True}, "bfloat16"), ("cpu", {"bf16": False}, "float32"),
    ],
)  # fmt: skip
def test_what_the_trainer_computes_in(kind, megatron, dtype):
    assert device.trainer_dtype(kind, megatron) == dtype


@pytest.mark.parametrize(("kind", "given", "dtype"), [("cuda", {}, "bfloat16"), ("cpu", {}, "float32"), ("cuda", {"dtype": "half"}, "half")])
def test_engines_are_told_to_compute_in_the_same_unless_the_user_says_otherwise(monkeypatch, kind, given, dtype):
    monkeypatch.setattr(device, "find", lambda: device.Device(kind, 1, kind))
    seen = []
    monkeypatch.setattr(engine.dataclasses, "replace", lambda resolved, sglang: seen.append(sglang) or types.SimpleNamespace(sglang_argv=list))
    engine.engine_argv(types.SimpleNamespace(sglang=given, megatron={}))
    assert seen[0]["dtype"] == dtype
