"""What ``policy_cases.py`` found on genuine Megatron, in one process and on two data-parallel ranks."""

import math

import numpy as np
import pytest

import layout_launch

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1600)]


def found(layout: str, name: str) -> list[dict]:
    return [rank["policy"][name] for rank in layout_launch.ranks(layout)]


@pytest.mark.parametrize("layout", layout_launch.doing("frozen"))
def test_frozen_parameters_do_not_move_and_the_others_do(layout):
    for got in found(layout, "frozen"):
        assert all(moved == ("mlp.linear_fc1" in name) for name, moved in got["only"].items())
        assert all(moved != ("embedding" in name or "layernorm" in name) for name, moved in got["freeze"].items())
        assert "embeding: no parameter has such a name" in got["typo"]


@pytest.mark.parametrize("layout", layout_launch.doing("forgotten"))
def test_reset_moments_are_those_of_a_fresh_optimizer(layout):
    for got in found(layout, "forgotten"):
        assert got["reset"] == 0 and got["kept"] > 0


@pytest.mark.parametrize("layout", layout_launch.doing("offloaded"))
def test_memory_that_is_given_away_between_rollouts_comes_back_to_the_last_bit(layout):
    for got in found(layout, "offloaded"):
        assert got["differing"] == 0
        assert got["freed"]["state"] == got["held"]["gradients"] + got["held"]["optimizer"] > 0
        assert got["freed"]["weights"] == got["kept"] == got["held"]["weights"] > 0 and got["left"] == 0
        assert got["on_a_cpu"] == sum(got["held"].values())
        training, again, there = got["refused"]
        assert training.startswith("training while weights and gradients and optimizer of the trainer wait")
        assert again.startswith("offloading weights while weights") and there.startswith(
            "weights of the trainer are on"
        )


@pytest.mark.parametrize("layout", layout_launch.doing("not_finite"))
def test_a_gradient_that_is_not_finite_is_skipped_and_counted_or_ends_the_run(layout):
    for got in found(layout, "not_finite"):
        assert got["skipped"] in (1, None) and got["moved"] == 0 and got["goes_on"]
        assert got["failed"]
    assert any(got["skipped"] == 1 for got in found(layout, "not_finite"))


@pytest.mark.parametrize("layout", layout_launch.doing("hooked"))
def test_hooks_in_the_place_of_slimes_own_parts(layout):
    for got in found(layout, "hooked"):
        assert got["advantage"] == 0 and got["loss"] < 1e-6 and got["reported"] in (42, None)
        assert "does not depend on the network" in got["constant"]
        wanted = ("'advantages' of shape", "'returns' of shape", "'returns' that are not finite")
        assert all(words in said for words, said in zip(wanted, got["refused"], strict=True))


@pytest.mark.parametrize("layout", layout_launch.doing("watched"))
def test_functions_that_look_on_see_each_pass_and_masks_are_those_that_one_sets(layout: str):
    passes = [["log_prob", "ref_", 1], ["log_prob", "", 1]]
    rollouts = [[*passes, ["step", i, 0], ["step", i, 1]] for i in range(2)]
    columns = "group_indices log_probs loss_masks ref_log_probs response_lengths rewards rollout_log_probs".split()
    columns += ["sample_indices", "total_lengths", "truncated"]
    for got in found(layout, "watched"):
        assert got["looking"] == 0 and got["masked"] < 1e-6
        assert [list(one) for one in got["seen"]] == [["model", True, True, None], *rollouts[0], *rollouts[1]]
        assert [list(one) for one in got["data"]] == [["data", 0, columns]]
        assert "changed 'rewards'" in got["refused"]["tokens"]
        assert "of other lengths" in got["refused"]["short"] and "train no token" in got["refused"]["nothing"]


