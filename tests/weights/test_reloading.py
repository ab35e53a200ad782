"""The engine's side of a quantised version, in SGLang's own model on a CPU: its layers prepare FP8 weights there (a
transpose, for a scale a row), though nothing computes with them. ``ci/gpu/quantised.py`` has engines that answer.

1. After a version the model is, tensor by tensor, what SGLang makes of that checkpoint at the start; so it is after the
   one before, and every tensor lies where it was.
2. A checkpoint without a layer's weights is an error that names them.
"""

import json
import pathlib
import subprocess
import sys

import pytest
from safetensors.torch import load_file, save_file

from slime_cli.convert import number_formats
from slime_cli.models import tiny
from tests.weights.test_quantised import converted

MODEL = pathlib.Path(__file__).with_name("reloading_model.py")


def without(source: pathlib.Path, target: pathlib.Path, name: str) -> pathlib.Path:
    target.mkdir()
    kept = {key: tensor for key, tensor in load_file(source / "model.safetensors").items() if name not in key}
    save_file(kept, target / "model.safetensors")
    return target


@pytest.mark.engine
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind, lacking", [("qwen3", "self_attn.qkv_proj"), ("qwen3_moe", "self_attn.o_proj")])
def test_a_version_is_loaded_as_at_the_start(tmp_path, kind, lacking):
    form = number_formats.ToFp8(strategy="channel")
    a, b = (
        converted(
            pathlib.Path(tiny.make(f"tiny:{kind}?seed={seed}", tmp_path / f"{seed}")), tmp_path / f"{seed}-fp8", form
        )
        for seed in (1, 2)
    )
    parts = (
        ("layers.1.self_attn.q", "layers.1.self_attn.k", "layers.1.self_attn.v")
        if "qkv" in lacking
        else (f"layers.1.{lacking}",)
    )
    without_one = a
    for index, part in enumerate(parts):
        without_one = without(without_one, tmp_path / f"without-{index}", f"{part}_proj" if "qkv" in lacking else part)
    done = subprocess.run([sys.executable, MODEL, a, b, without_one], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["after_b"] == found["after_a"] == found["moved"] == []
    assert found["between"] > found["tensors"] / 2 and "torch.float8_e4m3fn" in found["dtypes"]
    assert found["error"] == f"the checkpoint holds nothing for model.layers.1.{lacking}.weight"
