"""Options of slime's launch scripts that have one meaning here: :mod:`slime_cli.options.checks.settled` decides
which."""

from typing import Literal

from slime_cli.options.declare import SUPERVISED, group, option


@group("launch-script")
class LaunchScript:
    """Taken where a launch script asks for what is so anyway, refused where it asks for anything else."""

    train_backend: Literal["megatron"] = option("megatron", "The trainer; Megatron is the only one.", resume="free")
    rollout_function_path: str | None = option(
        None,
        "Function for a whole rollout; slime's own by their names there: supervised (with --loss-type sft_loss), "
        "fully asynchronous (--schedule async).",
        resume="free",
    )
    model_name: str | None = option(
        None, "The model's name, which config.json of --hf-checkpoint says anyway.", resume="free"
    )
    use_gated_attention: bool = option(
        False, "Attention with an output gate, which config.json of --hf-checkpoint says anyway.", resume="free"
    )
    qwen_gdn_backend: Literal["fla", "flashqla"] | None = option(
        None, "Who computes Qwen's linear attention; torch does anyway.", resume="free"
    )
    loss_mask_type: Literal["qwen", "qwen3", "qwen3_5", "distill_qwen"] | None = option(
        None, "The template's kind, which the chat template itself says anyway.", needs=SUPERVISED, resume="free"
    )
    compute_advantages_and_returns: bool = option(
        True, "Compute no advantages; sft_loss has none anyway.", flag="--disable-compute-advantages-and-returns"
    )
    update_weight_delta_checksum: Literal["xxh3-128"] = option(
        "xxh3-128", "Sum by which the tensors are checked that a delta was applied to.", resume="free"
    )
    no_offload_train: bool = option(False, "With --offload: keep the trainer on its devices.", resume="free")
    no_offload_rollout: bool = option(False, "With --offload: keep the engines on their devices.", resume="free")
