r"""``gpqa``: multiple choice. The right option comes from the label or the metadata, the chosen one from the response.

A reading is a letter, ``""`` (the response speaks, but chooses no single option: "B or C", "not C", a letter that is no
option) or None (nothing said; the next place is tried). The places, in order: the last box; the last "answer is ..."
that can be read; "... is correct"; an option's text as the last line; a letter in a line of its own; the last letter
that stands alone. Patterns have bounded repetitions only, so that no response takes more than linear time.
"""

import re
import string
from typing import Any

from slime_cli.rewards.graders.answers import GraderError, after_thinking, last_boxed, need_label, without_end_of_turn

MOST_TRIES = 50
STATED = re.compile(
    r"\b(?:(?:answer|choice|option)\b[*_\s]{0,4}(?:(?P<never>(?:can ?not|can't|must not|won't) be\b|isn't\b|wasn't\b)|"
    r"\b(?:is|was|are)\b|(?:must|should|would|will|has to) be\b|[:=–-])|"
    r"(?:option|choice)(?=\s{1,3}[(\[]?[A-Z]\b))",
    re.IGNORECASE,
)
LEAD = re.compile(
    r"(?:the|my|final|correct|right|best|answer|option|choice|letter|is|be|thus|therefore|hence|then|clearly|probably|"
    r"likely|most|definitely|indeed|simply|[:=–-])(?=[\s:(\[]|\Z)[\s:]*",
    re.IGNORECASE,
)
LETTER = re.compile(r"[(\[]?([A-Za-z])[)\]]?(?![\w'=/+^-])")
BRACKETED = re.compile(r"[(\[]\s?[A-Za-z]\s?[)\]]")
HEDGE = re.compile(
    r"\s*(?:/|\bor\b|\band\b|&|,(?:\s*(?:or|and)\b)?)\s*[(\[]?([A-Z])(?![\w'-])[)\]]?(?!\s+(?:is|are|was|has))"
)
NEGATED = re.compile(r"(?:not|neither|none|never|no|nothing)\b", re.IGNORECASE)
REFUSED = re.compile(
    r"\)?\s+(?:is|are|was)\s+(?:all\s+|both\s+)?(?:not|wrong|incorrect|false|too|out|excluded|ruled)\b", re.IGNORECASE
)
CORRECT = re.compile(r"(?<![\w'-])[(\[]?([A-Z])[)\]]?\s+(?:is|must be)\s+(?:the\s+)?(?:correct|right|best|answer)\b")
ALONE = re.compile(r"(?<![\w'=/+\\-])(\(?)([A-Z])\)?(?![\w'=/+-])")
DENIED = re.compile(r"\b(?:not|nor|neither|except|never|without)\s+(?:option\s+|choice\s+)?$", re.IGNORECASE)
JOINED = re.compile(r"\s*(?:,|and|or|nor|&|,\s*(?:and|or))\s*", re.IGNORECASE)
EITHER = re.compile(r"(?<![\w'])[A-Z]\)?\s+(?:or|/)\s+$")
OWN_LINE = re.compile(r"^[ *_(\[$]{0,4}([A-Z])[ *_)\].$]{0,4}$", re.MULTILINE)
ARTICLE = re.compile(r"\s+(?!(?:is|was|and|or|because|since|as|for|seems|fits|must|should|would)\b)[a-z]")
FONT = re.compile(
    r"\\(?:text|math)(?:[a-z]{2,7})?\b|\\(?:boxed|fbox|mbox|bf|rm|it|left|right|displaystyle)\b|[*_`$\"“”‘’{}]"
)
QUOTE = re.compile(r"(?<!\w)'|'(?!\w)")
BLANK = re.compile(r"(?:\\[ ,;!]|~|\s)+")


def plain(text: str) -> str:
    """Without fonts, emphasis, quotes and LaTeX blanks."""
    return BLANK.sub(" ", QUOTE.sub("", FONT.sub(" ", text))).strip()


