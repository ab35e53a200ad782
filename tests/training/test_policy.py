"""What ``policy_cases.py`` found on genuine Megatron, in one process and on two data-parallel ranks."""

import layout_launch
import pytest

pytestmark = pytest.mark.timeout(1600)
LAYOUTS = ["single", "dp2", "tp2"]


def found(layout: str, name: str) -> list[dict]:
    return [rank["policy"][name] for rank in layout_launch.ranks(layout)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_frozen_parameters_do_not_move_and_the_others_do(layout):
    for got in found(layout, "frozen"):
        assert all(moved == ("mlp.linear_fc1" in name) for name, moved in got["only"].items())
        assert all(moved != ("embedding" in name or "layernorm" in name) for name, moved in got["freeze"].items())
        assert "embeding: no parameter has such a name" in got["typo"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_reset_moments_are_those_of_a_fresh_optimizer(layout):
    for got in found(layout, "forgotten"):
        assert got["reset"] == 0 and got["kept"] > 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gradient_that_is_not_finite_is_skipped_and_counted_or_ends_the_run(layout):
    for got in found(layout, "not_finite"):
        assert got["skipped"] in (1, None) and got["moved"] == 0 and got["goes_on"]
        assert got["failed"]
    assert any(got["skipped"] == 1 for got in found(layout, "not_finite"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_hooks_in_the_place_of_slimes_own_parts(layout):
    for got in found(layout, "hooked"):
        assert got["advantage"] == 0 and got["loss"] < 1e-6 and got["reported"] in (42, None)
        assert "does not depend on the network" in got["constant"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_teacher_teaches(layout):
    (metrics,) = [got["metrics"] for got in found(layout, "taught") if got["metrics"][0]]
    (single,) = [got["metrics"] for got in found("single", "taught")]
    assert metrics[1]["opd_gap_abs"] < metrics[0]["opd_gap_abs"]
    for name in ("opd_gap_abs", "opd_reverse_kl"):
        assert metrics[0][name] == pytest.approx(single[0][name], rel=1e-5, abs=1e-7)
    assert metrics[1]["loss"] == pytest.approx(single[1]["loss"], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_critic_trains_alone_first_and_resumes_to_the_last_bit(layout):
    for got in found(layout, "critic"):
        assert got["policy_moved"] == 0 and got["critic_moved"] > 0
        assert got["step"] == 2 and got["metrics_equal"] and got["differing"] == 0
    (names,) = [got["first"] for got in found(layout, "critic") if got["first"]]
    assert "value_loss" in names and "pg_loss" not in names
