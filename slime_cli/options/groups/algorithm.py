"""The loss, the advantages, the optimizer."""

import math
from typing import Literal

from slime_cli.options.declare import AT_LEAST_0, AT_LEAST_1, POLICY, Bounds, given, group, having, option
from slime_cli.options.estimators import GROUP_RELATIVE, Estimator


@group("algorithm", needs=POLICY)
class Algorithm:
    """The loss, the advantages, the optimizer."""

    advantage_estimator: Estimator = option(
        "grpo", "How rewards become advantages, and the policy loss that goes with it."
    )
    custom_advantage_function_path: str | None = option(
        None, "Function that computes advantages and returns in the estimator's place."
    )
    custom_pg_loss_reducer_function_path: str | None = option(
        None, "Function that says how the policy loss is summed over tokens.", needs=having("loss_type", "policy_loss")
    )
    grpo_std_normalization: bool = option(
        True,
        "Do not divide a group's rewards by their spread (Dr. GRPO).",
        flag="--disable-grpo-std-normalization",
        needs=having("advantage_estimator", *GROUP_RELATIVE),
    )
    rewards_normalization: bool = option(
        True,
        "Take rewards as advantages without comparing within the group.",
        flag="--disable-rewards-normalization",
        needs=having("advantage_estimator", *GROUP_RELATIVE, "reinforce_plus_plus_baseline"),
    )
    normalize_advantages: bool = option(
        False, "Whiten advantages over the global batch; always so with reinforce_plus_plus*."
    )
    gamma: float = option(
        1.0,
        "Discount of a reward for each token before it.",
        bounds=Bounds(ge=0, le=1),
        needs=having("advantage_estimator", "reinforce_plus_plus", "ppo"),
    )
    lambd: float = option(
        1.0,
        "Decay of generalised advantage estimation.",
        bounds=Bounds(ge=0, le=1),
        needs=having("advantage_estimator", "ppo"),
    )
    eps_clip: float = option(0.2, "How far the probability ratio may fall below 1.")
    eps_clip_high: float = option(None, "How far the ratio may rise above 1; --eps-clip.")
    eps_clip_c: float | None = option(
        None,
        "Dual clip: bound on the loss of a negative advantage, in multiples of it; above 1.",
        needs=having(
            "advantage_estimator", "grpo", "gspo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"
        ),
    )
    kl_coef: float = option(
        0.0,
        "Divergence from the reference that is taken off each token's reward (not for grpo, gspo, cispo).",
        bounds=AT_LEAST_0,
    )
    use_kl_loss: bool = option(False, "Add the divergence from the reference model to the loss.")
    kl_loss_coef: float = option(0.0, "Weight of that divergence.", bounds=AT_LEAST_0, needs=given("use_kl_loss"))
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = option(
        "k1", "Estimator of the divergence, in the loss and in the reward.", needs=given("use_kl_loss", "kl_coef")
    )
    use_unbiased_kl: bool = option(
        False, "Weight that divergence by the probability ratio to the old policy.", needs=given("use_kl_loss")
    )
    entropy_coef: float = option(0.0, "Weight of the entropy bonus.")
    value_clip: float = option(
        0.2,
        "How far a value may move from the one before the step.",
        bounds=Bounds(ge=0, also=(math.inf,)),
        needs=having("advantage_estimator", "ppo"),
    )
    num_critic_only_steps: int = option(
        0,
        "Rollouts at the start that train the critic alone.",
        bounds=AT_LEAST_0,
        needs=having("advantage_estimator", "ppo"),
    )
    ref_update_interval: int | None = option(
        None,
        "Rollouts after which the policy becomes its own reference; never when not given.",
        bounds=AT_LEAST_1,
        needs=given("use_kl_loss", "kl_coef"),
    )
    megatron_config_path: str | None = option(
        None, "YAML with Megatron options by role: the critic's.", needs=having("advantage_estimator", "ppo")
    )
