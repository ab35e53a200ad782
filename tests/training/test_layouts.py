"""A step is the same in every layout and packing, and is what float64 autograd over transformers says it is.

One fixed batch (``layout_cases.py``) trained by genuine Megatron on the CPU; fp32 throughout.
"""

import pytest

import layout_launch
import rounding
from slime_cli.options.estimators import ESTIMATORS

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1600)]

COMPARED = (
    "loss",
    "pg_loss",
    "kl_loss",
    "entropy",
    "log_probs",
    "ppo_kl",
    "train_rollout_logprob_abs_diff",
    "grad_norm",
    "lr",
    "tokens",
    "steps",
    "opsm_clipfrac",
    "pg_clipfrac",
    "reward_kl",
    "tis",
    "rs_rejected",
    "mismatch_ess",
    "value_loss",
    "values",
    "returns",
    "value_clipfrac",
    "critic_grad_norm",
)
EVERYWHERE = [
    "grpo",
    "grpo_packed_small",
    "grpo_per_token",
    "grpo_untied",
    "grpo_two_steps_a_rollout",
    "grpo_recomputed",
    "sft",
    "grpo_fanned_out_balanced",
    *ESTIMATORS[1:],
]
ALSO_DP2 = [
    "grpo_static",
    "grpo_chunks_of_a_row",
    "grpo_oversize_isolated",
    "grpo_per_token_packed_small",
    "grpo_rollout_log_probs",
    "grpo_rollout_log_probs_nan_where_masked",
    "sft_packed_small",
    "sft_fanned_out",
    *(f"{e}_packed_small" for e in ESTIMATORS[1:]),
    "grpo_fanned_out",
    "grpo_fanned_out_two_steps",
    "grpo_fanned_out_two_steps_balanced",
]
REPLAYED = ["moe_replay", "latent_rollout_replay"]
LAYOUT_CASES = [
    (layout, case)
    for layout in layout_launch.LAYOUTS[1:]
    for case in (layout_launch.OVER_FOUR if layout == "tp2_cp2" else EVERYWHERE)
]
LAYOUT_CASES += [("dp2", case) for case in ALSO_DP2]
LAYOUT_CASES += [(layout, case) for layout in layout_launch.LAYOUTS[1:] for case in layout_launch.IN_DENSE_LAYOUTS]
LAYOUT_CASES += [(layout, case) for layout in layout_launch.OF_EXPERTS for case in layout_launch.IN_LAYOUTS_OF_EXPERTS]


def assert_same(got: list[dict], want: list[dict]) -> None:
    assert len(got) == len(want) == 2
    for rollout, (a, b) in enumerate(zip(got, want)):
        for name in COMPARED:
            assert (name in a) == (name in b)
            if name in a:
                assert a[name] == rounding.close(b[name]), f"{name} of rollout {rollout}"


@pytest.mark.parametrize(
    "job, case",
    [
        *(
            ("single", case)
            for case in (
                "grpo",
                "grpo_per_token",
                "grpo_untied",
                "grpo_rollout_log_probs",
                "sft",
                "sft_fanned_out",
                "grpo_fanned_out_balanced",
                "grpo_shared_prompts",
            )
        ),
        *((layout_launch.OTHER, case) for case in ("grpo", "grpo_per_token", "sft")),
    ],
)
def test_the_first_step_is_what_float64_autograd_says(job, case):
    (reference,) = layout_launch.ranks("make")
    got = layout_launch.reported(job)[case][0]
    for name, want in reference[case].items():
        assert got[name] == rounding.close(want), name


@pytest.mark.parametrize("case", layout_launch.IN_OTHER)
def test_another_instruction_set_and_thread_count_train_alike(case):
    (other,) = layout_launch.ranks(layout_launch.OTHER)
    assert other["instructions"] == "DEFAULT" and other["threads"] == 2
    assert_same(other["steps"][case], layout_launch.reported("single")[case])


def test_one_rounding_in_every_weight_stays_within_the_bound():
    """Else rounding alone, on some processor, could break what the other tests compare, and no bound of theirs would be
    right."""
    (single,) = layout_launch.ranks("single")
    for got, want in zip(single["rounded"][2:], single["saved"]["metrics"], strict=True):
        assert got == rounding.close(want)
    assert single["rounded"][2:] != single["saved"]["metrics"]


@pytest.mark.parametrize("layout, case", LAYOUT_CASES)
def test_a_layout_trains_as_one_process_does(layout, case):
    assert_same(layout_launch.reported(layout)[case], layout_launch.reported("single")[case])


