"""An option that nothing reads may not exist. Complete only once every stage is written."""

import pathlib
import re

from slime_cli.options import own
from slime_cli.options.not_yet import NOT_WIRED

PACKAGE = pathlib.Path(own.__file__).parents[1]
NOT_READERS = {
    *(PACKAGE / "options" / name for name in ("own.py", "render.py", "memory.py", "derive.py", "not_yet.py")),
    *(PACKAGE / "options" / "groups").glob("*.py"),
}
ONLY_FOR_OTHERS = {"num_steps_per_rollout", "eval_prompt_data", "debug_train_only"}
"""Dests that others read through options/derive.py: the global batch size that it makes, and the sets by name; and
through SlimeOptions.generates."""
SETTLED = {option.dest for option in own.OPTIONS if option.group == "launch-script"}
"""Accepted only where they ask for what is so anyway: the checks, or their choices, are all that reads them."""

WAITING = {option.dest for option in own.OPTIONS if option.flag in NOT_WIRED}
"""Refused until something reads them."""


def test_every_own_option_is_read_by_some_code():
    text = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py") if path not in NOT_READERS)
    words = set(re.findall(r"\w+", text))
    inert = sorted(
        {o.dest for o in own.OPTIONS if not o.choices or o.dest not in SETTLED} - words - ONLY_FOR_OTHERS - WAITING
    )
    assert not inert, f"read by nothing outside options/groups: {', '.join(inert)}"


def test_every_own_option_is_read_by_more_than_the_checks():
    """The stricter reading: a check alone gives an option no effect."""
    paths = [path for path in PACKAGE.rglob("*.py") if PACKAGE / "options" not in path.parents]
    words = set(re.findall(r"\w+", "\n".join(path.read_text() for path in paths)))
    inert = sorted({option.dest for option in own.OPTIONS} - words - ONLY_FOR_OTHERS - SETTLED - WAITING)
    assert not inert, f"read by nothing outside options/: {', '.join(inert)}"
