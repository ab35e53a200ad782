r"""``math``, ``deepscaler`` and ``dapo``: answers compared as mathematics.

An answer and a label take the same way: the text that counts is chosen, brought into one notation (:mod:`.notation`)
and cut into parts (:mod:`.parts`); words compare as words, decimals as decimals, tuples by their elements, and every
other value by math-verify. docs/rewards.md names the conventions.
"""

import decimal
import functools
import logging
import re
from collections.abc import Callable
from typing import Any

from slime_cli.rollout.graders.answers import (
    GraderError,
    after_thinking,
    all_boxed,
    last_boxed,
    need_label,
    without_end_of_turn,
)
from slime_cli.rollout.graders.limits import OverTime, too_large, within
from slime_cli.rollout.graders.notation import tidy
from slime_cli.rollout.graders.parts import NEGATIONS, Part, inside, pieces, readings

logger = logging.getLogger(__name__)
Lists = Callable[[list[Part], list[Part]], bool]
"""How lists compare: as_sets or in_order."""
SAID: set[str] = set()

SECONDS = 1.5
"""CPU time for one verdict; see :mod:`.limits`."""
LONGEST = 2000
DEEPEST = 60
MOST_PARTS = 100
"""Answers with more characters, open brackets or parts compare as texts only."""
STATED = re.compile(r"\banswer\b[*_\s]{0,4}(?:is\b|[:=])[*_ \t]*:?", re.IGNORECASE)
DAPO_ANSWER = re.compile(r"answer\b[*_\s]{0,4}:", re.IGNORECASE)
SENTENCE_END = re.compile(r"\.(?=\s|\Z)|\n")
EXPRESSION = re.compile(
    r"\$\$?(?P<dollars>[^$]{1,500})\$|\\\((?P<round>[^$]{1,500}?)\\\)|\\\[(?P<square>[^$]{1,500}?)\\\]|"
    r"(?P<number>[-–−+]?[€£¥$]?\d[\d,]{0,40}(?:\.\d{1,40})?(?:(?: \d{1,9})?/\d{1,9})?(?:\s?\\?%)?)"
)
WORD = re.compile(r"(?<![\\A-Za-z\d^_{])[A-Za-z]{3,}(?![A-Za-z])")
ENVIRONMENT = re.compile(r"\\(?:begin|end)\{[a-zA-Z]+\}")
DECIMAL = re.compile(r"[-+]? ?(?:\d+\.?\d*|\.\d+)")
BASED = re.compile(r"([0-9A-Fa-f]+)_\{(\d{1,2})\}")


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
    truth, text = need_label(label, "dapo"), without_end_of_turn(response)[-300:]
    found = list(DAPO_ANSWER.finditer(text))
    answer = clause(text[found[-1].end() :]) if found else ""
    right = bool(answer) and same_mathematics(f"\\boxed{{{answer}}}", truth)
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": answer or "[INVALID]"}


def clause(text: str) -> str:
    """What stands from here to the end of the sentence or line."""
    text = text.lstrip(" \t\n*_}:")
    end = SENTENCE_END.search(text)
    return (text if end is None else text[: end.start()]).strip().rstrip("*").strip()


def same_mathematics(response: str, label: str, lists: Lists | None = None) -> bool:
    """Whether the response's answer is the label's. Too slow to decide is no; the log says so once."""
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
    """Whether words are left when the text is read as an answer with a number."""
    parts = readings(tidy(text))[0]
    return any(words_of(part.body) and re.search(r"\d|\\", part.body) for part in parts)


def same_answer(answer: str, truth: str, lists: Lists) -> bool:
    if max(len(answer), len(truth)) > LONGEST or max(depth_of(answer), depth_of(truth)) > DEEPEST:
        return squashed(answer) == squashed(truth)
    return same_tidy(tidy(answer), tidy(truth), lists)


def same_tidy(answer: str, truth: str, lists: Lists) -> bool:
    if squashed(answer) == squashed(truth):
        return bool(squashed(answer))
    return any(
        lists(ours, theirs)
        for ours in readings(answer)
        for theirs in readings(truth)
        if ours and theirs and max(len(ours), len(theirs)) <= MOST_PARTS
    )


def in_order(ours: list[Part], theirs: list[Part]) -> bool:
    return len(ours) == len(theirs) and all(map(same_part, ours, theirs))


def as_sets(ours: list[Part], theirs: list[Part]) -> bool:
    """Each part of one has its equal in the other."""
    unmatched = set(range(len(ours)))
    for truth in theirs:
        equals = {place for place, answer in enumerate(ours) if same_part(answer, truth)}
        if not equals:
            return False
        unmatched -= equals
    return not unmatched


