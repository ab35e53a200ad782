"""Adam's step count, which torch's keeps in each weight's state and Transformer Engine's in the parameter group."""

from typing import Any

import torch


def put_where_read(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Puts the count of a state that is loaded next where ``optimizer`` reads it. Else an Adam would begin at step 1
    of a state that the other kind saved, or fail. For ``register_load_state_dict_pre_hook``."""
    in_states = isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)
    for group in state_dict["param_groups"]:
        for name, value in optimizer.defaults.items():  # options that the other kind does not have
            group.setdefault(name, value)
        states = [state_dict["state"][i] for i in group["params"] if i in state_dict["state"]]
        counts = [
            count for count in (group.pop("step", None), *(x.pop("step", None) for x in states)) if count is not None
        ]
        if not counts:
            continue
        if not in_states:
            group["step"] = int(counts[0])
        for state in states if in_states else []:
            state["step"] = torch.tensor(float(counts[0]))
