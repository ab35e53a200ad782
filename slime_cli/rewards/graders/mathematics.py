r"""``math``, ``deepscaler`` and ``dapo``: answers compared as mathematics.

An answer and a label take the same way: the text that counts is chosen here, brought into one notation
(:mod:`.notation`), cut into parts (:mod:`.parts`) and compared (:mod:`.equality`). docs/rewards.md names the
conventions.
"""

import re
from typing import Any

from slime_cli.rewards.graders.answers import (
    GraderError,
    after_thinking,
    all_boxed,
    last_boxed,
    need_label,
    without_end_of_turn,
)
from slime_cli.rewards.graders.equality import LONGEST, WORD, Lists, as_sets, in_order, same_answer, say_once, words_of
from slime_cli.rewards.graders.limits import OverTime, within
from slime_cli.rewards.graders.notation import tidy
from slime_cli.rewards.graders.parts import NEGATIONS, readings

SECONDS = 1.5
"""CPU time for one verdict; see :mod:`.limits`."""
STATED = re.compile(r"\banswer\b[*_\s]{0,4}(?:is\b|[:=])[*_ \t]*:?", re.IGNORECASE)
DAPO_ANSWER = re.compile(r"answer\b[*_\s]{0,4}:", re.IGNORECASE)
SENTENCE_END = re.compile(r"\.(?=\s|\Z)|\n")
EXPRESSION = re.compile(
    r"\$\$?(?P<dollars>[^$]{1,500})\$|\\\((?P<round>[^$]{1,500}?)\\\)|\\\[(?P<square>[^$]{1,500}?)\\\]|"
    r"(?P<number>[-–−+]?[€£¥$]?\d[\d,]{0,40}(?:\.\d{1,40})?(?:(?: \d{1,9})?/\d{1,9})?(?:\s?\\?%)?)"
)


def grade_math(response: str, label: str | None, metadata: dict[str, Any], index: int) -> float:
    r"""1 when the last ``\boxed{}``, or without one the last expression, equals the label mathematically."""
    return float(same_mathematics(after_thinking(response), need_label(label, "math")))


def grade_math_ordered(response: str, label: str | None, metadata: dict[str, Any], index: int) -> float:
    """``math``, but the elements of a list count in their order, as in the grader of the MATH data set."""
    return float(same_mathematics(after_thinking(response), need_label(label, "math_ordered"), in_order))


def grade_math_boxes(response: str, label: str | None, metadata: dict[str, Any], index: int) -> float:
    r"""``math``, but several boxes are together one list, as in math-verify's own reading."""
    text = after_thinking(response)
    boxed = all_boxed(text)
    return float(same_mathematics(text if boxed is None else f"\\boxed{{{boxed}}}", need_label(label, "math_boxes")))


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
    truth = need_label(label, "dapo")
    text = without_end_of_turn(response)[-300:]
    found = list(DAPO_ANSWER.finditer(text))
    answer = clause(text[found[-1].end() :]) if found else ""
    right = bool(answer) and same_mathematics(f"\\boxed{{{answer}}}", truth)
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": answer or "[INVALID]"}


def clause(text: str) -> str:
    """The text from here to the end of the sentence or line."""
    text = text.lstrip(" \t\n*_}:")
    end = SENTENCE_END.search(text)
    return (text if end is None else text[: end.start()]).strip().rstrip("*").strip()


def same_mathematics(response: str, label: str, lists: Lists | None = None) -> bool:
    """True when the response's answer equals the label. An answer that takes too long to compare does not; the log says
    so once."""
    truths = answers_of(label)
    if not truths:
        raise GraderError(f"math: the label {label[:80]!r} holds no answer")
    answers = answers_of(response)
    if any(answer.strip() == truth.strip() for answer in answers for truth in (label, *truths)):
        return True
    try:
        return within(
            SECONDS, lambda: any(same_answer(one, other, lists or as_sets) for one in answers for other in truths)
        )
    except (OverTime, RecursionError, MemoryError):
        say_once("slow", f"a comparison takes more than {SECONDS:g} s of CPU time, the answer counts as wrong")
        return False


def answers_of(text: str) -> list[str]:
    """The texts that may be the answer: in the last box, behind ``####`` or "answer is", all of it; last expression.

    The last expression counts only where the rest is prose: words that no reading of the answer explains.
    """
    boxed = last_boxed(text)
    if boxed is not None:
        return [boxed] if boxed.strip("$ ") else []
    text = without_end_of_turn(text)
    if "####" in text:
        return [text.rpartition("####")[2].strip().partition("\n")[0]]
    stated = list(STATED.finditer(text))
    said = clause(text[stated[-1].end() :]) if stated else text.strip()
    expressions = list(EXPRESSION.finditer(text[-LONGEST:]))
    last = [next(filter(None, expressions[-1].groups()))] if expressions else []
    if len(said) > 200 or "\n" in said:
        return last
    prose = WORD.search(said) is not None and len(said.split()) > 6 or not NEGATIONS.search(said)
    return [said, *(last if prose and is_prose(said) else [])] if said.strip("$ ") else []


def is_prose(text: str) -> bool:
    """True when words are left after the text is read as an answer with a number."""
    parts = readings(tidy(text))[0]
    return any(words_of(part.body) and re.search(r"\d|\\", part.body) for part in parts)