@pytest.mark.parametrize(
    "case, other",
    [
        ("grpo_packed_small", "grpo"),
        ("grpo_shared_prompts_packed_small", "grpo_shared_prompts"),
        ("grpo_static", "grpo"),
        ("grpo_chunks_of_a_row", "grpo"),
        ("grpo_oversize_isolated", "grpo"),
        ("grpo_per_token_packed_small", "grpo_per_token"),
        ("sft_packed_small", "sft"),
        ("grpo_fanned_out_balanced", "grpo_fanned_out"),
        ("grpo_fanned_out_two_steps_balanced", "grpo_fanned_out_two_steps"),
        *((f"{estimator}_packed_small", estimator) for estimator in ESTIMATORS[1:]),
        *((f"{case}_recomputed", case) for case in REPLAYED),
    ],
)
def test_packing_and_recomputation_do_not_change_a_step(case, other):
    steps = layout_launch.reported("single")
    assert_same(steps[case], steps[other])


def test_tokens_go_to_the_experts_that_the_engine_chose():
    (rank,) = layout_launch.ranks("single")
    assert (
        rank["replay"]["told_the_same"] < 1e-6
        and rank["replay"]["biases"] == 3
        and rank["replay"]["told_another"] > 0.1
    )


@pytest.mark.parametrize("layout", [*layout_launch.LAYOUTS, *layout_launch.OF_EXPERTS])
def test_load_balancing_weighs_the_same_whether_samples_or_tokens_are_averaged(layout):
    """Data-parallel ranks and micro-batches weigh alike in one way and by their tokens in the other; padding counts in
    the other alone. Where the batch is in two parts, so it is in the one process that they are compared with."""
    (alone,) = layout_launch.ranks("single")
    in_two = layout.startswith(("dp2", "ep2", "pp2_ep2", "vpp2"))
    want = alone["balance"]["in_two" if in_two else "by_sample"]
    assert abs(alone["balance"]["in_two"] / alone["balance"]["by_sample"] - 1) > 0.05, "how it is split matters"
    for rank in layout_launch.ranks(layout):
        if rank["balance"]["by_sample"] is not None:
            assert rank["balance"]["by_sample"] == pytest.approx(want, rel=1e-6 if in_two else 2e-3)
            assert rank["balance"]["by_token"] == pytest.approx(want, rel=0.02)


@pytest.mark.parametrize(
    "layout, case",
    [(layout, "grpo_recomputed") for layout in layout_launch.LAYOUTS] + [("single", "grpo_recomputed_selectively")],
)
def test_recomputed_activations_change_nothing(layout, case):
    steps = layout_launch.reported(layout)
    for got, want in zip(steps[case], steps["grpo"], strict=True):
        assert got == rounding.close(want)


@pytest.mark.parametrize("layout", ["single", "dp2"])
def test_nan_and_inf_where_masked_change_nothing(layout):
    steps = layout_launch.reported(layout)
    assert steps["grpo_rollout_log_probs_nan_where_masked"] == steps["grpo_rollout_log_probs"]
    assert steps["reinforce_plus_plus_baseline_nan_where_masked"] == steps["reinforce_plus_plus_baseline"]


def test_the_cases_are_not_trivial():
    """Weights move, the reference differs, the clip acts: equal numbers above mean something."""
    steps = layout_launch.reported("single")
    first, second = steps["grpo"]
    assert first["kl_loss"] > 0.01 and abs(second["log_probs"] - first["log_probs"]) > 1e-3
    assert steps["grpo_two_steps_a_rollout"][0]["pg_clipfrac"] > 0
    assert abs(steps["grpo"][0]["grad_norm"] - steps["grpo_per_token"][0]["grad_norm"]) > 1e-3
    assert abs(steps["grpo_untied"][0]["grad_norm"] - steps["grpo_fanned_out"][0]["grad_norm"]) > 1e-3


@pytest.mark.parametrize("layout", layout_launch.SAVING)
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(layout):
    for rank in layout_launch.ranks(f"{layout}:resume"):
        got = rank["resume"]
        assert got["complete"] == [2] and got["iteration"] == 2
        assert got["differing_at_two"] == 0
        assert got["metrics_equal"] and got["differing_at_four"] == 0


@pytest.mark.parametrize("layout", layout_launch.SAVING)
def test_a_teacher_from_a_checkpoint_leaves_the_policy_alone(layout):
    for rank in layout_launch.ranks(f"{layout}:resume"):
        got = rank["resume"]
        assert (
            got["differing_beside_a_teacher"] == 0
            and got["differing_teacher"] == 0
            and got["first_step_beside_a_teacher_equal"]
        )


@pytest.mark.parametrize("layout", layout_launch.SAVING)
def test_loading_weights_only_starts_a_fresh_optimizer(layout):
    for rank in layout_launch.ranks(f"{layout}:resume"):
        got = rank["resume"]
        assert got["weights_only_differing"] == 0
        assert got["weights_only_first_step_equal"] and got["weights_only_is_not_a_resume"]
