"""docs/options.md says what the declarations say."""

from bench.options_page import PAGE, page
from slime_cli.options import own
from slime_cli.options.not_yet import NOT_WIRED


def test_the_page_is_what_its_command_writes():
    assert PAGE.read_text() == page(), "make options writes it again"


def test_it_has_a_row_for_every_option_that_may_be_given():
    rows = [line for line in page().splitlines() if line.startswith("| `--")]
    assert len(rows) == len(own.OPTIONS) - len(NOT_WIRED)


def test_a_row_has_all_that_is_declared():
    assert "| `--kl-loss-coef X` | `0.0` | at least 0 | `--use-kl-loss` |  | Weight of that divergence. |" in page()
    row = "| `--num-rollout N` | - | at least 0 |  | free | Rollout steps to run; 0 evaluates and trains nothing. |"
    assert row in page()
