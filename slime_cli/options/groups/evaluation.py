"""When and on what the policy is evaluated."""

from slime_cli.options.declare import AT_LEAST_0, AT_LEAST_1, POLICY, Bounds, given, group, option

SETS = given("eval_prompt_data", "eval_config")


@group("eval", needs=POLICY)
class Evaluation:
    """When and on what the policy is evaluated."""

    eval_interval: int | None = option(None, "Rollout steps between two evaluations.", bounds=AT_LEAST_1, resume="free")
    eval_prompt_data: list[str] | None = option(None, "Evaluation sets: NAME PATH, and so on in pairs.")
    eval_config: str | None = option(
        None, "YAML file of evaluation sets, each with sampling, reward and fields of its own, in their place."
    )
    n_samples_per_eval_prompt: int = option(1, "Answers for each evaluation prompt.", bounds=AT_LEAST_1, needs=SETS)
    eval_temperature: float | None = option(
        None,
        "Temperature in evaluation; --rollout-temperature.",
        bounds=AT_LEAST_0,
        needs=SETS,
    )
    eval_top_p: float | None = option(
        None,
        "Nucleus mass in evaluation; --rollout-top-p.",
        bounds=Bounds(gt=0, le=1),
        needs=SETS,
    )
    eval_top_k: int | None = option(
        None,
        "Sample among so many most likely tokens in evaluation; --rollout-top-k.",
        bounds=Bounds(ge=1, also=(-1,)),
        needs=SETS,
    )
    eval_max_response_len: int | None = option(
        None,
        "Answer length in evaluation; --rollout-max-response-len.",
        bounds=AT_LEAST_1,
        needs=SETS,
    )
    eval_max_prompt_len: int | None = option(
        None,
        "Evaluation prompts of more tokens than this are left out, and counted; --rollout-max-prompt-len.",
        bounds=AT_LEAST_1,
        needs=SETS,
    )
    eval_max_context_len: int | None = option(
        None,
        "Tokens of an evaluation prompt and its answer together; --rollout-max-context-len.",
        bounds=Bounds(ge=2),
        needs=SETS,
    )
    eval_min_new_tokens: int = option(
        0,
        "Tokens before which an answer in evaluation does not end.",
        bounds=AT_LEAST_0,
        needs=SETS,
    )
    eval_input_key: str | None = option(None, "Prompt field of evaluation rows; --input-key.", needs=SETS)
    eval_label_key: str | None = option(None, "Answer field of evaluation rows; --label-key.", needs=SETS)
    eval_tool_key: str | None = option(None, "Field of evaluation rows that lists tools; --tool-key.", needs=SETS)
    skip_eval_before_train: bool = option(False, "Do not evaluate before the first step.", needs=SETS, resume="free")
