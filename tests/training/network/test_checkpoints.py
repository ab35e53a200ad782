"""Checkpoints on genuine Megatron beyond a plain resume (``test_layouts.py``): other layouts, asynchronous, without
moments."""

import pytest

import layout_launch
import rounding

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1600)]


def found(layout: str, name: str) -> list[dict]:
    return [rank["checkpoints"][name] for rank in layout_launch.ranks(layout)]


def after_the_layouts(name: str) -> dict:
    (rank,) = layout_launch.ranks("single:reshard")
    return rank[name]


@pytest.mark.parametrize("layout", ["single", "tp2", "pp2", "dp2_distributed"])
def test_one_process_goes_on_where_another_layout_saved(layout):
    got = after_the_layouts("reshard")[layout]
    assert got["iteration"] == 2 and got["weights_gap"] <= rounding.bound()
    for ours, theirs in zip(got["metrics"], got["their_metrics"], strict=True):
        assert ours == rounding.close(theirs)


def test_the_uninterrupted_single_process_does_the_same():
    (single,) = [rank["saved"]["metrics"] for rank in layout_launch.ranks("single")]
    for got in after_the_layouts("reshard").values():
        for ours, theirs in zip(got["metrics"], single, strict=True):
            assert ours == rounding.close(theirs)


@pytest.mark.parametrize("layout", ["single", "dp2"])
def test_an_async_checkpoint_holds_its_own_step_and_is_complete_only_when_written(layout):
    for got in found(layout, "async"):
        assert got["polls"] == [False, True]
        assert (
            "never written to its end" in got["damage"][0]
            and got["damage"][1] == got["damage"][0]
            and got["damage"][2] == ""
        )
        assert got["step"] == 2 and got["differing_at_two"] == 0
        assert got["metrics_equal"] and got["differing_at_four"] == 0


def test_activations_are_recomputed_in_fact():
    """That they come out the same is in ``test_layouts.py``."""
    (got,) = found("single", "recomputed")
    assert got["full"] == {part: calls + 1 for part, calls in got["plain"].items()}
    assert got["selective"] == {"layer": got["plain"]["layer"], "core_attention": got["plain"]["core_attention"] + 1}


def test_what_cannot_be_gone_on_from_is_refused_with_the_way_out():
    said = after_the_layouts("refusals")
    assert (
        "DataError" in said["no_save_optim"]
        and "--no-save-optim" in said["no_save_optim"]
        and "--load" in said["no_save_optim"]
    )
    assert said["no_save_optim_weights_differing"] == 0
    assert "was distributed and this run is without --use-distributed-optimizer" in said["distributed"]
    assert "has 100 bytes of" in said["cut"]
    assert "saved in tensor x pipeline 2 x 1, this run has 1 x 1" in said["layout"]
    assert "saved with transformer_engine layers, this run has local" in said["layers"] and not said["any layers"]
    assert "UsageError: --optimizer-cpu-offload" in said["offload"]


@pytest.mark.parametrize("layout", ["dp2", "dp2_distributed"])
def test_adam_without_moments_is_the_same_in_every_layout(layout):
    (single,) = found("single", "stateless")
    (got,) = [rank for rank in found(layout, "stateless") if rank["metrics"][0]]
    for ours, theirs in zip(got["metrics"], single["metrics"], strict=True):
        assert ours == rounding.close(theirs)


@pytest.mark.parametrize("layout", ["single", "dp2", "dp2_distributed"])
def test_adam_without_moments_holds_no_more_than_a_number_a_parameter_and_resumes_to_the_last_bit(layout):
    for got in found(layout, "stateless"):
        assert got["held"] <= got["tensors"]
        assert got["metrics_equal"] and got["differing"] == 0


def test_adam_without_moments_goes_on_in_another_data_parallel_size():
    (theirs,) = [rank["metrics"][-1] for rank in found("dp2_distributed", "stateless") if rank["metrics"][-1]]
    assert after_the_layouts("resharded_stateless")["metrics"] == rounding.close(theirs)
