"""Families with layers of slime's own (linear attention, norms behind attention and feed-forward, norms over heads):
every parameter's gradient is what float64 autograd over transformers says, in every layout."""

import pytest

import layout_launch

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1600)]
TENSORS = {"Qwen3.5": 56, "Qwen3-Next": 106, "GLM-4": 55, "MiniMax-M2": 87}
LAYOUTS = [
    *((layout, family) for layout in layout_launch.OF_FAMILIES for family in TENSORS),
    *((layout, family) for layout in ("ep2", "tp2_ep2") for family in ("Qwen3-Next", "MiniMax-M2")),
]


@pytest.mark.parametrize(("layout", "family"), LAYOUTS)
def test_gradients_are_what_float64_autograd_says(layout, family):
    gaps = layout_launch.ranks(layout)[0]["families"][family]
    assert len(gaps) == TENSORS[family]
    assert max(gaps.values()) < 2e-5, max(gaps, key=gaps.__getitem__)


@pytest.mark.parametrize("layout", layout_launch.RESUMING)
def test_a_resumed_run_goes_on_bit_for_bit(layout):
    for rank in layout_launch.ranks(layout):
        assert rank["resumed"] == {family: [] for family in (*TENSORS, "mimo")}
