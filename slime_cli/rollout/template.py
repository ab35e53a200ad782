"""Reads a checkpoint's chat template without a tokenizer: how it renders, and what ends an assistant's turn.

Torch-free, and quick (JSON files and jinja2): for the commands that look at a checkpoint before anything starts. The
template is rendered as transformers does it, on a conversation of our own.
"""

import dataclasses
import datetime
import json
import os
import pathlib
import re
from collections.abc import Callable
from typing import Any

from slime_cli.errors import DataError
from slime_cli.manifests import read_json

Render = Callable[[list[dict[str, Any]], bool], str]
"""``(messages, add_generation_prompt) -> text``"""

CONVERSATION = [
    {"role": "system", "content": "You add numbers."},
    {"role": "user", "content": "2+2="},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And 3 more?"},
    {"role": "assistant", "content": "7"},
]
ALSO_STOPS = ("<|eom_id|>",)
"""SGLang ends an answer at these in any model that has them."""


def _optional(path: pathlib.Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def read(folder: pathlib.Path) -> tuple[str | None, dict[str, str]]:
    """The default template, if any, and the special tokens that it may use. Raises ValueError for unreadable files."""
    config = _optional(folder / "tokenizer_config.json")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    if (folder / "chat_template.jinja").exists():
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    tokens = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if value is not None:
            tokens[name] = value
    return template, tokens


def renderer(template: str, tokens: dict[str, str]) -> Render:
    """Raises jinja2.TemplateSyntaxError."""
    import jinja2.ext
    import jinja2.sandbox

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = lambda value, indent=None, **_: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime(2026, 1, 1).strftime(form)
    # A tag of transformers' own that marks what the assistant said; it adds no text.
    template = re.sub(r"\{%([-+]?)\s*(?:end)?generation\s*([-+]?)%\}", r"{#\1 \2#}", template)
    compiled = environment.from_string(template)
    return lambda messages, prompt: compiled.render(messages=messages, add_generation_prompt=prompt, **tokens)


def first_rewrite(render: Render, messages: list[dict[str, Any]]) -> str:
    """Where a later message changes text that was already rendered, in words; empty when the template only appends.

    For each k: rendering ``messages[:k]``, with the generation prompt where the assistant is next, is a prefix of
    rendering ``messages[:k + 1]``. Where it is not, tokens that the model saw differ from those of a later render.
    """
    first = 2 if messages[0]["role"] == "system" else 1
    for k in range(first, len(messages)):
        before = render(messages[:k], messages[k]["role"] == "assistant")
        after = render(messages[: k + 1], False)
        if not after.startswith(before):
            at = len(os.path.commonprefix([before, after]))
            was = before[at:][:40]
            now = after[at:][:40]
            return f"message {k + 1} ({messages[k]['role']}) changes what precedes it: {was!r} becomes {now!r}"
    return ""


def stop_ids(folder: pathlib.Path) -> set[int]:
    """Token ids at which an engine ends an answer, from config.json and generation_config.json. Raises ValueError."""
    config = _optional(folder / "config.json")
    found: set[int] = set()
    for values in (config, config.get("text_config") or {}, _optional(folder / "generation_config.json")):
        ids = values.get("eos_token_id")
        found |= {ids} if isinstance(ids, int) else set(ids or ())
    return found


def _vocabulary(folder: pathlib.Path) -> tuple[dict[int, str], set[str]]:
    """Id -> text of the tokens that are added to the vocabulary, or in it as whole; and which of them are special."""
    file = _optional(folder / "tokenizer.json")
    added = list(file.get("added_tokens") or ())
    decoder = _optional(folder / "tokenizer_config.json").get("added_tokens_decoder") or {}
    added += [token | {"id": int(number)} for number, token in decoder.items()]
    vocabulary = (file.get("model") or {}).get("vocab") or {}
    texts = (
        vocabulary.items() if isinstance(vocabulary, dict) else ((entry[0], i) for i, entry in enumerate(vocabulary))
    )
    return (
        {number: text for text, number in texts} | {token["id"]: token["content"] for token in added},
        {token["content"] for token in added if token.get("special")},
    )


@dataclasses.dataclass(frozen=True)
class TurnEnd:
    """The text that ends an assistant's turn in a chat template."""

    kind: str
    """``stop``: a token that ends generation. ``next``: the marker of the next role does, and the template writes none
    before it. ``other``: a control token that does not end generation. ``none``: nothing."""
    text: str
    """The token's text; empty for ``none``."""
    stops: tuple[str, ...]
    """Texts of the tokens that end generation."""

    def problem(self) -> str:
        """In words; empty when the end of a turn ends generation."""
        named = " or ".join(map(repr, self.stops)) or "no token at all (there is no eos_token_id)"
        if self.kind == "other":
            return f"it ends a turn with {self.text!r}, and generation stops at {named}"
        if self.kind == "none":
            return (
                f"nothing in it ends the assistant's turn: generation stops at {named}, which it does not write there"
            )
        return ""


def turn_end(folder: pathlib.Path) -> TurnEnd | None:
    """None where it cannot be known: no template that renders (doctor's other findings say why), or a stop without a
    text. Raises ValueError for unreadable files."""
    template, tokens = read(folder)
    if template is None:
        return None
    texts, special = _vocabulary(folder)
    ids = stop_ids(folder)
    stops = {texts[number] for number in ids if number in texts}
    stops |= {tokens["eos_token"]} if "eos_token" in tokens else set()
    stops |= {text for text in ALSO_STOPS if text in special}
    messages = [{"role": "user", "content": "Which word?"}, {"role": "assistant", "content": "Turnstile"}]
    try:
        render = renderer(template, tokens)
        whole = render(messages, False)
        longer = render([*messages, {"role": "user", "content": "Another?"}], False)
    except Exception:  # a template may raise anything: check_chat_template reports it
        return None
    end = whole.rpartition("Turnstile")[2].strip()
    following = longer.removeprefix(whole).lstrip() if longer.startswith(whole) else ""
    found = _turn_end(end, following, stops, special)
    unknown = any(number not in texts for number in ids) or (end and not stops - set(ALSO_STOPS))
    return None if unknown and found.kind in ("other", "none") else found


def _turn_end(end: str, following: str, stops: set[str], special: set[str]) -> TurnEnd:
    named = tuple(sorted(stops))
    if stop := next((text for text in named if end.endswith(text)), None):
        return TurnEnd("stop", stop, named)
    if stop := next((text for text in named if following.startswith(text)), None):
        return TurnEnd("next", stop, named)
    if other := next((text for text in special if end.endswith(text)), None):
        return TurnEnd("other", other, named)
    return TurnEnd("none", "", named)


def require_end(folder: pathlib.Path) -> None:
    """For supervised training with the template. Raises DataError when nothing that is trained could end an answer."""
    try:
        found = turn_end(folder)
    except ValueError as error:
        raise DataError(str(error), "download the checkpoint again") from None
    if found is not None and found.kind == "none":
        raise DataError(f"{folder}: the chat template: {found.problem()}", END_FIX)


END_FIX = (
    "put the id of the token that ends a turn (of the next role's marker, for a template that writes no end) into "
    "eos_token_id of generation_config.json, or take a template that writes one"
)
