"""Weight gradients that a linear layer's GEMM adds to their float32 sum, in the place where Megatron looks for apex's.

Megatron imports the module of that name once, before any device has been tried; whether its functions are used is for
:func:`slime_cli.hardware.kernels.weight_gradients` to say.
"""

import importlib.machinery
import importlib.util
import types
from typing import Any

import torch

from slime_cli.hardware import adaptations

NAME = "fused_weight_gradient_mlp_cuda"


def add(inputs: torch.Tensor, gradients: torch.Tensor, total: torch.Tensor) -> None:
    """``total += gradients.T @ inputs``, over all leading dimensions of the two, in the type of ``total``."""
    if not inputs.numel():  # an expert that no token went to
        return
    rows = inputs.reshape(-1, inputs.size(-1))
    columns = gradients.reshape(-1, gradients.size(-1)).t()
    if rows.dtype == total.dtype:
        total.addmm_(columns, rows)
    else:
        in_type: Any = torch.addmm
        in_type(total, columns, rows, out_dtype=total.dtype, out=total)


def stand_in() -> None:
    """Puts the module where ``import`` finds it; apex's own stays."""
    if importlib.util.find_spec(NAME) is not None:
        return
    found = types.ModuleType(NAME)
    found.__spec__ = importlib.machinery.ModuleSpec(NAME, None)
    vars(found).update(wgrad_gemm_accum_fp32=add, wgrad_gemm_accum_fp16=add)
    adaptations.WEIGHT_GRADIENTS.module(found)
