"""SGLang's LoRA without pinned memory, in an engine on a CPU.

Stock SGLang (0.5.16) has a LoRA backend in plain torch (``torch_native``), which a CPU can run, but it asks for pinned
memory, from which a GPU copies: torch raises where there is none. Registered by SGLang's own hooks around the two
methods of its manager in which that happens; :class:`~slime_cli.hardware.cpu.redirect.CudaToCpu` leaves the pinning
out, and changes no number.
"""

from collections.abc import Callable
from typing import Any

from slime_cli.hardware import adaptations
from slime_cli.hardware.cpu.redirect import CudaToCpu

MANAGER = "sglang.srt.lora.lora_manager.LoRAManager"


def register() -> None:
    """Called when a server imports its kernels, before it loads its plugins and applies hooks."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    adaptations.LORA_ON_CPU.rely_on(HookRegistry, "register", "apply_hooks")
    for method in ("__init__", "prepare_lora_batch"):
        HookRegistry.register(f"{MANAGER}.{method}", unpinned, HookType.AROUND)


def unpinned(stock: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    with CudaToCpu():
        return stock(*arguments, **named)
