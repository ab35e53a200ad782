"""The built-in reward types: pure functions of (response, label, metadata), each run in a reward worker.

``grade`` raises GraderError when a sample cannot be graded (no label, a broken verifier), which costs that sample and
is counted; a wrong answer is 0, never an error. Nothing here limits time: the worker's owner does, by killing it.
Importing this module imports no verifier library.
"""

import collections
import functools
import json
import random
import re
import string
from collections.abc import Callable
from typing import Any

from slime_cli.buffer.source_base import nearest
from slime_cli.errors import UsageError

Reward = float | dict[str, Any]
BOXED_PREFIX = "boxed_"


class GraderError(Exception):
    """This sample cannot be graded; the message says what is missing or broken."""


def need_label(label: str | None, rm_type: str) -> str:
    if label is None:
        raise GraderError(f"rm_type {rm_type!r} needs a label and the sample has none (see --label-key)")
    return str(label)


def last_boxed(text: str) -> str | None:
    r"""The inside of the last complete ``\boxed{...}`` (or ``\fbox``), braces balanced; None when there is none."""
    for match in reversed(list(re.finditer(r"\\f?boxed\s*\{", text))):
        depth = 1
        for place in range(match.end(), len(text)):
            escaped = text[place - 1] == "\\" and text[place - 2 : place] != "\\\\"
            depth += 0 if escaped else (text[place] == "{") - (text[place] == "}")
            if depth == 0:
                return text[match.end() : place].strip()
    return None


def after_thinking(text: str) -> str:
    """What follows the last ``</think>``; everything when there is none."""
    return text.rpartition("</think>")[2]


def grade_exact(response: str, label: str | None, metadata: dict[str, Any], index: int) -> float:
    return float(response.strip() == need_label(label, "exact").strip())


def f1_tokens(text: str) -> list[str]:
    """Lower-case words without punctuation and articles, as SQuAD's metric has them (Rajpurkar et al. 2016)."""
    text = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return [word for word in text.split() if word not in ("a", "an", "the")]


def grade_f1(response: str, label: str | None, metadata: dict[str, Any], index: int) -> float:
    """Harmonic mean of token precision and recall; 1 when both texts have no token left."""
    ours, truth = f1_tokens(after_thinking(response)), f1_tokens(need_label(label, "f1"))
    if not ours or not truth:
        return float(ours == truth)
    shared = sum((collections.Counter(ours) & collections.Counter(truth)).values())
    return 2.0 * shared / (len(ours) + len(truth))


def chosen_letter(response: str, letters: str) -> str | None:
    """The option chosen: a boxed letter, else the last 'answer is X', else the last letter on its own."""
    text = after_thinking(response)
    boxed = last_boxed(text)
    one = rf"\(?\[?\**([{letters}{letters.lower()}])\b\**\)?\]?"
    if boxed is not None:
        found = re.fullmatch(rf"(?:\\text\s*\{{)?\s*{one}\.?\s*\}}?", boxed)
        return found[1].upper() if found else None
    stated = re.findall(rf"(?i:answer|choice|option)\s*(?i:is|:|=)?\s*:?\s*\**\s*{one}(?![\w'])", text)
    if stated:
        return stated[-1].upper()
    alone = re.findall(rf"(?<![\w'])\(?([{letters}])\)?(?![\w'])", text)
    return alone[-1] if alone else None


def grade_gpqa(response: str, label: str | None, metadata: dict[str, Any], index: int) -> float:
    """Multiple choice. ``metadata["choices"]`` lets the label be an option's text; else it is a letter."""
    truth, choices = need_label(label, "gpqa").strip(), list(metadata.get("choices") or [])
    letters = "".join(metadata.get("valid_letters") or string.ascii_uppercase[: len(choices) or 8]).upper()
    if len(truth.strip("().")) == 1 and truth.strip("().").upper() in letters:
        right = truth.strip("().").upper()
    elif truth in choices:
        right = letters[choices.index(truth)]
    else:
        raise GraderError(f"gpqa: the label {truth!r} is neither one of {letters} nor one of metadata['choices']")
    return float(chosen_letter(response, letters) == right)


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
    for mark in ("</think>", "###Response"):
        if mark in response:
            boxed = last_boxed(response.rpartition(mark)[2])
            return 0.0 if boxed is None else grade_math(f"\\boxed{{{boxed}}}", label, metadata, index)
    return 0.0


