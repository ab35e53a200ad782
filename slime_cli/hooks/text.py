"""Text and messages as the run's tokens, for functions of a user's own: prompts, a tool's answer, the next turn.

The tokenizer is that of ``args.hf_checkpoint``, loaded once a process. What a tool, a user or a page says is text: a
control token's characters in it do not become that token, so nobody can end a turn by writing so.
"""

import functools
import pathlib
from typing import Any, Literal

from slime_cli.buffer.types import Sample
from slime_cli.errors import DataError, UsageError
from slime_cli.hooks.protocols import Args
from slime_cli.models import tokens as model_tokens

Messages = str | list[dict[str, Any]]
ControlTokens = Literal["text", "keep"]
"""How the characters of a control token are read: as text, or as the token (``--special-tokens-in-data``)."""


def tokenizer(args: Args) -> Any:
    """The tokenizer of ``args.hf_checkpoint``."""
    return _tokens(_checkpoint(args)).tokenizer


def encode(args: Args, text: str, special_tokens: ControlTokens = "text") -> list[int]:
    """Ids of a text, nothing added before or after it."""
    tokens = _tokens(_checkpoint(args))
    try:
        return tokens.encode(tokens.mark(text) if special_tokens == "text" else text)
    except model_tokens.NotText as error:
        raise DataError(f"a text can't be taken as text: {error}", 'pass special_tokens="keep", or change it') from None


def append_text(args: Args, sample: Sample, text: str, special_tokens: ControlTokens = "text") -> None:
    """Appends what no engine wrote, a tool's answer for instance, to the response. It is not trained.

    ``special_tokens="keep"`` takes the characters of control tokens as those tokens: for the marks that end one turn
    and begin the next, which are yours, not the tool's.
    """
    sample.append(encode(args, text, special_tokens), log_probs=None, version=None, trained=False, text=text)


def render(args: Args, messages: Messages, tools: list[dict[str, Any]] | None = None) -> list[int]:
    """Ids of a conversation as the chat template writes it, with the beginning of the assistant's turn; of a text as
    the tokenizer begins one."""
    tokens = _tokens(_checkpoint(args))
    if isinstance(messages, str):
        return tokens.begin(messages, tokens.mark(messages))
    if not tokens.tokenizer.chat_template:
        raise DataError(f"{args.hf_checkpoint}: the tokenizer has no chat template", "give the prompt as text")
    more = dict(getattr(args, "apply_chat_template_kwargs", None) or {})

    def text(messages: Any, tools: Any) -> str:
        given = more | ({"tools": tools} if tools else {})
        return tokens.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **given)

    marked = text(tokens.mark(messages), tokens.mark(tools))
    if marked.replace(model_tokens.MARK, "") != text(messages, tools):
        found = tokens.found([messages, tools])
        raise DataError(f"a message holds the control token {found}, and the chat template looks for it", "change it")
    return tokens.encode(marked)


def new_sample(args: Args, messages: Messages, label: str | None = None, **metadata: Any) -> Sample:
    """A sample as a generate function gets it, to try one with: ``tokens`` hold the rendered prompt."""
    return Sample(0, 0, prompt=messages, tokens=render(args, messages), label=label, metadata=metadata)


def context_length(args: Args) -> int | None:
    """Tokens of a prompt with its response: the engines' option, else what the checkpoint's config says, if
    anything."""
    given = getattr(args, "sglang_context_length", None)
    checkpoint = getattr(args, "hf_checkpoint", None)
    return given or (None if checkpoint is None else _of_config(str(checkpoint)))


@functools.cache
def _of_config(checkpoint: str) -> int | None:
    from slime_cli.models import architecture

    if not (pathlib.Path(checkpoint) / "config.json").exists():
        return None
    return architecture.context_length(architecture.read_config(checkpoint))


@functools.cache
def _tokens(checkpoint: str) -> model_tokens.Tokens:
    return model_tokens.Tokens(model_tokens.load(checkpoint))


def _checkpoint(args: Args) -> str:
    found = getattr(args, "hf_checkpoint", None)
    if not found:
        raise UsageError("args names no tokenizer", "set args.hf_checkpoint to the folder of a model")
    return str(found)
