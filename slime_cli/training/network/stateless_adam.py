"""``--use-stateless-adam``: Adam that keeps no moments, for models whose moments do not fit.

Every step is the first of a fresh Adam. There the moments are ``(1 - beta1) g`` and ``(1 - beta2) g²``, and the bias
correction divides by just those factors, so the update is ``lr * g / (|g| + eps)`` whatever the betas are, besides the
decoupled weight decay (AdamW, https://arxiv.org/abs/1711.05101).
"""

from typing import Any

import torch


class StatelessAdam(torch.optim.Optimizer):
    """Takes the parameter groups that Megatron made for its Adam: ``lr``, ``eps`` and ``weight_decay`` of each are
    read.

    The state of a parameter is the number of its steps, a scalar, because Megatron's distributed optimizer asks for it.
    """

    def __init__(self, param_groups: list[dict[str, Any]]) -> None:
        super().__init__([torch.zeros(0)], {})
        self.param_groups = (
            param_groups  # as Megatron sets them too: the shards of a distributed optimizer are no leaves
        )
        self.init_state(self)

    @staticmethod
    def init_state(optimizer: torch.optim.Optimizer, config: Any = None) -> None:
        """What Megatron calls before it loads a checkpoint."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter].setdefault("step", torch.zeros(()))

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["step"] += 1
                if parameter.grad is not None:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.addcdiv_(parameter.grad, parameter.grad.abs().add_(group["eps"]), value=-group["lr"])


def take_over(optimizers: list) -> None:
    """These optimizers of Megatron, plain or distributed, step with this one in Adam's place from now on.

    Megatron's Adam has no state before its first step, so nothing was allocated for it.
    """
    from slime_cli.hardware import megatron  # torch alone is loaded until here

    for inner in optimizers:
        if inner.optimizer is not None:  # a rank may have nothing to train
            optimizer = StatelessAdam(inner.optimizer.param_groups)
            megatron.step_with(inner, optimizer, StatelessAdam.init_state)
