r"""Splits an answer: its parts (an answer may be a list), and for each part its name, value and unit.

:func:`read` takes a text as :func:`.notation.tidy` leaves it. Lists, sets in braces, "2 or 3" and "\pm 2" are parts;
a pair in parentheses is one part. Nothing here is computed.
"""

import dataclasses
import decimal
import re

NEGATIONS = re.compile(r"\b(?:not|never|no|than|least|most|or|and|of|except|neither|nor|between|n't)\b", re.IGNORECASE)
LEAD = re.compile(
    r"[A-Za-z][A-Za-z' ]{0,60}?(?: (?:is|are|equals|equal to)\b ?:?|(?<=[A-Za-z]{3}) ?:) ?(?=\S)", re.IGNORECASE
)
SEPARATOR = re.compile(r"[,;](?: ?(?:and|or)(?![A-Za-z]))?|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])", re.IGNORECASE)
THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d]|, ?\d)")
GREEK = "alpha|beta|gamma|delta|epsilon|theta|lambda|mu|sigma|tau|phi|varphi|psi|omega|rho|Delta|Omega|ell"
VARIABLE = re.compile(rf"[A-Za-z]|\\(?:{GREEK})")
NAME_EXTRAS = re.compile(
    r"\([A-Za-z0-9, ]{0,20}\)|_\{[^{}]{0,20}\}|'|\\(?:measured)?angle(?![a-z])|\\triangle(?![a-z])|"
    r"\\(?:overline|vec|hat|bar|mathbb|mathcal) ?\{([A-Za-z]+)\}| "
)
RELATION = re.compile(r"(<|>|\\le(?![a-z])|\\ge(?![a-z]))")
TURNED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}
ABOVE = {">", "\\ge"}
CLOSED = {"\\le", "\\ge"}
APPROXIMATE = re.compile(r"\\(?:approx|simeq)(?![a-z])")
DECIMAL = re.compile(r"[-+]? ?(?:\d+\.?\d*|\.\d+)")
PERCENT = re.compile(r" ?(?:\\?%|(?<![A-Za-z])(?:percent|per cent|percentage|pct))$", re.IGNORECASE)
MONEY_BEFORE = re.compile(r"([-+]?) ?([$€£¥₹]) ?(?=[\d.(\\])")
MONEY_AFTER = re.compile(r"(?<=[\d}]) ?([$€£¥₹])$")
ASIDE = re.compile(r"(?<=[\d}a-z]) ?\([A-Za-z][A-Za-z ,.']{2,40}\)$")
UNIT_WORD = r"[A-Za-z]+\.?(?:\^\{-?\d\})?"
UNIT = re.compile(rf"(?:(?<=[\d}})!])| )({UNIT_WORD}(?:(?: ?[/·*] ?| (?:per )?|-){UNIT_WORD}){{0,4}})$")
VALUE_END = re.compile(r"(?:[\d})\]!]|\\pi|\\infty)$")
UNITS = {
    **dict.fromkeys(("unit", "units", "old", "total"), ""),
    **dict.fromkeys(("m", "meter", "meters", "metre", "metres"), "m"),
    **dict.fromkeys(("cm", "centimeter", "centimeters", "centimetre", "centimetres"), "cm"),
    **dict.fromkeys(("mm", "millimeter", "millimeters", "millimetre", "millimetres"), "mm"),
    **dict.fromkeys(("km", "kilometer", "kilometers", "kilometre", "kilometres"), "km"),
    **dict.fromkeys(("ft", "foot", "feet"), "ft"),
    **dict.fromkeys(("inch", "inches"), "inch"),
    **dict.fromkeys(("mi", "mile", "miles"), "mi"),
    **dict.fromkeys(("yd", "yard", "yards"), "yd"),
    **dict.fromkeys(("g", "gram", "grams"), "g"),
    **dict.fromkeys(("kg", "kilogram", "kilograms"), "kg"),
    **dict.fromkeys(("mg", "milligram", "milligrams"), "mg"),
    **dict.fromkeys(("lb", "lbs", "pound", "pounds"), "lb"),
    **dict.fromkeys(("s", "sec", "second", "seconds"), "s"),
    **dict.fromkeys(("min", "mins", "minute", "minutes"), "min"),
    **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), "h"),
    **dict.fromkeys(("l", "liter", "liters", "litre", "litres"), "l"),
    **dict.fromkeys(("ml", "milliliter", "milliliters"), "ml"),
    **dict.fromkeys(("deg", "degree", "degrees"), "deg"),
    **dict.fromkeys(("rad", "radian", "radians"), "rad"),
    **dict.fromkeys(("usd", "dollar", "dollars"), "$"),
    **dict.fromkeys(("eur", "euro", "euros"), "€"),
    **{word: word for word in "n j w v k hz pa mol ev gb mb kb cc mph kph st nd rd th degc degf degk am pm oz".split()},
}
"""Words known as units, also behind a digit without a blank; any longer word after a blank is one too."""


