"""Optimizer state that one kind of Adam saved and the other loads: the step count is not lost on the way."""

import copy
import itertools

import pytest
import torch

from slime_cli.training.network import adam_state

LR, BETAS, EPS = 1e-2, (0.9, 0.999), 1e-8


class CountsInGroup(torch.optim.Optimizer):
    """Adam that keeps its count where Transformer Engine's FusedAdam does."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {"lr": LR, "bias_correction": True})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            assert group["bias_correction"]
            group["step"] = n = group.get("step", 0) + 1
            for p in group["params"]:
                state = self.state[p] or {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                assert state.keys() == {"exp_avg", "exp_avg_sq"}, "what it does not know it refuses"
                self.state[p] = state
                state["exp_avg"].lerp_(p.grad, 1 - BETAS[0])
                state["exp_avg_sq"].lerp_(p.grad**2, 1 - BETAS[1])
                second = (state["exp_avg_sq"] / (1 - BETAS[1] ** n)).sqrt() + EPS
                p -= LR * state["exp_avg"] / (1 - BETAS[0] ** n) / second


def in_states(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LR, betas=BETAS, eps=EPS, weight_decay=0.0)


KINDS = {"in the states": in_states, "in the group": CountsInGroup}


def steps(optimizer, parameter, gradients) -> None:
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()


@pytest.mark.parametrize(("saved", "loaded"), list(itertools.product(KINDS, KINDS)))
def test_either_kind_goes_on_where_the_other_stopped(saved, loaded):
    torch.manual_seed(0)
    start = torch.randn(5, dtype=torch.float64)
    gradients = torch.randn(6, 5, dtype=torch.float64)
    want = start.clone().requires_grad_()
    steps(in_states([want]), want, gradients)

    got = start.clone().requires_grad_()
    first = KINDS[saved]([got])
    steps(first, got, gradients[:2])
    for kind in (loaded, saved):  # and back again, where a count of the first save must not be found
        state = copy.deepcopy(first.state_dict())
        first = KINDS[kind]([got])
        first.register_load_state_dict_pre_hook(adam_state.fill_options)
        first.register_load_state_dict_pre_hook(adam_state.place_step_count)
        first.load_state_dict(state)
        at = 2 if kind is loaded else 4
        steps(first, got, gradients[at : at + 2])
        if saved == loaded:
            steps(first, got, gradients[4:])
            break
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
