"""How many rollouts there are, and how their answers are generated."""

import math

from slime_cli.options.declare import AT_LEAST_0, AT_LEAST_1, EITHER, POLICY, PORT, Bounds, group, option


@group("rollout")
class Rollout:
    """How many rollouts there are, and how their answers are generated."""

    num_rollout: int | None = option(
        None, "Rollout steps to run; 0 evaluates and trains nothing.", bounds=AT_LEAST_0, resume="free"
    )
    num_epoch: int | None = option(
        None, "Passes over the prompts, when --num-rollout is not given.", bounds=AT_LEAST_1, resume="free"
    )
    rollout_batch_size: int = option(None, "Prompts in one rollout step.", bounds=AT_LEAST_1)
    n_samples_per_prompt: int = option(1, "Answers generated for each prompt: the group.", bounds=AT_LEAST_1)
    rollout_temperature: float = option(1.0, "Sampling temperature; log-probabilities are scaled alike.", needs=POLICY)
    rollout_top_p: float = option(
        1.0, "Nucleus sampling mass; 1 samples from the whole distribution.", bounds=Bounds(gt=0, le=1), needs=POLICY
    )
    rollout_top_k: int = option(
        -1, "Sample among so many most likely tokens; -1 for all.", bounds=Bounds(ge=1, also=(-1,)), needs=POLICY
    )
    rollout_max_response_len: int | None = option(None, "Tokens after which an answer is cut.", bounds=AT_LEAST_1)
    rollout_max_prompt_len: int | None = option(
        None, "Prompts of more tokens than this are left out, and counted.", bounds=AT_LEAST_1
    )
    rollout_max_context_len: int | None = option(
        None,
        "Tokens of a prompt and its answer together: longer prompts are left out, and an answer is cut there.",
        bounds=Bounds(ge=2),
        needs=POLICY,
    )
    rollout_stop: list[str] | None = option(None, "Texts that end an answer.")
    rollout_stop_token_ids: list[int] | None = option(None, "Token ids that end an answer.", bounds=AT_LEAST_0)
    rollout_shuffle: bool = option(False, "Draw the prompts of each epoch in a shuffled order.")
    rollout_seed: int = option(
        42, "Seed of the prompt order and of procedural prompts.", bounds=AT_LEAST_0, commands=EITHER
    )
    rollout_skip_special_tokens: bool = option(False, "Leave special tokens out of the decoded answer.")
    over_sampling_batch_size: int = option(
        None,
        "Prompts to draw whenever too few groups are left; --rollout-batch-size.",
        bounds=AT_LEAST_1,
        needs=POLICY,
        resume="free",
    )
    max_groups_without_progress: int = option(
        128,
        "Groups in a row of which none is accepted, or prompts of an evaluation, after which the run ends "
        "with the reasons.",
        bounds=AT_LEAST_1,
        resume="free",
    )
    max_seconds_without_progress: float = option(
        3600.0,
        "Seconds in which no request, no call of a function and no reward ends while the run waits for one, after "
        "which it ends and says what is under way; inf for no limit.",
        bounds=Bounds(gt=0, also=(math.inf,)),
        needs=POLICY,
        resume="free",
    )
    dynamic_sampling_filter_path: str | None = option(
        None, "Function that decides whether a finished group is kept.", needs=POLICY
    )
    custom_generate_function_path: str | None = option(
        None, "Function that generates a sample, or the list that it fans out into: turns, tools, agents.", needs=POLICY
    )
    sglang_server_concurrency: int = option(
        512, "Requests in flight for each engine.", bounds=AT_LEAST_1, resume="free"
    )
    sglang_router_ip: str = option("127.0.0.1", "Address that the router listens on.", commands=EITHER, resume="free")
    sglang_router_port: int | None = option(
        None,
        "Port that the router listens on; any free one when not given.",
        bounds=PORT,
        commands=EITHER,
        resume="free",
    )
    rollout_endpoint: str | None = option(
        None, "endpoint.json of a running `slime serve-rollout` to use in place of own engines.", resume="free"
    )