@dataclasses.dataclass(frozen=True)
class Part:
    name: str
    """The text before the equals sign: "x", "f(x)", "area"; "" where nothing does."""
    body: str
    """The value, as LaTeX or words."""
    percent: bool = False
    unit: frozenset[str] = frozenset()


def levels(text: str) -> list[int]:
    """How many brackets are open before each character; environments count as brackets."""
    out = []
    depth = 0
    for place, letter in enumerate(text):
        if letter in ")]}" or text.startswith("\\end{", place):
            depth = max(0, depth - 1)
        out.append(depth)
        if letter in "([{" or text.startswith("\\begin{", place):
            depth += 1
    return out


def top(pattern: re.Pattern[str], text: str) -> list[re.Match[str]]:
    """The matches outside all brackets."""
    depth = levels(text)
    return [found for found in pattern.finditer(text) if depth[found.start()] == 0]


def pieces(text: str) -> list[str]:
    """``text`` cut at its commas, semicolons, "and" and "or" outside brackets."""
    out = []
    begin = 0
    for found in top(SEPARATOR, text):
        out.append(text[begin : found.start()])
        begin = found.end()
    return [piece.strip() for piece in (*out, text[begin:]) if piece.strip()]


def inside(text: str, left: str, right: str) -> str | None:
    """The inside of one pair of brackets around all of ``text``; None where there is no such pair."""
    if len(text) < len(left + right) or not text.startswith(left) or not text.endswith(right):
        return None
    depth = levels(text)
    if any(level == 0 for level in depth[len(left) : len(text) - 1]):
        return None
    return text[len(left) : len(text) - len(right)].strip()


def readings(text: str) -> list[list[Part]]:
    """The parts, read with "1,234" as a number and, where there is such a thing, as a list too."""
    joined = []
    end = 0
    for found in top(THOUSANDS, text):
        joined += [text[end : found.start()], found[0].replace(",", "")]
        end = found.end()
    return [read(text)] if not end else [read("".join(joined) + text[end:]), read(text)]


def read(text: str) -> list[Part]:
    cut = pieces(without_lead(text))
    if len(cut) > 1 and all(top(RELATION, piece) for piece in cut):
        intervals = [named(piece)[1] for piece in cut]
        both = re.search(r"(?<![A-Za-z])and(?![A-Za-z])", text)
        return [Part("", ("\\cap " if both else "\\cup ").join(intervals))]
    out: list[Part] = []
    for piece in cut:
        name, body = named(without_lead(piece))
        elements = inside(body, "\\{", "\\}")
        if elements == "":
            body = "\\emptyset"
        for element in pieces(elements) if elements else [body]:
            out += signs(valued(name, element))
    return out


def without_lead(text: str) -> str:
    """Without "The answer is" and its like."""
    found = LEAD.match(text)
    return text if found is None or NEGATIONS.search(found[0]) else text[found.end() :].strip()


def as_decimal(body: str) -> decimal.Decimal | None:
    return decimal.Decimal(body.replace(" ", "")) if DECIMAL.fullmatch(body) else None


def is_name(text: str) -> bool:
    bare = NAME_EXTRAS.sub(r"\1", text)
    return len(text) < 60 and re.fullmatch(rf"[A-Za-z]+|\\(?:{GREEK})|", bare) is not None and bool(text)


