"""``math``, ``deepscaler`` and ``dapo``: answers compared as mathematics by math-verify."""

import functools
import re
from typing import Any

from slime_cli.rollout.graders.answers import GraderError, after_thinking, last_boxed, need_label, without_end_of_turn


@functools.lru_cache(maxsize=4096)
def parsed_label(label: str) -> tuple[Any, ...]:
    import math_verify

    text = label if "$" in label or "\\boxed" in label else f"\\boxed{{{label}}}"
    return tuple(math_verify.parse(text, parsing_timeout=None) or math_verify.parse(label, parsing_timeout=None))


def same_mathematics(answer: str, label: str) -> bool:
    """Whether math-verify finds the last expression of ``answer`` equal to the label.

    Its own timeouts (signal.alarm) are off: they work in a main thread only, and turn "too slow" into "wrong".
    """
    if answer.strip() == label.strip():
        return True
    import math_verify

    silence_math_verify()
    truth = parsed_label(label)
    if not truth:
        raise GraderError(f"math: the label {label[:80]!r} holds no expression that math-verify can parse")
    return math_verify.verify(list(truth), math_verify.parse(answer, parsing_timeout=None), timeout_seconds=None)


def load_math_verify() -> None:
    same_mathematics("1", "2")


@functools.cache
def silence_math_verify() -> None:
    """It warns once a call that its timeouts are off; here the worker's owner keeps the time."""
    import logging

    for name in ("math_verify.parser", "math_verify.grader", "math_verify.utils"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def grade_math(response: str, label: str | None, metadata: dict[str, Any], index: int) -> float:
    r"""1 when the last ``\boxed{}``, or without one the last expression, equals the label mathematically."""
    truth, text = need_label(label, "math"), after_thinking(response)
    boxed = last_boxed(text)
    return float(same_mathematics(text if boxed is None else f"\\boxed{{{boxed}}}", truth) or boxed == truth.strip())


def grade_deepscaler(response: str, label: str | None, metadata: dict[str, Any], index: int) -> float:
    r"""Like ``math``, but only for a response that closed its thinking and boxed the answer after it."""
    need_label(label, "deepscaler")
    for mark in ("</think>", "###Response"):
        if mark in response:
            boxed = last_boxed(response.rpartition(mark)[2])
            return 0.0 if boxed is None else grade_math(f"\\boxed{{{boxed}}}", label, metadata, index)
    return 0.0


def grade_dapo(response: str, label: str | None, metadata: dict[str, Any], index: int) -> dict[str, Any]:
    """DAPO's shape: ``{"score": 1 or -1, "acc", "pred"}`` from the last ``Answer: ...`` (for --reward-key score)."""
    found = re.findall(r"(?i:answer)\s*:\s*([^\n]+)", without_end_of_turn(response)[-300:])
    answer = found[-1].strip().strip("*").strip() if found else ""
    wrapped = answer if "$" in answer or "\\boxed" in answer else f"\\boxed{{{answer}}}"
    truth = need_label(label, "dapo")
    right = bool(answer) and (answer == truth.strip() or same_mathematics(wrapped, truth))
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": answer or "[INVALID]"}