def grade_dapo(response: str, label: str | None, metadata: dict[str, Any], index: int) -> dict[str, Any]:
    """DAPO's shape: ``{"score": 1 or -1, "acc", "pred"}`` from the last ``Answer: ...`` (for --reward-key score)."""
    found = re.findall(r"(?i:answer)\s*:\s*([^\n]+)", response[-300:])
    answer = found[-1].strip().strip("*").strip() if found else ""
    wrapped = answer if "$" in answer or "\\boxed" in answer else f"\\boxed{{{answer}}}"
    truth = need_label(label, "dapo")
    right = bool(answer) and (answer == truth.strip() or same_mathematics(wrapped, truth))
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": answer or "[INVALID]"}


def grade_random(response: str, label: str | None, metadata: dict[str, Any], index: int) -> float:
    """0 or 1, the same for the same sample index: a control for experiments and load tests."""
    return float(random.Random(index).randint(0, 1))


@functools.lru_cache(maxsize=64)
def gym_task(task: str, arguments: str) -> Any:
    """The task's scorer, configured as the source was. ``arguments`` is JSON, for the cache's sake."""
    from slime_cli.buffer.source_gym import make_task, thaw

    return make_task(task, {**thaw(json.loads(arguments)), "size": 1, "seed": 0})


def arguments_text(gym: dict[str, Any]) -> str:
    return json.dumps(gym.get("arguments") or {}, sort_keys=True)


def grade_reasoning_gym(response: str, label: str | None, metadata: dict[str, Any], index: int) -> float:
    """The task's own ``score_answer`` on the stripped response."""
    from slime_cli.buffer.source_gym import thaw

    gym = metadata.get("reasoning_gym")
    if not isinstance(gym, dict) or not {"task", "entry"} <= gym.keys():
        raise GraderError("reasoning-gym: metadata['reasoning_gym'] with 'task' and 'entry' is missing")
    try:
        task = gym_task(gym["task"], arguments_text(gym))
    except Exception as error:
        raise GraderError(f"reasoning-gym: no scorer for {gym['task']!r}: {error!r}") from error
    answer = response.strip()
    if not answer:
        return 0.0
    try:
        return float(task.score_answer(answer, thaw(gym["entry"])))
    except Exception as error:
        raise GraderError(f"reasoning-gym: {gym['task']} cannot score {answer[:80]!r}: {error!r}") from error


GRADERS: dict[str, Callable[[str, str | None, dict[str, Any], int], Reward]] = {
    "reasoning-gym": grade_reasoning_gym,
    "math": grade_math,
    "deepscaler": grade_deepscaler,
    "dapo": grade_dapo,
    "exact": grade_exact,
    "f1": grade_f1,
    "gpqa": grade_gpqa,
    "random": grade_random,
}


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
    if rm_type in ("math", "dapo", "deepscaler"):
        same_mathematics("1", "2")
    elif rm_type == "reasoning-gym":
        gym = metadata["reasoning_gym"]
        gym_task(gym["task"], arguments_text(gym))


def grade(rm_type: str, response: str, label: str | None, metadata: dict[str, Any], index: int = 0) -> Reward:
    r"""The reward of one response. ``boxed_TYPE`` grades the inside of the last ``\boxed{}``, or "" without one."""
    check_rm_type(rm_type)
    if rm_type.startswith(BOXED_PREFIX):
        rm_type, response = rm_type.removeprefix(BOXED_PREFIX), last_boxed(response) or ""
        if rm_type in ("math", "dapo", "deepscaler") and response:
            return _grade_bare(rm_type, response, label, metadata, index)
    return GRADERS[rm_type](response, label, metadata, index)


def _grade_bare(rm_type: str, inside: str, label: str | None, metadata: dict[str, Any], index: int) -> Reward:
    """Types that look for a frame of their own get the unboxed answer in that frame."""
    frame = {"math": "\\boxed{%s}", "dapo": "Answer: %s", "deepscaler": "</think>\\boxed{%s}"}[rm_type]
    return GRADERS[rm_type](frame % inside, label, metadata, index)
