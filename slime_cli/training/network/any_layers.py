"""Checkpoints that hold the same whichever layers a model has, so that each kind of layers loads the other's; where a
model has LoRA adapters, these alone.

Transformer Engine's layers save a state for FP8 beside their weights (``_extra_state``). It is empty but for a history
of scales, and the one recipe that has it is refused.
"""

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel

from slime_cli.hardware.megatron import become
from slime_cli.training.network import lora

EXTRA_STATE = "._extra_state"


class Saved(GPTModel):
    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Megatron's, without that state."""
        found = super().sharded_state_dict(*args, **kwargs)
        return lora.alone({key: value for key, value in found.items() if EXTRA_STATE not in key})


def checkpoints(model: GPTModel) -> GPTModel:
    """``model``, which is :class:`Saved` from now on; one of a user's own class keeps what it has."""
    become(model, {GPTModel: Saved})
    if isinstance(model, Saved):
        model.register_load_state_dict_post_hook(_not_missed)
    return model


def _not_missed(model: torch.nn.Module, wrong: Any) -> None:
    there = lora.alone(dict(model.named_parameters()))
    frozen = dict(model.named_parameters()).keys() - there.keys()
    wrong.missing_keys[:] = [key for key in wrong.missing_keys if EXTRA_STATE not in key and key not in frozen]
