r"""One spelling for an answer: Unicode, plain text and LaTeX dialects become the LaTeX that math-verify reads.

:func:`tidy` keeps the mathematics as written; nothing is computed but repeating decimals. Fonts go (``\text{cat}``
is cat), so that words are seen by who reads the parts.
"""

import re
import unicodedata

from slime_cli.rewards.graders.answers import last_boxed
from slime_cli.rewards.graders.parts import inside

DASHES = dict.fromkeys(map(ord, "‐‑‒–—―−﹣－"), "-")
SIGNS = {
    "\\times ": "×",
    "\\cdot ": "·⋅∙",
    "/": "÷∕⁄",
    "\\le ": "≤⩽",
    "\\ge ": "≥⩾",
    "\\ne ": "≠",
    "\\pm ": "±",
    "\\mp ": "∓",
    "\\infty ": "∞",
    "\\cup ": "∪",
    "\\cap ": "∩",
    "\\in ": "∈",
    "\\emptyset ": "∅",
    "\\angle ": "∠",
    "\\approx ": "≈",
    "\\equiv ": "≡",
    "'": "’‘",
}
TRANSLATION = {ord(sign): spelling for spelling, signs in SIGNS.items() for sign in signs}
FRAMES = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("`", "`"))
SUPERSCRIPTS = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱ]+")
SUBSCRIPTS = re.compile("[₀₁₂₃₄₅₆₇₈₉₊₋ₙᵢ]+")
FRACTIONS = re.compile("[¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞]")
ROOTS = re.compile(r"([√∛∜])\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+(?:\.\d+)?|[A-Za-z]))")
ROOT_OF = {"√": r"\sqrt", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]"}
FONTS = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|up|normal)?|math(?:rm|bf|it|sf|tt|normal)|mbox|hbox|operatorname\*?|emph)\s*"
    r"\{([^{}]*)\}"
)
SWITCHES = re.compile(
    r"\\(?:(?:left|right|mleft|mright)\s*\.(?!\d)|(?:left|right|mleft|mright|[bB]igg?[lrm]?|displaystyle|textstyle|"
    r"limits|bf|rm|it)(?![A-Za-z]))|\\!"
)
WORDS = "sqrt|pi|sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|log|ln|exp|theta|alpha|beta|gamma|infty|infinity"
NAMES = re.compile(rf"(?<![\\A-Za-z])(?:{WORDS})(?![A-Za-z])")
MATRIX = re.compile(
    r"[(\[]?\s*\\begin\{(?:array\}\s*\{[^{}]*|[pbB]?matrix|smallmatrix)\}(.*?)(?:\\\\)?\s*\\end\{[a-zB]+\}\s*[)\]]?"
)
END = re.compile(r"(?:(?<!\\)[.,;:]|\s)+\Z")
NUMBER_E = re.compile(r"(?<![A-Za-z\d.])(\d+\.?\d*|\.\d+)[eE]\+?(-?\d+)(?!\.?[\dA-Za-z_])")
REPEATING = [
    re.compile(r"(?<![\d.])(\d*)\.(\d*) ?\\(?:overline|bar|dot) ?\{?(\d+)\}?"),
    re.compile(r"(?<![\d.])(\d*)\.(\d*)\((\d+)\)(?![\d^])"),
    re.compile(r"(?<![\d.])(\d*)\.(\d*?)(\d{1,6}?)\3{2,} ?(?:\\[lc]?dots|\.\.\.)"),
]
TRIGONOMETRIC = re.compile(r"\\(sin|cos|tan|cot|sec|csc) ?([({]?) ?(\d+(?:\.\d+)?) ?° ?[)}]?")
REWRITES = [
    (re.compile(r"(?<!\\)(?:\\[,;: ]|~|\\q?quad(?![A-Za-z]))|\s"), " "),
    (re.compile(" +"), " "),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\frac ?(\d)(?= ?[\d{])"), r"\\frac{\1}"),
    (re.compile(r"\\frac ?\{([^{}]*)\} ?(\d)"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\frac ?\{([^{}]*)\} ?\{"), r"\\frac{\1}{"),
    (re.compile(r"\\(?:leqslant|leqq|leq)(?![A-Za-z])|<="), r"\\le "),
    (re.compile(r"\\(?:geqslant|geqq|geq)(?![A-Za-z])|>="), r"\\ge "),
    (re.compile(r"\\neq(?![A-Za-z])|!="), r"\\ne "),
    (re.compile(r"\\lt(?![A-Za-z])"), "<"),
    (re.compile(r"\\gt(?![A-Za-z])"), ">"),
    (re.compile(r"\\(?:langle|lparen)(?![A-Za-z])"), "("),
    (re.compile(r"\\(?:rangle|rparen)(?![A-Za-z])"), ")"),
    (re.compile(r"\\lbrace(?![A-Za-z])"), r"\\{"),
    (re.compile(r"\\rbrace(?![A-Za-z])"), r"\\}"),
    (re.compile(r"\\varnothing(?![A-Za-z])"), r"\\emptyset"),
    (re.compile(r"\^ ?\{? ?\\circ ?\}?|\\deg(?:rees?)?(?![A-Za-z])"), "°"),
    (re.compile(r"\\infinity(?![A-Za-z])"), r"\\infty"),
    (re.compile(r"(?<=[\w)}]) ?\*\* ?(\w+|\([^()]*\))"), r"^{\1}"),
    (re.compile(r" ([_^])"), r"\1"),
    (re.compile(r"([_^]) ?(-?\d+|[A-Za-z])"), r"\1{\2}"),
    (re.compile(r"\\pmod ?\{? ?(\w+) ?\}?"), r"\\pmod{\1}"),
    (re.compile(r"(?<![\d.,])\d{1,3}(?:\{,\}\d{3})+(?!\d)"), lambda found: found[0].replace("{,}", "")),
    (re.compile(r"(?<=\d)\{,\}(?=\d)"), "."),
    (re.compile(r"(?<![\d.,])\d{1,3}(?:[ ']\d{3})+(?![\d/]| ?/)"), lambda found: re.sub("[ ']", "", found[0])),
    (NUMBER_E, r"\1 \\times 10^{\2}"),
    (TRIGONOMETRIC, r"\\\1(\\frac{\3 \\pi}{180})"),
    (re.compile(r"° ?([CFK])(?![A-Za-z])"), r" deg\1"),
    (re.compile("°"), " deg "),
    (re.compile(r"(?<![\d.^_/])(\d+) (\d+)/(\d+)(?![\d/]|\.\d)"), r"(\1+\\frac{\2}{\3})"),
    (re.compile(r"(?<![\d.^_/\w])(\d+) ?\\frac\{(\d+)\}\{(\d+)\}"), r"(\1+\\frac{\2}{\3})"),
]
"""In this order: blanks, then LaTeX's dialects, then numbers."""


def tidy(text: str) -> str:
    text = SUPERSCRIPTS.sub(lambda found: "^{" + unicodedata.normalize("NFKC", found[0]) + "}", unframed(text))
    text = SUBSCRIPTS.sub(lambda found: "_{" + unicodedata.normalize("NFKC", found[0]) + "}", text)
    text = FRACTIONS.sub(fraction, text)
    text = unicodedata.normalize("NFKC", text.translate(DASHES)).translate(DASHES).translate(TRANSLATION)
    text = "".join(greek(letter) if letter > "\u036f" else letter for letter in text)
    text = ROOTS.sub(lambda found: f"{ROOT_OF[found[1]]}{{{found[2] or found[3] or found[4]}}}", text)
    text = SWITCHES.sub("", text)
    for _ in range(3):
        text = FONTS.sub(r" \1 ", text)
    text = NAMES.sub(r"\\\g<0>", text.replace("\\$", "$"))
    text = MATRIX.sub(r"\\begin{pmatrix}\1\\end{pmatrix}", text.replace("\n", " "))
    text = END.sub("", text)
    for pattern, put in REWRITES:
        text = pattern.sub(put, text)
    for pattern in REPEATING:
        text = pattern.sub(repeated, text)
    return END.sub("", re.sub(" +", " ", text).strip())


def unframed(text: str) -> str:
    r"""Without the dollars, ``\(``, boxes, braces and stars around all of it."""
    before = None
    while text != before:
        before = text
        text = text.strip()
        if re.match(r"\\f?box(?:ed)?\b", text) and text.endswith("}"):
            text = last_boxed(text) or text
        for left, right in FRAMES:
            held = text[len(left) : len(text) - len(right)]
            ends = text.startswith(left) and text.endswith(right) and len(text) >= len(left + right)
            if ends and left not in held and right not in held and not held.endswith("\\"):
                text = held
        text = inside(text, "{", "}") or text
        text = re.sub(r"(?<=[$`*])\.$", "", text)
    unescaped = re.findall(r"(?<!\\)\$", text)
    return re.sub(r"(?<!\\)\$", " ", text) if len(unescaped) > 1 else text


def fraction(found: re.Match[str]) -> str:
    over, under = unicodedata.normalize("NFKC", found[0]).split("⁄")
    return f"\\frac{{{over}}}{{{under}}}"


def greek(letter: str) -> str:
    name = unicodedata.name(letter, "").removeprefix("GREEK ").replace("LAMDA", "LAMBDA").split(" LETTER ")
    known = unicodedata.name(letter, "").startswith("GREEK ") and len(name) == 2 and name[1].isalpha()
    return f"\\{name[1].lower() if name[0] == 'SMALL' else name[1].capitalize()} " if known else letter


def repeated(found: re.Match[str]) -> str:
    """0.1666... is (16 - 1) / 90."""
    whole = found[1]
    fixed = found[2]
    cycle = found[3]
    over = int(whole + fixed + cycle) - int(whole + fixed or "0")
    return f"\\frac{{{over}}}{{{'9' * len(cycle) + '0' * len(fixed)}}}"
