"""Adam without moments against Adam's first step, written out in float64."""

import numpy as np
import pytest
import torch

from slime_cli.training.network.stateless_adam import StatelessAdam


def first_adam_step(p, g, lr, eps, weight_decay, beta1, beta2):
    """AdamW's algorithm 2 at t = 1, from zero moments."""
    m = (1 - beta1) * g
    v = (1 - beta2) * g * g
    m_hat = m / (1 - beta1)
    v_hat = v / (1 - beta2)
    return p - lr * weight_decay * p - lr * m_hat / (np.sqrt(v_hat) + eps)


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.0, 0.999)])
def test_every_step_is_adams_first(betas):
    rng = np.random.default_rng(0)
    want = [rng.normal(size=(5, 7)), rng.normal(size=11)]
    parameters = [torch.nn.Parameter(torch.tensor(p)) for p in want]
    groups = [
        {"params": [parameters[0]], "lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1, "betas": betas},
        {"params": [parameters[1]], "lr": 3e-2, "eps": 1e-8, "weight_decay": 0.0, "betas": betas},
    ]
    optimizer = StatelessAdam(groups)
    for _ in range(4):
        for i, (parameter, group) in enumerate(zip(parameters, groups)):
            gradient = rng.normal(size=want[i].shape) * 10.0 ** rng.integers(-9, 3, want[i].shape)
            gradient.flat[0] = 0.0
            parameter.grad = torch.tensor(gradient)
            want[i] = first_adam_step(want[i], gradient, group["lr"], group["eps"], group["weight_decay"], *betas)
        optimizer.step()
    for got, expected in zip(parameters, want):
        np.testing.assert_allclose(got.detach().numpy(), expected, rtol=1e-12, atol=1e-15)


def test_it_is_torchs_adamw_started_anew_each_step():
    torch.manual_seed(0)
    one = torch.nn.Parameter(torch.randn(64))
    other = torch.nn.Parameter(torch.empty(64))
    other.data.copy_(one.data)
    stateless = StatelessAdam([{"params": [one], "lr": 1e-2, "eps": 1e-8, "weight_decay": 0.1}])
    for _ in range(3):
        one.grad = torch.randn(64)
        other.grad = one.grad.clone()
        stateless.step()
        torch.optim.AdamW([other], lr=1e-2, eps=1e-8, weight_decay=0.1).step()
    assert torch.allclose(one, other, rtol=1e-6, atol=1e-7)
    assert sum(t.numel() for state in stateless.state.values() for t in state.values()) == 1
