"""An example as lines of text, token by token: what is read and what is trained. For ``slime doctor`` and
docs/conversations.md."""

import itertools
from collections.abc import Iterator
from typing import Any

from slime_cli.rollout.chat import Rendered

NAMES = ("read", "TRAINED")
SHOWN = str.maketrans({" ": "·", "\n": "\\n", "\t": "\\t"})
HEAD = 4
TAIL = 24
"""Tokens of a long stretch that is only read: those at its ends are shown."""


def lines(tokenizer: Any, example: Rendered, width: int = 80) -> list[str]:
    """Each line begins with what becomes of its tokens. A space is shown as a middle dot, a line break as ``\\n``; a
    space parts two tokens."""
    found = []
    for number, part in enumerate(example.parts, 1):
        if example.more:
            found.append(f"sample {number} of {len(example.parts)}, one trajectory")
        flags = [0] * len(part.tokens) + (part.mask or [1] * len(part.answer))
        ids = iter(part.tokens + part.answer)
        for trained, run in itertools.groupby(flags):
            texts = [_text(tokenizer, token) for token in itertools.islice(ids, len(list(run)))]
            found += _wrapped(NAMES[trained], texts if trained else _shortened(texts), width)
    return found


def _text(tokenizer: Any, token: int) -> str:
    """A token's text; its name in the vocabulary where it is a part of a character."""
    text = tokenizer.decode([token], clean_up_tokenization_spaces=False)
    return (text if "\ufffd" not in text else tokenizer.convert_ids_to_tokens(token)).translate(SHOWN)


def _shortened(texts: list[str]) -> list[str]:
    left_out = len(texts) - HEAD - TAIL
    return texts if left_out < HEAD else [*texts[:HEAD], f"({left_out} more)", *texts[-TAIL:]]


def _wrapped(name: str, texts: list[str], width: int) -> Iterator[str]:
    line = f"{name:8}"
    for text in texts:
        if len(line) + 1 + len(text) > width and line.strip() != name:
            yield line
            line = " " * 8
        line += f" {text}"
    yield line
