"""From text to token ids. Invariants: only what the template (or the tokenizer) wrote becomes a control token, and
there is one beginning-of-sequence token at most. Callers: :mod:`slime_cli.rollout.chat`, :mod:`slime_cli.hooks`.

A control token is one that the tokenizer marks as special, or whose text has the form ``<|...|>``. Its text in a row's
own strings is marked before the template sees them: a noncharacter goes after its first character
(:meth:`Tokens.mark`), so the template renders the row as ever, and what matches a control token afterwards is the
template's. Such a text is encoded by a copy of the tokenizer in which the control tokens have names that no text can
hold; rows without a mark take the tokenizer itself."""

import functools
import json
import os
import re
from typing import Any

from slime_cli.errors import DataError

MARK = "\ufdd0"
"""A noncharacter of Unicode: never part of a text that is exchanged."""
SHAPE = re.compile(r"<[|\uff5c].*[|\uff5c]>")
MARKUP = re.compile(
    r"</?(think|thinking|answer|tool|tools|tool_call|tool_calls|tool_response|function|arg_key|arg_value)>"
)
"""What answers are written in, though some tokenizers mark it as special."""


class NotText(Exception):
    """A row's string cannot be taken as text; the message says why."""


def load(checkpoint: str) -> Any:
    """The tokenizer of a checkpoint folder. Raises DataError."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
    except Exception as error:  # its own library raises plain exceptions for a file that it can't read
        raise DataError(
            f"{checkpoint}: no tokenizer could be loaded ({error})", "--hf-checkpoint must hold the tokenizer's files"
        ) from None


class Tokens:
    """A tokenizer and its control tokens."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.control = control_tokens(tokenizer)
        """Text -> id."""
        self.ids = frozenset(self.control.values()) - {tokenizer.unk_token_id}
        """Without the one for what the tokenizer has no token for: any text may hold that."""
        longest_first = sorted(self.control, key=len, reverse=True)
        self._whole = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._heads = {text[:k] for text in self.control for k in range(2, len(text))}
        self._tails = {text[k:] for text in self.control for k in range(1, len(text) - 1)}
        self._widest = max(map(len, self.control), default=0)
        self.before = _added_before(tokenizer)
        """What the tokenizer puts before a text: nothing, or the beginning-of-sequence token."""

    def found(self, value: Any) -> str | None:
        """The first control token whose text is in a string of ``value``."""
        return next((match[0] for text in strings(value) if (match := self._whole.search(text))), None)

    def places(self, text: str) -> list[re.Match[str]]:
        """The control tokens of a text."""
        return list(self._whole.finditer(text))

    def mark(self, value: Any) -> Any:
        """``value`` with every control token in its strings marked, and every half of one at their ends. Raises
        NotText."""
        if isinstance(value, str):
            return self._mark(value)
        if isinstance(value, list):
            return [self.mark(part) for part in value]
        if isinstance(value, dict):
            return {self.mark(key): self.mark(part) for key, part in value.items()}
        return value

    def _mark(self, text: str) -> str:
        if MARK in text:
            raise NotText("the text holds U+FDD0, which is no character")
        places = {match.start() + 1 for match in self._whole.finditer(text)}
        for length in range(2, min(len(text), self._widest - 1) + 1):
            if text[-length:] in self._heads:
                places.add(len(text) - length + 1)
            if text[:length] in self._tails:
                places.add(0)
        for place in sorted(places, reverse=True):
            text = text[:place] + MARK + text[place:]
        return text

    def begin(self, text: str, marked: str) -> list[int]:
        """Ids of a text that nothing comes before: with the beginning-of-sequence token, where the tokenizer adds one.

        ``marked`` is the text or its marked form, of which a beginning-of-sequence token at its very start stays that
        token."""
        first = self.tokenizer.bos_token
        if self.before and first and text.startswith(first):
            marked = first + marked.removeprefix(first[0] + MARK + first[1:]).removeprefix(first)
        ids = self.encode(marked)
        return ids if ids[: len(self.before)] == self.before else self.before + ids

    def encode(self, marked: str) -> list[int]:
        """Ids of a text with or without marks, and nothing added. Raises NotText."""
        if MARK not in marked:
            return self.tokenizer(marked, add_special_tokens=False)["input_ids"]
        names, core = self._renamed
        own: list[int] = []

        def rename(match: re.Match) -> str:
            own.append(self.control[match[0]])
            return names[match[0]]

        pieces = []
        last = 0
        for match in self._whole.finditer(marked):
            pieces += [marked[last : match.start()].replace(MARK, ""), rename(match)]
            last = match.end()
        pieces.append(marked[last:].replace(MARK, ""))
        ids = core.encode("".join(pieces), add_special_tokens=False).ids
        if [i for i in ids if i in self.ids] != [i for i in own if i in self.ids]:
            raise NotText("this tokenizer cannot write the text of a control token")
        return ids

    @functools.cached_property
    def _renamed(self) -> tuple[dict[str, str], Any]:
        """New names of the control tokens, and the tokenizer that has them in place of the old ones."""
        from tokenizers import Tokenizer

        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise NotText("this tokenizer cannot write the text of a control token: it has no tokenizer.json")
        names = {text: f"{MARK}{number}{MARK}" for number, text in enumerate(self.control)}
        core = Tokenizer.from_str(json.dumps(_rename(json.loads(backend.to_str()), names)))
        core.no_truncation()
        core.no_padding()
        if any(core.token_to_id(names[text]) != number for text, number in self.control.items()):
            raise NotText(
                "this tokenizer cannot write the text of a control token: its control tokens cannot be renamed"
            )
        return names, core


def _rename(tokenizer: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """The content of a tokenizer.json with other names for some tokens; their ids stay."""
    for token in tokenizer["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = tokenizer["model"]
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(text, text): number for text, number in vocabulary.items()}
    elif isinstance(vocabulary, list):
        model["vocab"] = [[names.get(text, text), score] for text, score in vocabulary]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    return tokenizer


def control_tokens(tokenizer: Any) -> dict[str, int]:
    """Text -> id of every token that steers a model and is no text of an answer."""
    found = {
        token.content: number
        for number, token in tokenizer.added_tokens_decoder.items()
        if token.special or SHAPE.fullmatch(token.content)
    }
    found |= dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    return {text: number for text, number in found.items() if len(text) > 1 and not MARKUP.fullmatch(text)}


def _added_before(tokenizer: Any) -> list[int]:
    """Ids that the tokenizer puts before a text (what it puts after one would end a prompt, and is never wanted)."""
    alone = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    starts = range(len(whole) - len(alone) + 1)
    return whole[: next((k for k in starts if whole[k : k + len(alone)] == alone), 0)]


def strings(value: Any):
    """Every string in a value of JSON, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for part in value:
            yield from strings(part)
    elif isinstance(value, dict):
        for key, part in value.items():
            yield key
            yield from strings(part)