@pytest.mark.parametrize("layout", layout_launch.doing("taught"))
def test_a_teacher_teaches(layout):
    (metrics,) = [got["metrics"] for got in found(layout, "taught") if got["metrics"][0]]
    (single,) = [got["metrics"] for got in found("single", "taught")]
    assert metrics[1]["opd_gap_abs"] < metrics[0]["opd_gap_abs"]
    for name in ("opd_gap_abs", "opd_reverse_kl"):
        assert metrics[0][name] == pytest.approx(single[0][name], rel=1e-5, abs=1e-7)
    assert metrics[1]["loss"] == pytest.approx(single[1]["loss"], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("layout", layout_launch.doing("endpoint"))
def test_a_teachers_column_gives_the_advantages_of_the_formula(layout):
    ranks = found(layout, "endpoint")
    for got in ranks:
        assert got["worst"] < 1e-5 and got["rows"] and "have no teacher_log_probs" in got["missing"]
    batch = global_batch_mask()
    data_parallel = ranks if layout == "dp2" else ranks[:1]
    old = sum(got["old"] for got in data_parallel) / batch
    for got in ranks:
        assert got["found"]["opd_reverse_kl"] == pytest.approx(old - got["teacher"], rel=1e-6, abs=1e-7)
        assert got["found"]["opd_gap_abs"] >= abs(got["found"]["opd_reverse_kl"])
    (trained,) = [got["trained"] for got in ranks if got["trained"]]
    assert trained["opd_reverse_kl"] == ranks[0]["found"]["opd_reverse_kl"]


def global_batch_mask() -> int:
    """Trained tokens of the batch; its own module needs Megatron."""
    rng = np.random.default_rng(7)
    _ = rng.integers(1, 21, 16)
    responses = rng.integers(1, 25, 16)
    responses[[9, 15]], responses[3] = 0, 1
    mask = rng.random(responses.sum()) > 0.2
    mask[np.isin(np.repeat(np.arange(16), responses), [5, 10])] = False
    return int(mask.sum())


@pytest.mark.parametrize("layout", layout_launch.doing("old_actor"))
def test_old_log_probs_are_of_the_weights_that_generated(layout):
    ranks = found(layout, "old_actor")
    for got in ranks:
        assert got["kept"]["measured"] == [True] and got["not_kept"]["measured"] == [False]
        assert got["kept"]["moved"] == got["not_kept"]["moved"] == 0
        assert got["kept"]["gap"] < 1e-6 < 1e-3 < got["kept"]["far"] and got["not_kept"]["gap"] is True
    (reporting,) = [got for got in ranks if "first" in got["kept"]]
    for name in ("kept", "not_kept"):
        want = sum(got[name]["want"] for got in (ranks if layout == "dp2" else ranks[:1]))
        assert reporting[name]["pg_loss"] == pytest.approx(want, rel=1e-4, abs=1e-6)
    kept = reporting["kept"]
    not_kept = reporting["not_kept"]
    assert kept["ppo_kl"] != 0 and not_kept["ppo_kl"] == 0
    assert kept["second"] == pytest.approx(kept["first"], rel=1e-5) and not_kept["first"] and not_kept["second"] is None


@pytest.mark.parametrize("layout", layout_launch.doing("mixed_versions"))
@pytest.mark.parametrize("way", ["truncate", "mask", "kept", "engines"])
def test_tokens_of_several_versions_are_measured_corrected_and_compared_each_by_its_own(layout, way):
    ranks = [got[way] for got in found(layout, "mixed_versions")]
    for got in ranks:
        assert got["old"] < 1e-6 and got["weights"] < 1e-5 and got["strange"] == 0
        assert got["count"] and bool(got["off_policy"]) == (way != "kept")
        assert (got["steps_measured"] == 1) == (way != "engines") and got["steps_measured"]
    (metrics,) = [got["metrics"] for got in ranks if got["metrics"]]
    mean = sum(got["sum"] for got in ranks) / sum(got["count"] for got in ranks)
    assert metrics["train_rollout_logprob_abs_diff"] == pytest.approx(mean, rel=1e-5)
    assert metrics["train_rollout_logprob_abs_diff_max"] == pytest.approx(max(g["max"] for g in ranks), rel=1e-5)


@pytest.mark.parametrize("layout", layout_launch.doing("mixed_versions"))
def test_weights_that_are_not_kept_cannot_be_called_old(layout):
    for got in found(layout, "mixed_versions"):
        assert "keeps the weights of step 0 beside the present ones of step 2" in got["refused"]
        assert "written by others: step 1" in got["refused"] and got["present"] == ""


@pytest.mark.parametrize("layout", layout_launch.doing("current_versions"))
def test_versions_that_are_all_the_present_one_change_no_bit(layout):
    for got in found(layout, "current_versions"):
        for way, case in got.items():
            assert case["metrics_equal"] and case["differing"] == 0, way
    assert all(case["measured"] for got in found(layout, "current_versions")[:1] for case in got.values())


@pytest.mark.parametrize("layout", layout_launch.doing("user_weights"))
def test_a_users_weights_of_tokens(layout):
    ranks = found(layout, "user_weights")
    for got in ranks:
        assert got["plain-mean"] < 1e-5 and got["tis-own_tis"] < 1e-6 and got["plain-measured"] == 0
        assert got["plain-tis"] > 1e-4 and got["plain-thousandth"] > 1e-4
    (got,) = [rank for rank in ranks if rank["plain"]]
    assert got["mean"]["pg_loss"] == pytest.approx(got["plain"]["pg_loss"], rel=1e-4, abs=1e-6)
    assert (
        got["own_tis"]["mine"] == pytest.approx(got["tis"]["mismatch_ratio"], rel=1e-5) and got["measured"]["mine"] > 0
    )
    first = got["per_token"]
    assert first["thousandth"]["pg_loss"] == pytest.approx(first["plain"]["pg_loss"] / 1000, rel=0.05, abs=1e-6)


@pytest.mark.parametrize("layout", layout_launch.doing("nucleus"))
def test_log_probs_among_what_sampling_left(layout):
    ranks = found(layout, "nucleus")
    for got in ranks:
        assert got["worst"] < 1e-5 and got["count"] and "have no rollout_top_p_token_ids" in got["missing"]
    (got,) = [rank for rank in ranks if rank["cut"]]
    assert got["cut"]["entropy"] == pytest.approx(got["whole"]["entropy"], rel=1e-5), (
        "of the whole distribution in both"
    )
    assert got["cut"]["log_probs"] > got["whole"]["log_probs"] + 1 and math.isfinite(got["cut"]["grad_norm"])


@pytest.mark.parametrize("layout", layout_launch.doing("critic"))
def test_the_critic_trains_alone_first_and_resumes_to_the_last_bit(layout):
    for got in found(layout, "critic"):
        assert got["policy_moved"] == 0 and got["critic_moved"] > 0
        assert got["step"] == 2 and got["metrics_equal"] and got["differing"] == 0
    (names,) = [got["first"] for got in found(layout, "critic") if got["first"]]
    assert "value_loss" in names and "pg_loss" not in names


def test_what_is_left_out_changes_no_gradient_however_far_out_it_is():
    """By the clip, dual clip, an advantage of 0, rejection, OPSM, a coefficient of 0, or the mask of a user's own
    loss."""
    (got,) = found("single", "far_out")
    assert len(got) == 7 * 3 + 2
    for name, case in got.items():
        assert case["differing"] == 0 and case["some"] > 0, name


def test_samples_without_a_column_that_is_needed_are_named():
    (said,) = found("single", "missing")
    assert said == {
        name: f"the samples have no {column}, which the options need"
        for name, column in (
            ("use_rollout_logprobs", "rollout_log_probs"),
            ("use_tis", "rollout_log_probs"),
            ("use_top_p_replay", "rollout_top_p_token_ids"),
            ("use_rollout_routing_replay", "rollout_routed_experts"),
        )
    }
