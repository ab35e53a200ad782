"""Options of slime's launch scripts that are taken where they ask for what is so anyway, and refused where they ask for
anything else: options/checks/settled.py decides which."""

from dataclasses import dataclass
from typing import Literal

from slime_cli.options.declare import option


@dataclass(frozen=True, kw_only=True)
class LaunchScript:
    """Options of slime's launch scripts that are taken where they ask for what is so anyway, and refused where they ask for
    anything else: options/checks/settled.py decides which."""

    train_backend: Literal["megatron"] = option("megatron", "The trainer; Megatron is the only one.")
    rollout_function_path: str | None = option(
        None, "slime's own function for a whole rollout that goes with --loss-type."
    )
    debug_train_only: bool = option(False, "Start no engines; with --loss-type sft_loss none is started anyway.")
    compute_advantages_and_returns: bool = option(
        True, "Compute no advantages; sft_loss has none anyway.", flag="--disable-compute-advantages-and-returns"
    )
    no_offload_train: bool = option(False, "Keep the trainer on its devices, where it stays anyway.")
    no_offload_rollout: bool = option(False, "Keep the engines on their devices, where they stay anyway.")
