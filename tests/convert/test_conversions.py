"""Families with experts and with latent attention, there and back in some layouts; `make conversions` runs every family
in all."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
CASES = {
    "Qwen3-MoE": ("tp2 ep2", "pp2"),
    "DeepSeek-V3": ("tp2", "ep2"),
    "Moonlight": ("single",),
    "MiMo": ("pp2",),
    "GLM-4.5": ("tp2 ep2",),
    "GLM-4": ("tp2",),
    "MiniMax-M2": ("tp2 ep2",),
    "Qwen3-Next": ("pp2",),
    "Qwen3.5-MoE, with vision": ("tp2 ep2",),
}
RUN = """
import json, sys
from bench import conversions
found = [line for family, layouts in json.loads(sys.argv[1]).items() for line in conversions.cases([family], layouts)]
open(sys.argv[2], "w").write(json.dumps(found))
"""


@pytest.fixture(scope="module")
def lines(tmp_path_factory) -> list[dict]:
    """In a process of its own: it forks, and this one may hold threads."""
    out = tmp_path_factory.mktemp("conversions") / "lines.json"
    command = [sys.executable, "-c", RUN, json.dumps(CASES), str(out)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=500, env=os.environ | {"PYTHONWARNINGS": "ignore"}
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text())


@pytest.mark.parametrize(
    ("family", "layout"), [(family, layout) for family, layouts in CASES.items() for layout in layouts]
)
def test_weights_come_back_exactly_and_logits_agree(lines, family, layout):
    (line,) = [line for line in lines if (line["family"], line["layout"]) == (family, layout)]
    assert line["why_not"] is None and line["exact"]
    assert line["logits_max_diff"] < 2e-5 and line["gradient_max_relative_diff"] < 5e-5
