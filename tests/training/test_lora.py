"""LoRA adapters beside Megatron's local layers, in one process and in layouts.

1. The adapters alone are trained, and the optimizer has nothing else; a kept reference is one of adapters.
2. Gradients of A and B are those of float64 autograd, and the same in every layout.
3. Merged weights compute what the model with its adapters does, and every layout comes to the same ones; so does the
   probe that engines are compared with.
4. A checkpoint has nothing but adapters, and loads in another layout; a resume from it is as if nothing had happened.

The work is done by the ranks that the layout tests start (``layout_worker.py``), once a session.
"""

import pytest

import layout_launch

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
LAYOUTS = layout_launch.OF_LORA
WHOLE = [layout for layout in LAYOUTS if layout != "dp2_distributed"]


def of(layout: str, part: str) -> list[dict]:
    return [rank["lora"][part] for rank in layout_launch.ranks(layout)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_adapters_alone_are_trained(layout):
    for found in of(layout, "trained"):
        assert found["base_moved"] == []
        assert found["adapters"] == found["adapters_moved"] > 0
        if layout == "dp2_distributed":  # its ranks share the optimizer
            assert 0 < found["optimized"] < found["of_adapters"]
        else:
            assert found["optimized"] == found["of_adapters"]


@pytest.mark.parametrize("layout", WHOLE)
def test_gradients_of_both_matrices(layout):
    for found in of(layout, "gradients"):
        assert found["lora_A"] < 1e-5
        assert found["lora_B"] < 1e-5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_merged_weights_compute_what_adapters_do_and_are_those_of_one_process(layout):
    gaps = [found["logits"] for found in of(layout, "steps") if found["logits"] is not None]
    assert gaps and max(gaps) < 1e-5
    assert max(found["merged"] for found in of(layout, "steps")) < 1e-5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_ranks_have_all_of_a_probe_which_is_what_the_merged_weights_compute(layout):
    found = of(layout, "steps")
    assert sorted({place for rank in found for place in rank["probed"]}) == list(range(1, 48))
    assert max(rank["probe"] for rank in found) < 1e-5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_is_that_of_one_process(layout):
    (single,) = of("single", "steps")
    metrics = next(found["metrics"] for found in of(layout, "steps") if found["metrics"][0] is not None)
    for ours, theirs in zip(metrics, single["metrics"], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_has_adapters_alone_and_resumes_as_if_nothing_had_happened(layout):
    for found in of(layout, "resumed"):
        assert found["others"] == []
        assert found["kept"] == [True]
        assert found["elsewhere"] == 0
        assert found["differing_at_two"] == found["differing_at_four"] == 0
        assert found["metrics_equal"]
