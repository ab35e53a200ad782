r"""Parts that the graders share: the label, and the part of a response that is the answer.

Every function reads its text once, so that a response of any kind costs time in proportion to its length.
"""

import re

BOX = re.compile(
    r"\\(?:boxed|fboxed|fbox)\s*(?:(?P<open>\{)|(?P<bare>[-+]?\d+(?:[.,/]\d+)*|[A-Za-z](?![A-Za-z])))?|\\.|[{}]",
    re.DOTALL,
)
END_OF_TURN = re.compile(r"(?:<\|[^|<>\s]{1,60}\|>|<｜[^｜<>\s]{1,60}｜>|</s>|<(?:eos|end_of_turn|turn\|)>)\s*\Z")


class GraderError(Exception):
    """This sample cannot be graded; the message says what is missing or broken."""


def need_label(label: str | None, rm_type: str) -> str:
    if label is None:
        raise GraderError(f"rm_type {rm_type!r} needs a label and the sample has none (see --label-key)")
    if not str(label).strip():
        raise GraderError(f"rm_type {rm_type!r} needs a label and this sample's is empty")
    return str(label)


def boxes(text: str) -> list[slice]:
    r"""The insides of the complete ``\boxed{...}`` and ``\fbox{...}``, braces balanced, in order.

    Without braces the box holds the number or the letter that follows, as models mean it.
    """
    opened: list[int | None] = []
    found: list[tuple[int, int]] = []
    for match in BOX.finditer(text):
        if match["bare"] is not None:
            found.append(match.span("bare"))
        elif match["open"]:
            opened.append(match.end())
        elif match[0] == "{":
            opened.append(None)
        elif match[0] == "}" and opened and (start := opened.pop()) is not None:
            found.append((start, match.start()))
    return [slice(*span) for span in sorted(found)]


def last_boxed(text: str) -> str | None:
    r"""The inside of the last complete ``\boxed{...}``; None when there is none."""
    found = boxes(text)
    return text[found[-1]].strip() if found else None


def all_boxed(text: str) -> str | None:
    """The insides of the last 20 boxes as one list, each text once; None when there is none."""
    return ", ".join(dict.fromkeys(text[place].strip() for place in boxes(text)[-20:])) or None


def after_thinking(text: str) -> str:
    """The text after the last ``</think>``; everything when there is none."""
    return text.rpartition("</think>")[2]


def without_end_of_turn(text: str) -> str:
    """``text`` without the special tokens at its end, which some callers keep."""
    while (match := END_OF_TURN.search(text, max(0, len(text) - 200))) is not None:
        text = text[: match.start()]
    return text
