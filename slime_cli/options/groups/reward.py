"""Options for rewards."""

from slime_cli.options.declare import ABOVE_0, AT_LEAST_1, POLICY, given, group, option


@group("reward", needs=POLICY)
class Reward:
    """Options for rewards."""

    rm_type: str | None = option(None, "Built-in reward by name; a row's metadata can name another.")
    rm_url: str | None = option(None, "Reward service that --rm-type remote_rm asks.", resume="free")
    custom_rm_path: str | None = option(None, "Function that rewards a sample, or a group with --group-rm.")
    group_rm: bool = option(False, "Reward the samples of a group in one call.")
    reward_key: str | None = option(None, "Entry to train on when a reward is a dict.")
    eval_reward_key: str | None = option(
        None, "Entry to report in evaluation; --reward-key.", needs=given("eval_prompt_data", "eval_config")
    )
    rm_timeout: float = option(
        10.0, "Seconds after which one reward computation is given up, and counted.", bounds=ABOVE_0, resume="free"
    )
    rm_workers: int = option(2, "Processes that verify answers.", bounds=AT_LEAST_1, resume="free")
