r"""Numbers in many spellings: two are right for each other exactly when they are the same number.

The spellings are written here from the value, so that no list of cases limits what is tried.
"""

import fractions
from collections.abc import Callable

import hypothesis
from hypothesis import strategies

from slime_cli.rewards.graders import grade

Fraction = fractions.Fraction


def plain(value: Fraction) -> str:
    """A decimal where it ends, with an overline where it does not; whole numbers as they are."""
    sign = "-" if value < 0 else ""
    value = abs(value)
    whole = value.numerator // value.denominator
    rest = value.numerator % value.denominator
    digits = ""
    seen = {}
    while rest and rest not in seen:
        seen[rest] = len(digits)
        digits += str(rest * 10 // value.denominator)
        rest = rest * 10 % value.denominator
    if not digits:
        return f"{sign}{whole}"
    start = seen.get(rest, len(digits))
    return f"{sign}{whole}.{digits[:start]}" + (rf"\overline{{{digits[start:]}}}" if rest else "")


def mixed(value: Fraction) -> str:
    whole, rest = divmod(abs(value.numerator), value.denominator)
    sign = "-" if value < 0 else ""
    return rf"{sign}{whole}\frac{{{rest}}}{{{value.denominator}}}" if whole and rest else plain(value)


def grouped(separator: str) -> Callable[[Fraction], str]:
    return lambda value: f"{value.numerator:,}".replace(",", separator) if value.denominator == 1 else plain(value)


def scientific(value: Fraction) -> str:
    return (
        f"{value.numerator}e0" if value.denominator == 1 else rf"\frac{{{value.numerator}e1}}{{{value.denominator}0}}"
    )


SPELLINGS: list[Callable[[Fraction], str]] = [
    plain,
    mixed,
    lambda value: (
        mixed(value).replace("\\frac{", " ").replace("}{", "/").replace("}", "") if value > 1 else plain(value)
    ),
    lambda value: f"{value.numerator}/{value.denominator}",
    lambda value: rf"\frac{{{value.numerator}}}{{{value.denominator}}}",
    lambda value: rf"\dfrac {{{value.numerator}}} {{{value.denominator}}}",
    lambda value: rf"-\frac{{{-value.numerator}}}{{{value.denominator}}}",
    *map(grouped, (",", "{,}", r"\,", " ", "\u2009", "'")),
    scientific,
]
FRAMES = [
    "%s",
    "$%s$",
    "%s.",
    r"\text{The answer is } %s",
    "x = %s",
    r"%s\text{ cm}",
    r"\displaystyle %s",
    "{%s}",
    "**%s**",
]
VALUES = strategies.fractions(-3000, 3000, max_denominator=12) | strategies.integers(-(10**7), 10**7).map(Fraction)


@hypothesis.settings(max_examples=100, derandomize=True)
@hypothesis.given(VALUES, VALUES, *[strategies.sampled_from(SPELLINGS)] * 2, *[strategies.sampled_from(FRAMES)] * 2)
def test_two_spellings_are_equal_exactly_when_the_numbers_are(value, other, ours, theirs, frame, label_frame):
    label = label_frame % theirs(value)
    for answer in (value, other, -value, value + 1, value / 10, value * 10):
        response = rf"\boxed{{{frame % ours(answer)}}}"
        assert grade("math", response, label, {}) == (answer == value), f"{response} against {label}"
