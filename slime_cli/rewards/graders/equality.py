"""Compares two answers.

Words compare as words, decimals as decimals, tuples by their elements; math-verify compares the rest. The caller
(:mod:`.mathematics`) chooses the texts and bounds the time. docs/rewards.md names the conventions.
"""

import functools
import logging
import re
from collections.abc import Callable
from itertools import product
from typing import Any, cast

from slime_cli.rewards.graders.limits import too_large
from slime_cli.rewards.graders.notation import tidy
from slime_cli.rewards.graders.parts import Part, as_decimal, inside, pieces, readings

logger = logging.getLogger(__name__)
Lists = Callable[[list[Part], list[Part]], bool]
"""How lists compare: as_sets or in_order."""
SAID: set[str] = set()
LONGEST = 2000
DEEPEST = 60
MOST_PARTS = 100
"""Answers with more characters, open brackets or parts compare as texts only."""
LETTERS = r"[^\W\d_]+"
WORD = re.compile(r"(?<![\\\w^{])[^\W\d_]{3,}(?![^\W\d_])")
OPTION = re.compile(r"\(?([A-H])[).] ((?:[\w$(-]|\\(?:frac|sqrt|pi)(?![a-z])).*)")
ENVIRONMENT = re.compile(r"\\(?:begin|end)\{[a-zA-Z]+\}")
BASED = re.compile(r"([0-9A-Fa-f]+)_\{(\d{1,2})\}")


def same_answer(answer: str, truth: str, lists: Lists) -> bool:
    if max(len(answer), len(truth)) > LONGEST or max(depth_of(answer), depth_of(truth)) > DEEPEST:
        return squashed(answer) == squashed(truth)
    return same_tidy(tidy(answer), tidy(truth), lists)


def same_tidy(answer: str, truth: str, lists: Lists) -> bool:
    if squashed(answer) == squashed(truth):
        return bool(squashed(answer))
    ours = OPTION.fullmatch(answer)
    theirs = OPTION.fullmatch(truth)
    if ours and theirs:
        return ours[1] == theirs[1] and same_tidy(ours[2], theirs[2], lists)
    if ours or theirs:  # "(E) 15" is E, and is 15
        return any(same_tidy(*pair, lists) for pair in product(halves(ours, answer), halves(theirs, truth)))
    return any(
        lists(ours, theirs)
        for ours in readings(answer)
        for theirs in readings(truth)
        if ours and theirs and max(len(ours), len(theirs)) <= MOST_PARTS
    )


def halves(option: re.Match[str] | None, text: str) -> tuple[str, ...]:
    return (text,) if option is None else option.groups()


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
        return re.findall(LETTERS, answer.casefold()) == re.findall(LETTERS, truth.casefold())
    answer = in_base_ten(answer)
    truth = in_base_ten(truth)
    numbers = as_decimal(answer), as_decimal(truth)
    if None not in numbers:
        return numbers[0] == numbers[1]
    if any(re.search(r"\d +\d|\d:\d|\\pmod|\\equiv|\\bmod", body) for body in (answer, truth)):
        return False
    if ("=" in answer) != ("=" in truth) or "\\emptyset" in (answer, truth):
        return False
    for left, right in (("(", ")"), ("[", "]")):
        ours = inside(answer, left, right)
        theirs = inside(truth, left, right)
        if ours and theirs and len(pieces(ours)) > 1 < len(pieces(theirs)):
            ours = pieces(ours)
            theirs = pieces(theirs)
            return len(ours) == len(theirs) and all(same_tidy(*pair, in_order) for pair in zip(ours, theirs))
    return same_value(answer, truth)


def squashed(text: str) -> str:
    """Without blanks, but for those between digits."""
    return re.sub(r"\s+(?!\d)|(?<!\d)\s+", "", text)


def words_of(body: str) -> list[str]:
    """The words, in order of the alphabet: between signs their order may differ."""
    return sorted(word.casefold() for word in WORD.findall(ENVIRONMENT.sub("", body)))


def only_words(body: str) -> bool:
    return WORD.search(body) is not None and re.search(r"[\d\\=+*/^_<>|]", body) is None


def depth_of(text: str) -> int:
    depth = deepest = 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        deepest = max(deepest, depth)
    return deepest


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
    found = math_verify.parse(f"${body}$", [config], fallback_mode="no_fallback", parsing_timeout=cast(int, None))
    out = []
    for expression in found:
        if too_large(expression):
            continue
        if isinstance(expression, sympy.Set):
            expression = expression.doit()  # an intersection of intervals is an interval
        units = [symbol for symbol in expression.free_symbols if str(symbol) == "i"]
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
