"""Kernels for GPUs, as far as a machine without one can run them: Triton's interpreter runs their code on the CPU.

1. The trials that :mod:`slime_cli.hardware.kernels` makes on a GPU pass here, against float64; a kernel that answers
   wrongly, or raises, is not used, and the reason is kept.
2. A gradient may take the place of its logits; where a row has none, its logits may be NaN.
3. On a CPU nothing is tried. The module that Megatron looks for adds weight gradients to their sum.
"""

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import json
import torch
from slime_cli.hardware import kernels
from slime_cli.hardware.cuda import rotary, softmax, weight_gradients
from slime_cli.training.network import logprobs

cpu, out = torch.device("cpu"), {}
g = torch.Generator().manual_seed(1)

# 1. The trials.
out["softmax"] = kernels.attempt("head", "kernel", "plain", lambda: kernels._softmax(cpu)) is softmax
out["rotary"] = kernels.attempt("rope", "kernel", "plain", lambda: kernels._rotary(cpu)) is rotary
out["right"] = kernels.found()
statistics = softmax.statistics
softmax.statistics = lambda *a, **k: statistics(*a, **k) * 1.001
out["wrong"] = kernels.attempt("head", "kernel", "plain", lambda: kernels._softmax(cpu)) is None
out["reason"] = kernels.found()
softmax.statistics = statistics

# 2. The kernels are the plain functions, in every way they are asked.
worst = 0.0
for dtype in (torch.float32, torch.bfloat16):
    for temperature in (1.0, 0.6):
        for entropy in (True, False):
            logits = (torch.randn(9, 4999, generator=g) * 5).to(dtype)
            logits[0, 1:] = -torch.inf
            targets = torch.randint(-5000, 9998, (9,), generator=g)
            targets[:3] = torch.tensor([0, 4998, 4096])
            ways = [f.statistics(logits, targets, temperature, entropy=entropy) for f in (softmax, logprobs)]
            worst = max(worst, float(((ways[0] - ways[1]).abs() / ways[1].abs().clamp(min=1)).max()))
            log_total = ways[1][1].log()
            state = torch.stack([ways[1][0], log_total, log_total - ways[1][2] / ways[1][1]])
            given = torch.randn(2, 9, generator=g)
            given[:, 4] = 0
            given[1] *= entropy
            logits[4, 17] = torch.nan
            found = []
            for f in (softmax, logprobs):
                mine = logits.clone()
                f.gradient(mine, targets, state, given, temperature, mine, entropy=entropy)
                found.append(mine.float())
            bound = 2.0 ** -7 if dtype == torch.bfloat16 else 1e-5  # one rounding of the type that it is written in
            by = (found[0] - found[1]).abs() / found[1].abs().clamp(min=1)
            worst = max(worst, float(by.max()) * 1e-5 / bound)
            out["nan"] = out.get("nan", 0) + int(found[0][4].count_nonzero() + found[1][4].count_nonzero())
out["worst"] = worst

# 3. The sum of weight gradients.
x, gradient = torch.randn(3, 2, 5, generator=g), torch.randn(3, 2, 4, generator=g)
total = torch.randn(4, 5, generator=g)
want = total.double() + torch.einsum("sbo,sbi->oi", gradient.double(), x.double())
weight_gradients.stand_in()
import fused_weight_gradient_mlp_cuda as theirs
theirs.wgrad_gemm_accum_fp32(x, gradient, total)
out["sum"] = float((total - want).abs().max())
out["on_a_cpu"] = [f(cpu) is None for f in (kernels.softmax, kernels.rotary, kernels.weight_gradients)]
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def found():
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=110, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_trials_pass(found):
    assert found["softmax"] and found["rotary"], found["right"]
    assert found["right"] == "head by kernel, rope by kernel"


def test_a_kernel_that_is_wrong_is_not_used_and_the_reason_is_kept(found):
    assert found["wrong"]
    assert found["reason"].startswith("head by plain (kernel: Wrong: ")


def test_kernels_do_what_plain_torch_does(found):
    assert found["worst"] <= 1e-5
    assert found["nan"] == 0, "a row without a gradient got one"


def test_weight_gradients_are_added_to_their_sum(found):
    assert found["sum"] < 1e-5


def test_nothing_is_tried_on_a_cpu(found):
    assert found["on_a_cpu"] == [True, True, True]


ATTENTION = """
import torch
from slime_cli.hardware import kernels

shape = kernels.Shape(torch.device("cpu"), torch.float32, 4, 2, 16, 8)

def alone(query, key, value, ends, longest, scale):
    out = []
    for first, end in zip(ends[:-1].tolist(), ends[1:].tolist()):
        q, k, v = (x[first:end].transpose(0, 1) for x in (query, key, value))
        out.append(torch.nn.functional.scaled_dot_product_attention(
            q, k.repeat_interleave(2, 0), v.repeat_interleave(2, 0), is_causal=True).transpose(0, 1))
    return torch.cat(out)

from slime_cli.hardware.cuda.attention import stacked

lengths = (5, 1, 300, 64, 129)
kernels.is_attention(alone, shape, lengths)
kernels.is_attention(lambda q, k, v, ends, longest, scale: stacked(q, k, v, 3, scale), shape, (7, 7, 7))
for wrong in (
    lambda q, k, v, ends, *more: alone(q, k, v, ends[[0, -1]], *more),
    lambda q, k, v, *more: alone(q, k.flip(1), v, *more),
    lambda q, k, v, *more: alone(q, k.detach(), v, *more) + 0 * k.sum(),
    lambda q, k, v, *more: alone(q, k, v, *more) * torch.nan,
):
    try:
        kernels.is_attention(wrong, shape, lengths)
        raise SystemExit("a wrong kernel passed")
    except kernels.Wrong as error:
        print(error)
"""


def test_the_trial_of_attention_finds_what_is_wrong():
    done = subprocess.run([sys.executable, "-c", ATTENTION], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    answers = [line.partition(" is off")[0] for line in done.stdout.splitlines()]
    assert answers == ["attention", "attention", "gradient of k", "attention"]
