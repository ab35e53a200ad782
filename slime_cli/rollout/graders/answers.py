r"""What the graders share: the label, and which part of a response is the answer.

Every function reads its text once, so that a response of any kind costs time in proportion to its length.
"""

import re

BOX = re.compile(
    r"\\(?:boxed|fboxed|fbox)\s*(?:(?P<open>\{)|(?P<bare>[-+]?\d[\d.,/]*|[A-Za-z](?![A-Za-z])))?|\\.|[{}]", re.DOTALL
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


def last_boxed(text: str) -> str | None:
    r"""The inside of the last complete ``\boxed{...}`` or ``\fbox{...}``, braces balanced; None when there is none.

    Without braces the box holds the number or the letter that follows, as models mean it.
    """
    opened: list[int | None] = []
    begin, inside = -1, None
    for match in BOX.finditer(text):
        if match["bare"] is not None:
            begin, inside = match.start("bare"), match["bare"].rstrip(".,")
        elif match["open"]:
            opened.append(match.end())
        elif match[0] == "{":
            opened.append(None)
        elif match[0] == "}" and opened:
            start = opened.pop()
            if start is not None and start > begin:
                begin, inside = start, text[start : match.start()].strip()
    return inside


def after_thinking(text: str) -> str:
    """What follows the last ``</think>``; everything when there is none."""
    return text.rpartition("</think>")[2]


def without_end_of_turn(text: str) -> str:
    """``text`` without the special tokens at its end, which some callers keep."""
    while (match := END_OF_TURN.search(text, max(0, len(text) - 200))) is not None:
        text = text[: match.start()]
    return text
