"""The chunked delta rule against the recurrence in its module's head, in float64, one sequence at a time."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from slime_cli.training.network.delta_rule import LENGTH, Chunks, gated_delta_rule

HEADS, DK, DV = 2, 8, 6
PACKS = {
    "one token": [1],
    "one chunk": [LENGTH],
    "one more than a chunk": [LENGTH + 1],
    "ragged": [5, 1, 3 * LENGTH + 7, LENGTH, 2, 2 * LENGTH - 1, 200],
}


def inputs(lengths: list[int], decay: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths))
    total = sum(lengths)
    q, k, v = (torch.randn(total, HEADS, d, generator=generator, dtype=torch.float64) for d in (DK, DK, DV))
    g = -decay * torch.rand(total, HEADS, generator=generator, dtype=torch.float64)
    beta = torch.rand(total, HEADS, generator=generator, dtype=torch.float64)
    return [x.requires_grad_() for x in (F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, g, beta)]


def recurrence(q, k, v, g, beta) -> torch.Tensor:
    state = torch.zeros(HEADS, DK, DV, dtype=torch.float64)
    out = []
    for t in range(len(q)):
        state = state * g[t].exp()[:, None, None]
        gap = (v[t] - torch.einsum("hkv,hk->hv", state, k[t])) * beta[t][:, None]
        state = state + k[t][:, :, None] * gap[:, None, :]
        out.append(torch.einsum("hkv,hk->hv", state, q[t]) * DK**-0.5)
    return torch.stack(out)


@pytest.mark.parametrize("lengths", PACKS.values(), ids=PACKS.keys())
@pytest.mark.parametrize("decay", [0.05, 1.0, 30.0])
def test_outputs_and_gradients_are_the_recurrences(lengths, decay):
    given = inputs(lengths, decay)
    want = torch.cat([recurrence(*part) for part in zip(*(x.split(lengths) for x in given), strict=True)])
    weights = torch.randn(want.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wanted = torch.autograd.grad((want * weights).sum(), given)
    got = gated_delta_rule(*given, Chunks.of(np.array(lengths), torch.device("cpu")))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    for one, other in zip(torch.autograd.grad((got.double() * weights).sum(), given), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5)


def test_a_sequence_does_not_see_another():
    lengths = PACKS["ragged"]
    given = inputs(lengths)
    chunks = Chunks.of(np.array(lengths), torch.device("cpu"))
    before = gated_delta_rule(*given, chunks).split(lengths)
    with torch.no_grad():
        given[2].split(lengths)[2].mul_(100.0)
    after = gated_delta_rule(*given, chunks).split(lengths)
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [n != 2 for n in range(len(lengths))]
