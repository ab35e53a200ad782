"""Sums as engines compute them.

1. On a GPU: what SGLang's own kernel gives, which here runs in Triton's interpreter.
2. However the bytes are cut into chunks.
3. For engines whose function is not known, none.
"""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from slime_cli.weights import sums

TILE = 4 * 8192
GENUINE = """
import importlib.util, json, sys
import numpy as np, torch
spec = importlib.util.spec_from_file_location("genuine", sys.argv[1])
genuine = importlib.util.module_from_spec(spec)
spec.loader.exec_module(genuine)

class OnGpu(torch.Tensor):
    is_cuda = True

data = np.random.default_rng(1).integers(0, 256, 3 * int(sys.argv[2]), dtype=np.uint8)
print(json.dumps([
    f"{genuine.gpu_tensor_hash(torch.from_numpy(data[:size].copy()).as_subclass(OnGpu)):016x}"
    for size in json.loads(sys.argv[3])
]))
"""


def text(data, chunk):
    summed = sums.Tiles()
    for at in range(0, len(data), chunk):
        summed.update(data[at : at + chunk])
    return summed.text()


def kernel():
    (root,) = importlib.util.find_spec("sglang").submodule_search_locations
    return pathlib.Path(root) / "kernels/ops/memory/gpu_tensor_hash.py"


@pytest.mark.slow
def test_sums_are_those_of_the_genuine_kernel():
    sizes = [1, 2, 6, 4096, TILE, TILE + 10, 2 * TILE + 6002]
    command = [sys.executable, "-c", GENUINE, str(kernel()), str(TILE), json.dumps(sizes)]
    ran = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=True
    )
    data = np.random.default_rng(1).integers(0, 256, 3 * TILE, dtype=np.uint8).tobytes()
    for size, genuine in zip(sizes, json.loads(ran.stdout), strict=True):
        assert [text(data[:size], chunk) for chunk in (len(data), 9998, 2 * TILE)] == [genuine] * 3, size


def test_sums_do_not_depend_on_chunks_and_notice_every_change():
    data = np.random.default_rng(2).integers(0, 256, 70 * TILE + 13, dtype=np.uint8).tobytes()
    whole = text(data, len(data))
    assert {text(data, chunk) for chunk in (TILE - 1, TILE, 3 * TILE + 2, 1 << 20)} == {whole}
    for at in (0, TILE + 1, 64 * TILE, len(data) - 1):
        assert text(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], len(data)) != whole
    swapped = data[TILE : 2 * TILE] + data[:TILE] + data[2 * TILE :]
    assert text(swapped, len(data)) != whole and text(data + bytes(4), len(data)) != whole
    assert sums.Tiles().text() == f"{0:016x}"


@pytest.mark.parametrize(
    ("server", "function"),
    [
        ({"device": "cpu", "version": "0.5.23"}, sums.Sha),
        ({"device": "cuda", "version": "0.5.16"}, sums.Tiles),
        ({"device": "cuda:0", "version": "0.5.16"}, sums.Tiles),
        ({"device": "cuda", "version": "0.5.17"}, None),
        ({"device": "npu", "version": "0.5.16"}, None),
        ({}, None),
    ],
)
def test_the_function_is_the_devices_and_versions(server, function):
    assert sums.function(server) is function
