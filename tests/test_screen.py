"""A progress line fits a terminal of 80 columns: the time and what the rollout came to are whole."""

import io

import pytest
from rich.console import Console

from slime_cli.screen import Screen, note

LINE = {
    "reward_mean": 0.1234,
    "dropped": {"filter_rejected": 3},
    "train/grad_norm": 1.23,
    "train/train_rollout_logprob_abs_diff_max": 1.2e-6,
}


@pytest.mark.parametrize("width", [80, 120])
def test_a_line_fits_the_terminal(width: int):
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None, highlight=False)
    with Screen(console).progress("grpo", 32) as advance:
        advance(12, note(LINE))
    last = [line for line in console.file.getvalue().splitlines() if "12/32" in line][-1]
    assert "0:00:0" in last and "…" not in last and note(LINE) in last
