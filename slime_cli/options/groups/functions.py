"""Functions of a user's own beside those for generation, rewards and losses; docs/hooks.md has a row for each."""

from slime_cli.options.declare import POLICY, group, option


@group("functions")
class Functions:
    """Functions of a user's own (module.function or file.py:function): what each is called with is in docs/hooks.md."""

    custom_config_path: str | None = option(
        None,
        "YAML map for such functions, each key an attribute of args; one that is an option holds over its flag.",
        resume="free",
    )
    data_source_path: str | None = option(None, "Class that deals the prompts, in place of --prompt-data.")
    buffer_filter_path: str | None = option(None, "Function that chooses among unfinished groups.", needs=POLICY)
    rollout_sample_hook_path: list[str] | None = option(
        None, "Functions that change each answer before its reward.", needs=POLICY
    )
    rollout_sample_filter_path: str | None = option(
        None, "Function that masks or removes samples of a batch.", needs=POLICY
    )
    rollout_all_samples_process_path: str | None = option(
        None, "Function that looks at all finished groups, dropped ones too.", needs=POLICY
    )
    custom_reward_post_process_path: str | None = option(
        None, "Function that makes the rewards to train on of a batch's rewards.", needs=POLICY
    )
    custom_convert_samples_to_train_data_path: str | None = option(
        None, "Function that makes the columns to train on of a batch's samples.", needs=POLICY
    )
    rollout_data_postprocess_path: str | None = option(
        None, "Function that changes loss masks once log-probabilities are known.", needs=POLICY
    )
    custom_rollout_log_function_path: str | None = option(
        None, "Function that logs each rollout's numbers and samples.", needs=POLICY, resume="free"
    )
    custom_eval_rollout_log_function_path: str | None = option(
        None, "Function that logs each evaluation's rewards and samples.", needs=POLICY, resume="free"
    )
    eval_function_path: str | None = option(None, "Function for a whole evaluation.", needs=POLICY)
    custom_model_provider_path: str | None = option(None, "Function that builds Megatron's model.")
    custom_megatron_init_path: str | None = option(
        None, "Function that is called in each trainer rank before the model is built."
    )
    custom_megatron_before_log_prob_hook_path: str | None = option(
        None, "Function that is called before log-probabilities are computed.", needs=POLICY
    )
    custom_megatron_before_train_step_hook_path: str | None = option(
        None, "Function that is called before each optimizer step."
    )
    custom_update_weight_post_write_path: str | None = option(
        None,
        "Function that is called when a version's files are written, before engines read them.",
        needs=POLICY,
        resume="free",
    )
