"""Multi-token prediction (MTP): what its layers learn, and that the policy learns the same without them
(``tests/training/mtp_cases.py``)."""

import pytest

import layout_launch
import rounding

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1600)]
COMPARED = ("loss", "grad_norm", "log_probs", "entropy", "mtp_loss", "mtp_1_loss", "mtp_2_loss")


@pytest.fixture(scope="module")
def alone() -> dict:
    (rank,) = layout_launch.ranks("single")
    return rank["mtp"]


@pytest.mark.parametrize("case", ["mtp", "mtp_tied"])
def test_the_policys_gradient_is_the_same_to_the_bit(alone, case):
    found = alone[case]
    assert found["policy"] == [] and found["moves"] > 20
    assert found["more"] and all(name.startswith("module.mtp.") for name in found["more"])


@pytest.mark.parametrize("case", ["mtp", "mtp_tied"])
def test_losses_and_gradients_are_what_float64_autograd_says(alone, case):
    found = alone[case]
    first = layout_launch.reported("single")[case][0]
    assert [first["mtp_1_loss"], first["mtp_2_loss"]] == [rounding.close(loss) for loss in found["losses"]]
    assert first["mtp_loss"] == rounding.close(sum(found["losses"]) / 2)
    assert len(found["gaps"]) == 32 and max(found["gaps"].values()) < 1e-5


def test_they_learn_and_the_policy_goes_on_as_without_them():
    steps = layout_launch.reported("single")
    one, two = steps["mtp"]
    assert two["mtp_1_loss"] < one["mtp_1_loss"] - 0.01 and two["mtp_2_loss"] < one["mtp_2_loss"] - 0.01
    for beside, without in zip(steps["mtp"], steps["no_mtp"], strict=True):
        assert "mtp_loss" not in without
        assert [beside[name] for name in ("loss", "grad_norm")] == [without[name] for name in ("loss", "grad_norm")]


def assert_same(got: list[dict], want: list[dict]) -> None:
    for rollout, (a, b) in enumerate(zip(got, want, strict=True)):
        for name in COMPARED:
            assert a[name] == rounding.close(b[name]), f"{name} of rollout {rollout}"


@pytest.mark.parametrize("case", ["mtp_packed_small", "mtp_recomputed"])
def test_packing_and_recomputation_do_not_change_a_step(case):
    steps = layout_launch.reported("single")
    assert_same(steps[case], steps["mtp"])


@pytest.mark.parametrize(
    ("layout", "case"),
    [
        (layout, case)
        for layout in layout_launch.LAYOUTS[1:]
        for case in layout_launch.MTP_EVERYWHERE[: 1 if layout == "tp2_cp2" else None]
    ],
)
def test_a_layout_trains_as_one_process_does(layout, case):
    assert_same(layout_launch.reported(layout)[case], layout_launch.reported("single")[case])
