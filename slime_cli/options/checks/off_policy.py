"""Checks of options that make samples and policy differ, or bring another policy in: older weights, cut sampling, a
teacher."""

from collections.abc import Iterator

from slime_cli.options import own
from slime_cli.options.checks.common import Problem, no_effect
from slime_cli.options.resolve import Resolved


def off_policy(r: Resolved) -> Iterator[Problem | str]:
    s = r.slime
    if s.loss_type == "sft_loss":
        return
    for name in ("use_tis", "use_rs"):
        if getattr(s, name) and s.use_rollout_logprobs:
            yield (
                f"{own.flag(name)} with --use-rollout-logprobs: the old policy is the engine's, so their ratio is 1",
                "keep one of the two",
            )
    if s.get_mismatch_metrics and s.use_rollout_logprobs:
        yield (
            (
                "--get-mismatch-metrics with --use-rollout-logprobs: the old policy is the engine's, so there is no"
                " mismatch to see"
            ),
            "keep one of the two",
        )
    if s.loss_type == "custom_loss" and s.use_top_p_replay:
        yield (
            "--use-top-p-replay with --loss-type custom_loss: such a loss gets logits of the whole distribution",
            "keep one of the two",
        )
    for prefix, low, high in (("tis", "tis_clip_low", "tis_clip"), ("rs", "rs_lower_bound", "rs_upper_bound")):
        if getattr(s, f"use_{prefix}") and not 0 <= getattr(s, low) <= getattr(s, high):
            yield (
                f"{own.flag(low)} {getattr(s, low)} and {own.flag(high)} {getattr(s, high)}",
                "ratios need 0 <= lower <= upper",
            )
    yield from _routing(r)
    if s.use_opd:
        yield from teacher(r)
    yield from interval(r)


def _routing(r: Resolved) -> Iterator[Problem | str]:
    s = r.slime
    if s.use_routing_replay and s.use_rollout_routing_replay:
        yield (
            "--use-routing-replay and --use-rollout-routing-replay exclude each other",
            "follow the old policy's pass or the engine",
        )
    if s.use_routing_replay and s.use_rollout_logprobs:
        yield (
            "--use-routing-replay with --use-rollout-logprobs: no pass of the old policy chooses experts",
            "use --use-rollout-routing-replay",
        )
    if s.use_routing_replay and s.num_steps_per_rollout == 1 and not s.keep_old_actor:
        yield "--use-routing-replay with one step a rollout: the policy has not moved since the pass that it replays"
    if r.megatron.get("moe_router_fusion") and (s.use_routing_replay or s.use_rollout_routing_replay):
        yield "--moe-router-fusion leaves out the replay of experts", "leave it out"


def interval(r: Resolved) -> Iterator[Problem | str]:
    s = r.slime
    mixing = _mixing(r)
    if s.keep_old_actor and s.use_rollout_logprobs:
        yield no_effect(["--keep-old-actor"], "with --use-rollout-logprobs, which takes the engine's own numbers")
    elif s.keep_old_actor and mixing:
        yield (
            f"--keep-old-actor with {mixing[0]}: it keeps the weights of one version, and a batch may hold tokens of"
            " others",
            "use --use-rollout-logprobs or --use-tis, which weigh each token by what generated it",
        )
    elif s.keep_old_actor and s.update_weights_interval == 1:
        why = "with --update-weights-interval 1: each rollout begins with the engines' weights"
        yield no_effect(["--keep-old-actor"], why)
    yield from _uncorrected(r, mixing)


def _mixing(r: Resolved) -> list[str]:
    """Options by which a batch may hold tokens of weights that neither trainer nor engines have any more."""
    s = r.slime
    surplus = s.over_sampling_batch_size is not None and s.over_sampling_batch_size > s.rollout_batch_size
    ways = {
        f"--schedule {s.schedule}": s.schedule != "sync",
        "--partial-rollout": s.partial_rollout,
        f"--over-sampling-batch-size {s.over_sampling_batch_size}": surplus,
    }
    return [way for way, taken in ways.items() if taken]


def _uncorrected(r: Resolved, mixing: list[str]) -> Iterator[str]:
    """A warning where the loss takes other weights' samples for the policy's own."""
    s = r.slime
    late = s.update_weights_interval > 1
    masked = s.mask_offpolicy_in_partial_rollout and s.schedule == "sync" and not late
    older = [way for way in mixing if not way.startswith("--over-sampling")]
    if late:
        older = [f"--update-weights-interval {s.update_weights_interval}", *older]
    if not older or masked or s.keep_old_actor or s.use_rollout_logprobs or s.use_tis or s.use_rs:
        return
    remedies = ["--use-rollout-logprobs", "--use-tis"]
    if not mixing:
        remedies.insert(0, "--keep-old-actor")
    yield (
        f"{older[0]}: the loss takes samples of older weights for the policy's own; {', '.join(remedies[:-1])} or"
        f" {remedies[-1]} weigh them by what generated them"
    )


_TEACHERS = {"sglang": "opd_teacher_url", "megatron": "opd_teacher_load"}
"""``--opd-type`` -> where such a teacher is found."""


def teacher(r: Resolved) -> Iterator[Problem | str]:
    s = r.slime
    if r.origins["slime.opd_teacher_url"] == "derived":
        yield "--rm-url is taken for the teacher's address, as in slime's scripts; --opd-teacher-url is its own option"
    kind = s.opd_type
    given = [dest for dest in _TEACHERS.values() if getattr(s, dest)]
    if not given:
        yield (
            "--use-opd needs --opd-teacher-load or --opd-teacher-url",
            "give the teacher's Megatron checkpoint (slime convert hf-to-dist makes one) or its SGLang endpoint",
        )
    elif kind is None:
        yield "--opd-teacher-load and --opd-teacher-url are two teachers", "keep one"
    elif given != [_TEACHERS[kind]]:
        others = [own.flag(dest) for dest in given if dest != _TEACHERS[kind]]
        yield (
            f"--opd-type {kind} takes {own.flag(_TEACHERS[kind])}, not {', '.join(others)}",
            "give the one that it takes, alone",
        )
    if kind == "sglang" and s.rollout_temperature != 1:
        yield (
            (
                f"--opd-type sglang with --rollout-temperature {s.rollout_temperature}: SGLang's log-probabilities"
                " of a prompt are at temperature 1, and would not compare with the student's"
            ),
            "sample at temperature 1, or take the teacher's weights with --opd-teacher-load",
        )


REPLAYED = 1024
"""Most tokens that ``--use-top-p-replay`` keeps at a position: each is a number and an id in the engine's answer."""


def cut(r: Resolved) -> Iterator[Problem | str]:
    s = r.slime
    if not s.use_top_p_replay:
        yield (
            "--rollout-top-p or --rollout-top-k cuts what is sampled from, while engine and trainer both take"
            " log-probabilities of the whole distribution: none of them is the probability that a token was sampled"
            " with; --use-top-p-replay takes that"
        )
    elif not 0 < s.rollout_top_k <= REPLAYED:
        yield (
            (
                f"--use-top-p-replay with --rollout-top-k {s.rollout_top_k}: it bounds the tokens that an engine"
                " reports at a position"
            ),
            f"give one between 1 and {REPLAYED}",
        )
    elif s.opd_type == "sglang":
        yield (
            "--use-top-p-replay with --opd-type sglang: the teacher's log-probabilities are of the whole distribution",
            "keep one of the two",
        )


TRAIN = (off_policy,)
