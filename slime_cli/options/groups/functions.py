"""Functions of a user's own beside those for generation, rewards and losses; docs/hooks.md has a row for each."""

from dataclasses import dataclass

from slime_cli.options.declare import option


@dataclass(frozen=True, kw_only=True)
class Functions:
    """Functions of a user's own (module.function or file.py:function): what each is called with is in docs/hooks.md."""

    data_source_path: str | None = option(None, "Class that deals the prompts, in place of --prompt-data.")
    buffer_filter_path: str | None = option(None, "Function that chooses among unfinished groups.")
    rollout_sample_hook_path: list[str] | None = option(None, "Functions that change each answer before its reward.")
    rollout_sample_filter_path: str | None = option(None, "Function that masks or removes samples of a batch.")
    rollout_all_samples_process_path: str | None = option(
        None, "Function that looks at all finished groups, dropped ones too."
    )
    custom_reward_post_process_path: str | None = option(
        None, "Function that makes the rewards to train on of a batch's rewards."
    )
    custom_convert_samples_to_train_data_path: str | None = option(
        None, "Function that makes the columns to train on of a batch's samples."
    )
    rollout_data_postprocess_path: str | None = option(
        None, "Function that changes loss masks once log-probabilities are known."
    )
    custom_rollout_log_function_path: str | None = option(
        None, "Function that logs each rollout's numbers and samples.", resume="free"
    )
    custom_eval_rollout_log_function_path: str | None = option(
        None, "Function that logs each evaluation's rewards and samples.", resume="free"
    )
    eval_function_path: str | None = option(None, "Function for a whole evaluation.")
    custom_model_provider_path: str | None = option(None, "Function that builds Megatron's model.")
    custom_megatron_init_path: str | None = option(
        None, "Function that is called in each trainer rank before the model is built."
    )
    custom_megatron_before_log_prob_hook_path: str | None = option(
        None, "Function that is called before log-probabilities are computed."
    )
    custom_megatron_before_train_step_hook_path: str | None = option(
        None, "Function that is called before each optimizer step."
    )
    custom_update_weight_post_write_path: str | None = option(
        None, "Function that is called when a version's files are written, before engines read them.", resume="free"
    )
