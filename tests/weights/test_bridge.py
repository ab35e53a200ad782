"""HF -> Megatron -> HF on tied and untied checkpoints in several layouts, and Megatron's logits against transformers'.

The work is done by the ranks that the layout tests start (``tests/training/layout_worker.py``), once a session.
"""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "training"))

import layout_launch

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
LAYOUTS = ["single", "tp2", "pp2", "dp2_distributed"]
TENSORS = {"tied": 46, "untied": 47}


@pytest.mark.parametrize("checkpoint", ["tied", "untied"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_come_back_exactly(layout, checkpoint):
    for rank in layout_launch.ranks(layout):
        got = rank["bridge"][checkpoint]
        assert (got["missing"], got["extra"], got["exact"]) == ([], [], TENSORS[checkpoint])
        assert got["largest"] == 0


@pytest.mark.parametrize("checkpoint", ["tied", "untied"])
@pytest.mark.parametrize("layout", [*LAYOUTS, layout_launch.OTHER])
def test_logits_of_packs_are_those_of_transformers(layout, checkpoint):
    gaps = [rank["bridge"][checkpoint]["logits"] for rank in layout_launch.ranks(layout)]
    gaps = [gap for gap in gaps if gap is not None]
    assert gaps and max(gaps) < 1e-5