def normal(text: str) -> str:
    """An option's text as it is compared: no case, no blanks beside signs, no period at the end."""
    text = plain(text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")).casefold().rstrip(".,;!")
    return re.sub(r" ?([^\w ]) ?", r"\1", text).strip()


class Options:
    """The letters that may be chosen, and the options' texts as far as they are known."""

    def __init__(self, metadata: dict[str, Any]) -> None:
        choices = metadata.get("choices") or []
        texts = list(choices.values() if isinstance(choices, dict) else choices)
        names = metadata.get("valid_letters") or (list(choices) if isinstance(choices, dict) else None)
        if len(texts) > len(string.ascii_uppercase):
            raise GraderError(f"gpqa: {len(texts)} choices, and letters for {len(string.ascii_uppercase)}")
        self.letters = [str(name).strip().upper() for name in names or string.ascii_uppercase[: len(texts) or 26]]
        self.raw = [str(text).strip() for text in texts]
        self.texts = {normal(text): letter for text, letter in reversed(list(zip(self.raw, self.letters)))}
        self.texts.pop("", None)

    def right(self, label: str | None, metadata: dict[str, Any]) -> str:
        """The letter of the right option: metadata's, else the label as letter, option's text or index from 0."""
        named = str(metadata.get("correct_letter") or "").strip("(). ").upper()
        if named:
            if named not in self.letters:
                raise GraderError(f"gpqa: metadata['correct_letter'] {named!r} is not one of {''.join(self.letters)}")
            return named
        truth = need_label(label, "gpqa").strip()
        letter = truth.strip("().").upper()
        if letter in self.letters:
            return letter
        if normal(truth) in self.texts:
            return self.texts[normal(truth)]
        if truth.isdecimal() and int(truth[:6]) < len(self.raw):
            return self.letters[int(truth[:6])]
        raise GraderError(
            f"gpqa: the label {truth[:80]!r} is neither one of {''.join(self.letters)} nor one of metadata['choices']"
        )

    def read(self, clause: str) -> str | None:
        """The letter that a clause such as "(C) Oslo." chooses."""
        whole = said = plain(clause[:1000])
        while (lead := LEAD.match(said)) is not None:
            said = said[lead.end() :]
        if NEGATED.match(said):
            return ""
        return self.read_text(whole) or self.read_text(said) or self.read_letter(said)

    def read_letter(self, said: str) -> str | None:
        found = LETTER.match(said)
        if found is None:
            return "" if re.match(r"[A-Z]/[A-Z]\b", said) else None
        letter = found[1]
        rest = said[found.end() :]
        ends = not rest or rest[0] in ".,;:!?)<" or BRACKETED.match(said) is not None
        if not ends and (letter.islower() or letter == "I") or REFUSED.match(rest):
            return None
        other = HEDGE.match(rest)
        hedged = other is not None and other[1] in self.letters
        return letter.upper() if letter.upper() in self.letters and not hedged else ""

    def read_text(self, said: str) -> str | None:
        """The option whose text begins the clause, the longest first; "" where "or" and a second option follow."""
        said = normal(said)
        for text in sorted(self.texts, key=len, reverse=True):
            rest = said[len(text) :]
            if said.startswith(text) and re.match(r"\Z|[ .,;:!?()<](?!\d)", rest):
                other = re.match(r"\s*(?:or|,|/)\s*(?:the\s+)?", rest)
                hedged = other and any(rest[other.end() :].startswith(more) for more in self.texts if more != text)
                return "" if hedged else self.texts[text]
        return None

    def chosen(self, response: str) -> str | None:
        text = without_end_of_turn(after_thinking(response)).strip()
        boxed = last_boxed(text)
        if boxed is not None:
            return self.read(boxed)
        if len(text) == 1 and text.isalpha():
            return text.upper()
        for stated in reversed(list(STATED.finditer(text))[-MOST_TRIES:]):
            clause = text[stated.end() : stated.end() + 1000].lstrip(" \t\n*_:").partition("\n")[0]
            if stated["never"]:
                return ""
            if (reading := self.read(clause)) is not None:
                return reading
        if found := [match[1] for match in CORRECT.finditer(text) if match[1] in self.letters]:
            return found[-1]
        if own := self.texts.get(normal(text.rpartition("\n")[2])):
            return own
        lines = [match[1] for match in OWN_LINE.finditer(text) if match[1] in self.letters]
        return lines[-1] if lines else self.alone(text)

    def alone(self, text: str) -> str | None:
        """The last letter on its own; no pronoun or article, none that is called wrong, none of "C or D"."""
        wrong_from = -1
        for match in reversed(list(ALONE.finditer(text))[-MOST_TRIES:]):
            bracket = match[1]
            letter = match[2]
            before = text[max(0, match.start() - 40) : match.start()]
            after = text[match.end() : match.end() + 40]
            if REFUSED.match(after) or DENIED.search(before) or JOINED.fullmatch(text[match.end() : wrong_from]):
                wrong_from = match.start()
            elif letter in self.letters and (bracket or letter != "I" and not (letter == "A" and ARTICLE.match(after))):
                return None if EITHER.search(before) else letter
        return None


def grade_gpqa(response: str, label: str | None, metadata: dict[str, Any], index: int) -> float:
    """1 when the response chooses the right option, by its letter or by its text."""
    options = Options(metadata)
    right = options.right(label, metadata)
    return float(options.chosen(response) == right)
