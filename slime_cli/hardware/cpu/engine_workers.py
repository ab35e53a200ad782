"""The processes of an engine on a CPU: forked from the server, which has imported SGLang.

Stock SGLang (0.5.16) spawns its schedulers and its detokenizer, and each imports all of it again, for most of an
engine's start. A process that uses CUDA cannot be forked; one on a CPU can, as long as it has one thread. Registered
by SGLang's own hook around the function that chooses the way, right before the processes are made.
"""

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

from slime_cli.hardware import adaptations

CHOOSES = "sglang.srt.entrypoints.engine._set_envs_and_config"


def register() -> None:
    """Called when a server imports its kernels, before it loads its plugins and applies hooks."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    adaptations.FORKED_WORKERS.rely_on(HookRegistry, "register", "apply_hooks")
    HookRegistry.register(CHOOSES, forked, HookType.AROUND)


def forked(stock: Callable[[Any], None], server_args: Any) -> None:
    """Copies of the model (``--sglang-dp-size``) are started from threads, and so are several tokenizers: those are
    spawned as they were."""
    stock(server_args)
    if server_args.dp_size == server_args.tokenizer_worker_num == 1 and threads() == 1:
        multiprocessing.set_start_method("fork", force=True)


def threads() -> int:
    """How many this process has, those of native libraries included."""
    return len(os.listdir("/proc/self/task"))
