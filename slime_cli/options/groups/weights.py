"""How the trainer's weights reach the engines; docs/weights.md compares the ways."""

from typing import Literal

from slime_cli.options.declare import AT_LEAST_1, POLICY, Bounds, group, having, option

_DELTA = having("update_weight_mode", "delta")
_DISK = having("update_weight_transport", "disk")


@group("weights", needs=POLICY)
class Weights:
    """How the weights reach the engines after a step: whole or as deltas, and by which transport."""

    update_weight_mode: Literal["full", "delta"] = option(
        "full", "Whole versions, or what has changed since the one before.", resume="free"
    )
    update_weight_transport: Literal["disk", "ipc", "nccl"] = option(
        "disk",
        "Files that engines load; ipc, memory shared with engines of the same GPU or CPU; nccl, slime's default, a"
        " broadcast to all engines (gloo on a CPU).",
        resume="free",
    )
    update_weight_delta_encoding: Literal["xor", "overwrite"] = option(
        "xor",
        "What a delta holds: new ^ old, or places and new values, which can be applied twice.",
        needs=_DELTA,
        resume="free",
    )
    update_weight_full_interval: int = option(
        32,
        "Versions after which a full one begins a new chain of deltas; a run's first one is full.",
        bounds=AT_LEAST_1,
        needs=_DELTA,
        resume="free",
    )
    update_weight_local_checkpoint_dir: str | None = option(
        None,
        "Folder on a disk (or in memory) near the engines, which load from a copy there that this host keeps.",
        needs=_DISK,
        resume="free",
    )
    update_weight_buffer_size: int = option(
        512 * 1024**2,
        "Bytes of tensors that a trainer rank has in memory, beside its model, while it writes a version; ipc and nccl"
        " send buckets of as many bytes, and have two.",
        bounds=Bounds(ge=1 << 20),
        resume="free",
    )
