"""Optimizer state of a mixture of experts that was saved with expert parallelism and is loaded without, or the other
way round.

With expert parallelism Megatron chains two optimizers, the second for experts; without, one has all parameters. What
is saved by a parameter's name fits both ways. The rest (parameter groups with their step count and schedule, a
gradient's scale) lies in one dict or in one for each optimizer, and Megatron reads its own way only.
"""

from typing import Any

from megatron.core.optimizer.optimizer import MegatronOptimizer, param_group_identifier_keys

EXPERT = "is_expert_parallel"
_SAME = [key for key in param_group_identifier_keys if key != EXPERT]
State = dict[Any, Any]


class AnyChain:
    """An optimizer for Megatron's ``load_checkpoint`` that loads the state of either kind."""

    def __init__(self, optimizer: MegatronOptimizer) -> None:
        self._optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def load_state_dict(self, state_dict: State) -> None:
        self._optimizer.load_state_dict(fitted(state_dict, inner_optimizers(self._optimizer)))


def inner_optimizers(optimizer: MegatronOptimizer | None) -> list[Any]:
    """The optimizers that Megatron chains, or the one there is, or none."""
    return [] if optimizer is None else getattr(optimizer, "chained_optimizers", [optimizer])


def fitted(state_dict: State, optimizers: list[Any]) -> State:
    """A merge of what was saved and of this run's tensors, as ``optimizers`` load it.

    Tensors lie where this run has them: under an optimizer's number if there are several. The rest lies where it was
    saved, which is where numbers were or were not used then.
    """
    numbers = [key for key in state_dict if isinstance(key, int)]
    beside = {key: value for key, value in state_dict.items() if key not in numbers}
    if not numbers or not beside:
        return state_dict
    if len(optimizers) > 1:
        return {i: _completed(state_dict[i], beside, one) for i, one in enumerate(optimizers)}
    return _completed(beside, state_dict[0], optimizers[0])


def _completed(own: State, saved: State, optimizer: Any) -> State:
    """``own`` tensors with everything else of ``saved``, at any depth."""
    out = saved | own
    for key, value in saved.items():
        if isinstance(value, dict):
            out[key] = _completed(own.get(key, {}), value, optimizer)
    if "param_groups" in saved:
        out["param_groups"] = [_group(group, saved["param_groups"]) for group in optimizer.param_groups]
        for group, of_run in zip(out["param_groups"], own.get("param_groups", ())):
            group["params"] = of_run["params"]
    return out


def _group(own: State, saved: list[State]) -> State:
    """The saved group with the options of ``own``; experts and others have the same ones."""
    (found, *_) = [group for group in saved if all(group.get(key) == own.get(key) for key in _SAME)]
    return {key: value for key, value in found.items() if key != "params"} | {EXPERT: own[EXPERT]}
