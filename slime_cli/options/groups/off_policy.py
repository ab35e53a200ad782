"""Options that correct for samples that another policy wrote, or that bring a teacher in."""

import math
from typing import Literal

from slime_cli.options.declare import (
    ABOVE_0,
    AT_LEAST_0,
    AT_LEAST_1,
    POLICY,
    Bounds,
    given,
    group,
    having,
    option,
)


@group("off-policy", needs=POLICY)
class OffPolicy:
    """Options that correct for samples that another policy wrote, or that bring a teacher in."""

    use_rollout_logprobs: bool = option(False, "Take the engine's log-probabilities as those of the old policy.")
    get_mismatch_metrics: bool = option(
        False, "Measure how far the engine's policy is from the trainer's before the first step."
    )
    max_logprob_diff: float | None = option(
        None,
        "Mean log-probability difference between engine and trainer, in nats a token, that ends a run; 0.5, 0.05 where "
        "both compute in float32, with a generate function of yours none.",
        bounds=Bounds(ge=0, also=(math.inf,)),
        resume="free",
    )
    update_weights_interval: int = option(
        1,
        "Rollouts after which the engines get new weights; before an evaluation and at the end, always.",
        bounds=AT_LEAST_1,
        resume="free",
    )
    keep_old_actor: bool = option(
        False, "Keep the weights that the engines hold, and take the old policy's log-probabilities from them."
    )
    use_top_p_replay: bool = option(
        False, "Take log-probabilities among the tokens that top-p and top-k left to choose from."
    )
    use_opsm: bool = option(
        False, "Leave out samples with a negative advantage that the policy has moved away from already."
    )
    opsm_delta: float = option(
        0.0001,
        "Mean log-probability gap above which --use-opsm leaves a sample out.",
        bounds=AT_LEAST_0,
        needs=given("use_opsm"),
    )
    use_tis: bool = option(False, "Weight the policy loss by the ratio of the trainer's old policy to the engine's.")
    tis_level: Literal["token", "sequence", "geometric"] = option(
        "token",
        "Take that ratio at a token, over the sample, or as the sample's geometric mean.",
        needs=given("use_tis"),
    )
    tis_mode: Literal["truncate", "clip", "mask"] = option(
        "clip",
        "Bound it above, within both bounds, or leave out what is outside them (IcePop).",
        needs=given("use_tis"),
    )
    tis_clip: float = option(2.0, "Upper bound of that ratio.", needs=given("use_tis"))
    tis_clip_low: float = option(
        0.0, "Lower bound of that ratio.", needs=(given("use_tis"), having("tis_mode", "clip", "mask"))
    )
    tis_batch_normalize: bool = option(
        False, "Scale the weights so that their mean over the global batch is 1.", needs=given("use_tis")
    )
    custom_tis_function_path: str | None = option(
        None,
        "Function that weighs the tokens in place of the options above.",
        needs=given("use_tis", "get_mismatch_metrics"),
    )
    use_rs: bool = option(False, "Reject what the two policies disagree about too much.")
    rs_level: Literal["token", "sequence", "geometric"] = option(
        "token", "Compare at a token, over the sample, or as the sample's geometric mean.", needs=given("use_rs")
    )
    rs_lower_bound: float = option(0.5, "Ratio below which --use-rs rejects.", needs=given("use_rs"))
    rs_upper_bound: float = option(2.0, "Ratio above which --use-rs rejects.", needs=given("use_rs"))
    rs_veto_threshold: float | None = option(
        None, "Reject a whole sample when one token's ratio is below this.", bounds=AT_LEAST_0, needs=given("use_rs")
    )
    use_routing_replay: bool = option(
        False, "Send tokens to the experts that the old policy's pass chose, in every step of the rollout."
    )
    use_rollout_routing_replay: bool = option(
        False, "Send tokens to the experts that the engine chose, in every pass of the policy."
    )
    use_opd: bool = option(
        False, "On-policy distillation: take the gap to a teacher's log-probabilities off the advantage."
    )
    opd_kl_coef: float = option(1.0, "Weight of that gap.", bounds=AT_LEAST_0, needs=given("use_opd"))
    opd_type: Literal["sglang", "megatron"] | None = option(
        None,
        "The kind of teacher: an SGLang endpoint, or weights in Megatron; follows from which of the two is given.",
        needs=given("use_opd"),
    )
    opd_teacher_load: str | None = option(
        None, "Megatron checkpoint of the teacher: same architecture as the policy.", needs=given("use_opd")
    )
    opd_teacher_url: str | None = option(
        None,
        "SGLang endpoint of the teacher, http://HOST:PORT/generate, or a serve-rollout's endpoint.json.",
        needs=given("use_opd"),
        resume="free",
    )
    opd_teacher_timeout: float = option(
        120.0,
        "Seconds after which one request to the teacher is tried again, or given up and counted.",
        bounds=ABOVE_0,
        needs=given("opd_teacher_url"),
        resume="free",
    )
