"""Optimizer state that one kind of Adam saved and another loads: torch's, and Transformer Engine's.

Both functions are hooks for ``register_load_state_dict_pre_hook``.
"""

from typing import Any

import torch


def fill_options(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Options of ``optimizer`` that the other kind's parameter groups do not have become the default."""
    for group in state_dict["param_groups"]:
        for name, value in optimizer.defaults.items():
            group.setdefault(name, value)


def place_step_count(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Puts the step count where ``optimizer`` reads it: torch's Adam, and slime's without moments, in each weight's
    state, the other's in the parameter group. Else it would begin at step 1 again, or fail."""
    in_states = isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)
    in_states = in_states or any("step" in state for state in optimizer.state.values())
    for group in state_dict["param_groups"]:
        states = [state_dict["state"][i] for i in group["params"] if i in state_dict["state"]]
        found = [place.pop("step", None) for place in (group, *states)]
        counts = [count for count in found if count is not None]
        if not counts:
            continue
        if not in_states:
            group["step"] = int(counts[0])
        for state in states if in_states else []:
            state["step"] = torch.tensor(float(counts[0]))
