"""The built-in reward types: pure functions of (response, label, metadata), each run in a reward worker.

``grade`` raises GraderError when a sample cannot be graded (no label, a broken verifier), which costs that sample and
is counted; a wrong answer is 0, never an error. What ends a turn is no part of an answer, for any type: a user's
generate function may leave it in the text. Symbolic comparisons have a time limit of their own (see
:mod:`.limits`); for everything else the worker's owner keeps the time, by killing it. Importing this package imports
no verifier library.
"""

import random
from collections.abc import Callable
from typing import Any

from slime_cli.errors import UsageError
from slime_cli.rewards.graders.answers import GraderError, last_boxed, without_end_of_turn
from slime_cli.rewards.graders.choice import grade_gpqa
from slime_cli.rewards.graders.code import grade_code, grade_code_share
from slime_cli.rewards.graders.equality import load_math_verify
from slime_cli.rewards.graders.gym import grade_reasoning_gym, task_of
from slime_cli.rewards.graders.instructions import grade_ifbench, grade_ifbench_share
from slime_cli.rewards.graders.mathematics import (
    grade_dapo,
    grade_deepscaler,
    grade_math,
    grade_math_boxes,
    grade_math_ordered,
)
from slime_cli.rewards.graders.text import grade_exact, grade_f1, grade_f1_hotpotqa
from slime_cli.text import nearest

__all__ = ["BOXED_PREFIX", "GRADERS", "WHOLE_TEXT", "GraderError", "check_rm_type", "grade", "last_boxed", "prepare"]

Reward = float | dict[str, Any]
BOXED_PREFIX = "boxed_"
FRAMES = {
    **dict.fromkeys(("math", "math_ordered", "math_boxes", "gpqa"), "\\boxed{%s}"),
    "dapo": "Answer: %s",
    "deepscaler": "</think>\\boxed{%s}",
}
"""Types that look for a frame of their own get an unboxed answer in that frame."""


def grade_random(response: str, label: str | None, metadata: dict[str, Any], index: int) -> float:
    """0 or 1, the same for the same sample index: a control for experiments and load tests."""
    return float(random.Random(index).randint(0, 1))


GRADERS: dict[str, Callable[[str, str | None, dict[str, Any], int], Reward]] = {
    "reasoning-gym": grade_reasoning_gym,
    "math": grade_math,
    "math_ordered": grade_math_ordered,
    "math_boxes": grade_math_boxes,
    "deepscaler": grade_deepscaler,
    "dapo": grade_dapo,
    "exact": grade_exact,
    "f1": grade_f1,
    "f1_hotpotqa": grade_f1_hotpotqa,
    "gpqa": grade_gpqa,
    "code": grade_code,
    "code_share": grade_code_share,
    "ifbench": grade_ifbench,
    "ifbench_share": grade_ifbench_share,
    "random": grade_random,
}

WHOLE_TEXT = ("exact", "f1", "f1_hotpotqa", "dapo", "reasoning-gym")
"""Types that judge the text to its end, where others look for a frame in it: a stop text of the user's is no part of
it."""


def check_rm_type(rm_type: str) -> None:
    """UsageError for an unknown type, naming the nearest one. ``remote_rm`` is known too (the parent asks it)."""
    if rm_type.removeprefix(BOXED_PREFIX) in (*GRADERS, "remote_rm"):
        return
    hint = nearest(rm_type.removeprefix(BOXED_PREFIX), (*GRADERS, "remote_rm"))
    raise UsageError(
        f"unknown rm_type {rm_type!r}{hint}", f"one of {', '.join(GRADERS)}, remote_rm, or boxed_ before one"
    )


def prepare(rm_type: str, response: str, label: str | None, metadata: dict[str, Any], index: int) -> None:
    """Loads what ``grade`` needs for such a sample, so that imports are not timed as grading."""
    rm_type = rm_type.removeprefix(BOXED_PREFIX)
    if rm_type.startswith(("math", "dapo", "deepscaler")):
        load_math_verify()
    elif rm_type == "reasoning-gym":
        task_of(metadata["reasoning_gym"])


def grade(rm_type: str, response: str, label: str | None, metadata: dict[str, Any], index: int = 0) -> Reward:
    r"""The reward of one response. ``boxed_TYPE`` grades the inside of the last ``\boxed{}``, or "" without one."""
    check_rm_type(rm_type)
    if rm_type.startswith(BOXED_PREFIX):
        rm_type = rm_type.removeprefix(BOXED_PREFIX)
        response = last_boxed(response) or ""
        if response:
            response = FRAMES.get(rm_type, "%s") % response
    if label is not None and response.strip() != str(label).strip():
        response = without_end_of_turn(response)
    return GRADERS[rm_type](response, label, metadata, index)
