"""Sums of tensors in memory are those that verification computes of the same version on a disk, and of sums.py."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from slime_cli.weights import publish, sums, tensor_sums, verification
from slime_cli.weights.folder import opened
from slime_cli.weights.held import Rank
from tests import checkpoints

WEIGHTS = {
    "model.embed_tokens.weight": (70, 8),
    "model.layers.0.self_attn.q_proj.weight": (16, 8),
    "model.layers.0.self_attn.k_proj.weight": (8, 8),
    "model.layers.0.self_attn.v_proj.weight": (8, 8),
    "model.layers.0.self_attn.o_proj.weight": (8, 16),
    "model.layers.0.mlp.gate_proj.weight": (12, 8),
    "model.layers.0.mlp.up_proj.weight": (12, 8),
    "model.layers.0.mlp.down_proj.weight": (8, 12),
    "model.norm.weight": (8,),
}
NAMES = (
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.qkv_proj.weight",
    "model.layers.0.self_attn.o_proj.weight",
    "model.layers.0.mlp.gate_up_proj.weight",
    "model.layers.0.mlp.down_proj.weight",
    "model.norm.weight",
    "model.rotary.inv_freq",
)


@pytest.mark.parametrize("of", [1, 2, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "auto"])
@pytest.mark.parametrize("function", [sums.Sha, sums.Tiles])
def test_as_of_a_version_on_a_disk(tmp_path, of, dtype, function):
    torch.manual_seed(0)
    weights = {name: torch.randn(shape) for name, shape in WEIGHTS.items()}
    weights["model.norm.weight"] = weights["model.norm.weight"].to(torch.bfloat16)
    model = checkpoints.write(tmp_path / "model")
    publish.write(iter(weights.items()), tmp_path / "v", hf_checkpoint=str(model), version="v", step=0, run="r")
    ranks = [Rank(place, of, 2) for place in range(of)]
    on_disk = verification.Sums(opened(tmp_path / "v")).all(NAMES, dtype, function, ranks)
    in_memory = tensor_sums.of(iter(weights.items()), NAMES, dtype, function, ranks)
    assert in_memory == on_disk
    assert all(in_memory["model.layers.0.self_attn.qkv_proj.weight"]) and not any(in_memory["model.rotary.inv_freq"])


def test_what_is_quantised_is_not_known():
    found = tensor_sums.of([("w", torch.zeros(2, dtype=torch.int8))], ["w"], "auto", sums.Sha, [Rank()])
    assert found == {"w": [frozenset()]}


@pytest.mark.parametrize("count", [0, 1, 3, 8191, 8192, 2 * 8193, 512 * 8192 + 7, 1024 * 8192 + 8193])
def test_tiles_of_a_tensor_are_tiles_of_its_bytes(count):
    words = np.random.default_rng(count).integers(0, 1 << 16, count, np.uint16)
    known = sums.Tiles()
    known.update(words.tobytes())
    assert tensor_sums.tiles(torch.from_numpy(words))() == known.text()


KERNEL = """
import torch
from slime_cli.weights import tensor_sums, tile_kernel

tensor_sums.tried(torch.device("cpu"))
words = torch.arange(3 * 8192 + 77, dtype=torch.int32)
right = tile_kernel.added(words, 8192)
for at in (0, 8191, 8192, len(words) - 1):
    words[at] ^= 1
    assert tile_kernel.added(words, 8192) != right, at
    words[at] ^= 1
tile_kernel.added = lambda words, tile: torch.zeros((), dtype=torch.int64)
try:
    tensor_sums.tried(torch.device("cpu"))
except Exception as error:
    print(error)
"""


def test_the_kernel_gives_what_plain_torch_gives_and_a_wrong_one_is_found():
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", KERNEL], capture_output=True, text=True, timeout=110, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "the sum of 1 words is another one\n", done.stdout


def test_tensors_that_pass_through_are_summed_up_and_stay_as_they_are():
    torch.manual_seed(0)
    weights = {name: torch.randn(shape) for name, shape in WEIGHTS.items()}
    summing = tensor_sums.Summing(NAMES, "bfloat16", sums.Tiles, [Rank()])
    passed = dict(summing.through(iter(weights.items())))
    assert list(passed) == list(weights) and all(passed[name] is tensor for name, tensor in weights.items())
    assert summing.result() == tensor_sums.of(weights.items(), NAMES, "bfloat16", sums.Tiles, [Rank()])
