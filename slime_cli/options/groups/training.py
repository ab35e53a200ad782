"""The loss that is trained, on which parameters, by which optimizer: of a policy and of a supervised phase alike."""

from typing import Literal

from slime_cli.options.declare import SUPERVISED, group, having, option


@group("training")
class Training:
    """Read whatever the loss is."""

    loss_type: Literal["policy_loss", "sft_loss", "custom_loss"] = option(
        "policy_loss", "Reinforcement learning, supervised training on the rows' answers, or a function of yours."
    )
    custom_loss_function_path: str | None = option(
        None,
        "Function that --loss-type custom_loss calls in the policy loss's place.",
        needs=having("loss_type", "custom_loss"),
    )
    stop_at_loss: float | None = option(
        None, "End a supervised phase after the first rollout whose mean loss is not above this.", needs=SUPERVISED
    )
    only_train_params_name_list: list[str] | None = option(
        None, "Patterns (regular expressions) of the parameters to train; all others are frozen."
    )
    freeze_params_name_list: list[str] | None = option(
        None, "Patterns (regular expressions) of parameters that stay as they are."
    )
    enable_mtp_training: bool = option(
        False,
        "Train the multi-token-prediction (MTP) layers of --mtp-num-layers beside the policy, which they never move.",
    )
    reset_optimizer_states: bool = option(False, "Forget Adam's moments before each rollout's steps.")
    use_stateless_adam: bool = option(
        False, "Adam that keeps no moments: every step is its first, and there is no memory for them."
    )
    on_nan_gradient: Literal["fail", "skip"] = option(
        "fail", "A gradient that is not finite ends the run, or its step is skipped and counted.", resume="free"
    )
