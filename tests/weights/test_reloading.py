"""The engine's side of a quantised version, in SGLang's own model on a CPU: its layers prepare FP8 weights there (a
transpose, for a scale a row), though nothing computes with them. ``ci/gpu/quantised.py`` has engines that answer.

1. After a version the model is, tensor by tensor, what SGLang makes of that checkpoint at the start; so it is after the
   one before, and every tensor lies where it was.
2. A checkpoint without a layer's weights is an error that names them.
3. Of FP8 in blocks, SGLang's own weight checker gives the sums that the version is proven by.
"""

import json
import pathlib
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime_cli.commands import sync
from slime_cli.convert import number_formats
from slime_cli.models import tiny
from slime_cli.weights import held, reloading, verification
from slime_cli.weights.folder import opened
from tests.scripted_engine import ScriptedEngine
from tests.weights.test_quantised import SHAPE, converted

MODEL = pathlib.Path(__file__).with_name("reloading_model.py")


def without(source: pathlib.Path, target: pathlib.Path, names: list[str]) -> pathlib.Path:
    target.mkdir()
    held_there = load_file(source / "model.safetensors")
    kept = {key: tensor for key, tensor in held_there.items() if not any(name in key for name in names)}
    assert len(kept) < len(held_there)
    save_file(kept, target / "model.safetensors")
    return target


CASES = {
    "dense": ("qwen3?", number_formats.ToFp8(strategy="channel"), "self_attn.qkv_proj"),
    "experts": ("qwen3_moe?", number_formats.ToFp8(strategy="channel"), "self_attn.o_proj"),
    "blocks": (f"qwen3?{SHAPE}&", number_formats.ToFp8(), "mlp.gate_up_proj"),
}
"""Kind of the model, its format, and the engine's layer whose weights a checkpoint lacks."""


@pytest.mark.engine
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CASES)
def test_a_version_is_loaded_as_at_the_start(tmp_path, name):
    kind, form, lacking = CASES[name]
    plain = [pathlib.Path(tiny.make(f"tiny:{kind}seed={seed}", tmp_path / f"{seed}")) for seed in (1, 2)]
    a, b = (converted(path, path.with_suffix(".fp8"), form) for path in plain)
    less = without(a, tmp_path / "less", [f"layers.1{part}" for part in held.parts_of(f".{lacking}.")])
    done = subprocess.run([sys.executable, MODEL, a, b, less], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["after_b"] == found["after_a"] == found["moved"] == []
    assert found["between"] > found["tensors"] / 2 and "torch.float8_e4m3fn" in found["dtypes"]
    assert found["error"] == f"the checkpoint holds nothing for model.layers.1.{lacking}.weight"
    assert proven(b, tmp_path / "versions", found["sums"]) == ("checksum" if name == "blocks" else "version")


def proven(model: pathlib.Path, folder: pathlib.Path, found: dict[str, str]) -> str:
    """By what an engine that reports ``found`` is proven to hold the checkpoint."""
    assert sync.run(["publish", "--load", str(model), "--publish", str(folder), "--weight-version", "b"]) == 0
    engine = ScriptedEngine(model, device="cpu", dtype="auto")
    engine.answers["/model_info"]["weight_version"] = "b"
    engine.answers["/weights_checker"] = {"ranks": [{"checksums": found}]}
    return verification.verify(opened(folder / "b"), [engine.url])[0].kind


def test_a_file_that_the_index_does_not_name_is_not_read(tmp_path):
    save_file(
        {"model.layers.1.x.weight": torch.ones(1), "model.norm.weight": torch.ones(1)}, tmp_path / "a.safetensors"
    )
    save_file({"layers.1.other": torch.ones(1)}, tmp_path / "consolidated.safetensors")
    everything = reloading._by_layer(tmp_path)
    assert {number: sum(map(len, files.values())) for number, files in everything.items()} == {1: 2, -1: 1}
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"model.norm.weight": "a.safetensors"}})
    )
    listed = reloading._by_layer(tmp_path)
    assert listed[1] == {tmp_path / "a.safetensors": ["model.layers.1.x.weight"]}
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="no .*safetensors"):
        reloading._by_layer(tmp_path / "none")