def same_part(answer: Part, truth: Part) -> bool:
    letters = {part.name.casefold() for part in (answer, truth) if len(part.name) == 1}
    if len(letters) > 1 or answer.unit and truth.unit and not answer.unit & truth.unit:
        return False
    if answer.percent == truth.percent:
        return same_body(answer.body, truth.body)
    if answer.unit or truth.unit:
        return False
    if same_body(answer.body, truth.body):
        return True
    return same_body(*(hundredth(part.body) if part.percent else part.body for part in (answer, truth)))


def hundredth(body: str) -> str:
    number = as_decimal(body)
    return f"\\frac{{{body}}}{{100}}" if number is None else f"{number.scaleb(-2):f}"


def same_body(answer: str, truth: str) -> bool:
    if squashed(answer) == squashed(truth):
        return True
    if words_of(answer) != words_of(truth) or "no" in (answer.casefold(), truth.casefold()):
        return False
    if only_words(answer) or only_words(truth):
        return words_of(answer, 1) == words_of(truth, 1)
    answer, truth = in_base_ten(answer), in_base_ten(truth)
    numbers = as_decimal(answer), as_decimal(truth)
    if None not in numbers:
        return numbers[0] == numbers[1]
    if any(re.search(r"\d +\d|\d:\d|\\pmod|\\equiv|\\bmod", body) for body in (answer, truth)):
        return False
    if ("=" in answer) != ("=" in truth) or "\\emptyset" in (answer, truth):
        return False
    for left, right in (("(", ")"), ("[", "]")):
        ours, theirs = inside(answer, left, right), inside(truth, left, right)
        if ours and theirs and len(pieces(ours)) > 1 < len(pieces(theirs)):
            ours, theirs = pieces(ours), pieces(theirs)
            return len(ours) == len(theirs) and all(same_tidy(*pair, in_order) for pair in zip(ours, theirs))
    return same_value(answer, truth)


def squashed(text: str) -> str:
    """Without blanks, but for those between digits."""
    return re.sub(r"\s+(?!\d)|(?<!\d)\s+", "", text)


def words_of(body: str, shortest: int = 3) -> list[str]:
    """The words, lower-case and in order of the alphabet where they stand between signs; see only_words."""
    found = WORD.findall(ENVIRONMENT.sub("", body)) if shortest > 1 else re.findall("[A-Za-z]+", body)
    words = [word.casefold() for word in found]
    return sorted(words) if shortest > 1 else words


def only_words(body: str) -> bool:
    return bool(words_of(body)) and re.search(r"[\d\\=+*/^_<>|]", body) is None


def depth_of(text: str) -> int:
    depth = deepest = 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        deepest = max(deepest, depth)
    return deepest


def as_decimal(body: str) -> decimal.Decimal | None:
    return decimal.Decimal(body.replace(" ", "")) if DECIMAL.fullmatch(body) else None


def in_base_ten(body: str) -> str:
    """``101_{2}`` is 5."""
    found = BASED.fullmatch(body)
    try:
        return body if found is None else str(int(found[1], int(found[2])))
    except ValueError:
        return body


def same_value(answer: str, truth: str) -> bool:
    import math_verify

    silence_math_verify()
    expected = parsed(truth)
    if not expected:
        say_once("label", f"the label {truth[:80]!r} cannot be read as mathematics, only the same text is right")
        return False
    return math_verify.verify(list(expected), list(parsed(answer)), allow_set_relation_comp=True, timeout_seconds=None)


@functools.lru_cache(maxsize=4096)
def parsed(body: str) -> tuple[Any, ...]:
    """math-verify's reading; nothing where it has none or the numbers are too large.

    Its timeouts (signal.alarm) are off, since they turn a machine's load into a verdict. i is the imaginary unit.
    """
    import math_verify
    import sympy
    from latex2sympy2_extended import NormalizationConfig

    normal = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none")
    config = math_verify.LatexExtractionConfig(normalization_config=normal, boxed_match_priority=-1)
    found = math_verify.parse(f"${body}$", [config], fallback_mode="no_fallback", parsing_timeout=None)
    out = []
    for expression in found:
        if too_large(expression):
            continue
        if isinstance(expression, sympy.Set):
            expression = expression.doit()  # an intersection of intervals is an interval
        units = [symbol for symbol in expression.free_symbols if symbol.name == "i"]
        out.append(expression.subs(dict.fromkeys(units, sympy.I)) if units else expression)
    return tuple(out)


@functools.cache
def silence_math_verify() -> None:
    """It warns once a call that its timeouts are off; here :func:`within` keeps the time."""
    for name in ("math_verify.parser", "math_verify.grader", "math_verify.utils"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


@functools.cache
def load_math_verify() -> None:
    same_value("x", "y")


def say_once(kind: str, message: str) -> None:
    """One warning of each kind for a worker's life."""
    if kind not in SAID:
        SAID.add(kind)
        logger.warning(f"math: {message} (said once by each reward worker)")