def named(piece: str) -> tuple[str, str]:
    """The name and what it stands for; a chain of equalities stands for its end, a relation for its interval.

    What is about another value gives way to it, and stands where there is no other.
    """
    exact, *rounded = (side.strip() for side in APPROXIMATE.split(piece))
    if rounded:
        return (exact, rounded[0]) if not exact or is_name(exact) else named(exact)
    sides = [side.strip() for side in piece.split("=")]
    if len(sides) == 1:
        name, _, body = piece.partition("\\in ")
        if body and is_name(name.strip()):
            return name.strip(), body.strip()
        return interval(piece)
    numbers = {as_decimal(side) for side in sides} - {None}
    if not sides[-1] or top(RELATION, piece) or len(numbers) > 1:  # 6 = 5 stands for nothing
        return "", piece
    if is_name(sides[0]):
        return sides[0], sides[-1]
    if len(sides) == 2 and is_name(sides[1]):
        return sides[1], sides[0]
    letters = re.sub(r"\\[A-Za-z]+", "", sides[0])
    return ("", piece) if re.search("[A-Za-z]", letters) else ("", sides[-1])


def interval(piece: str) -> tuple[str, str]:
    """``x>5`` is ``(5,\\infty)`` by the name of x; anything else stays."""
    cut = [side.strip() for side in RELATION.split(piece)]
    if len(cut) == 3 and VARIABLE.fullmatch(cut[2]):
        cut = [cut[2], TURNED[cut[1]], cut[0]]
    if len(cut) == 3 and VARIABLE.fullmatch(cut[0]) and cut[2]:
        name, sign, end = cut
        return name, between(end, sign, "<", "\\infty") if sign in ABOVE else between("-\\infty", "<", sign, end)
    if len(cut) == 5 and VARIABLE.fullmatch(cut[2]) and cut[0] and cut[4]:
        low, first, name, second, high = cut
        if {first, second} <= ABOVE:
            return name, between(high, second, first, low)
        if not {first, second} & ABOVE:
            return name, between(low, first, second, high)
    return "", piece


def between(low: str, first: str, second: str, high: str) -> str:
    return f"{'[' if first in CLOSED else '('}{low},{high}{']' if second in CLOSED else ')'}"


def valued(name: str, body: str) -> Part:
    """Takes percent sign, currency, aside and unit off the value, and brackets around a single one."""
    units: set[str] = set()
    body = ASIDE.sub("", body.strip()).rstrip(". ")
    if (percent := PERCENT.search(body)) is not None and percent.start():
        return Part(name, unwrapped(body[: percent.start()].strip()), True)
    if (money := MONEY_BEFORE.match(body)) is not None:
        units.add(money[2])
        body = money[1] + body[money.end() :]
    elif (money := MONEY_AFTER.search(body)) is not None:
        units.add(money[1])
        body = body[: money.start()]
    if (tail := UNIT.search(body)) is not None and VALUE_END.search(body[: tail.start()]):
        known = unit_of(tail[1], glued=tail[0][0] != " ")
        if known is not None:
            units |= known
            body = body[: tail.start()]
    return Part(name, unwrapped(body.strip()), False, frozenset(units))


def unit_of(tail: str, glued: bool) -> frozenset[str] | None:
    """The words of a unit as their short forms; None where one of them is no unit."""
    tail = re.sub(r"\b(?:square|sq\.?) (\w+)", r"\1^{2}", re.sub(r"\bcubic (\w+)", r"\1^{3}", tail.lower()))
    tail = tail.replace(" squared", "^{2}").replace(" cubed", "^{3}").replace(" per ", "/")
    out: set[str] = set()
    for word in re.split(r"[ ·*-]", tail):
        short = []
        for piece in word.split("/"):
            bare, power, rest = piece.strip().partition("^")
            bare = bare.rstrip(".")
            if NEGATIONS.fullmatch(bare) or bare not in UNITS and (len(bare) < 3 or glued):
                return None
            if glued and len(bare) == 1 and "/" not in word and not power:
                return None
            known = UNITS.get(bare, bare[:-1] if bare.endswith("s") else bare)
            short.append(known + power + rest if known else "")
        out.add("/".join(short))
    return frozenset(out - {""})


def unwrapped(body: str) -> str:
    """Without brackets that hold all of it and no list."""
    for left, right in (("(", ")"), ("[", "]"), ("{", "}")):
        held = inside(body, left, right)
        if held and len(pieces(held)) == 1 and "," not in held:
            return unwrapped(held)
    return body


def signs(part: Part) -> list[Part]:
    r"""``a \pm b`` is two parts."""
    if "\\pm" not in part.body:
        return [part]
    both = [part.body.replace("\\pm", plus).replace("\\mp", minus) for plus, minus in ("+-", "-+")]
    return [dataclasses.replace(part, body=body) for body in both]
