"""Stand-in for the CUDA-only ``sglang-kernel`` wheel, whose library needs libcuda.so.1.

On the PYTHONPATH of an SGLang server started with ``SGLANG_USE_CPU_ENGINE=1``, which then uses its torch-native layers.
Every symbol resolves, and raises when it is called, so nothing runs on a kernel that is not there.
"""

from typing import Any, NoReturn

import torch

from slime_cli.hardware import adaptations
from slime_cli.hardware.cpu import engine_attention, engine_lora, engine_workers

__version__ = "0.4.5"

if not torch.cuda.is_available():
    # CUDA builds of torch raise here without a driver; SGLang's memory and weight-checking calls synchronise first.
    adaptations.CUDA_ON_CPU.replace(torch.cuda, synchronize=lambda *args, **kwargs: None)
    engine_attention.register()
    engine_lora.register()
    engine_workers.register()


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} has no CPU implementation")

    missing.__name__ = name
    return missing
