"""Options for when the next rollout is generated and its weights are sent: beside training or after it."""

from typing import Literal

from slime_cli.options.declare import AT_LEAST_0, POLICY, given, group, having, option


@group("schedule", needs=POLICY)
class Schedule:
    """How generation and training share the time."""

    schedule: Literal["sync", "one-step-off", "async"] = option(
        None,
        "sync generates and trains in turn, one-step-off generates the next rollout while this one is trained (slime's "
        "train_async.py), async generates all the time; sync when not given.",
    )
    max_staleness: int | None = option(
        None,
        "Rollouts by which the weights that wrote a token may be older than those that are trained on it; 1, and no "
        "bound with --schedule sync.",
        bounds=AT_LEAST_0,
    )
    in_flight: Literal["drain", "pause", "abort"] = option(
        "drain",
        "Requests under way when new weights arrive: they are finished first, paused and continued "
        "with the new weights, or aborted and continued later.",
        needs=having("schedule", "one-step-off", "async"),
    )
    partial_rollout: bool = option(
        False, "End a rollout once its groups are there; unfinished answers are kept and continued in a later one."
    )
    mask_offpolicy_in_partial_rollout: bool = option(
        False, "Do not train on the tokens that earlier weights wrote.", needs=given("partial_rollout")
    )
