"""Where prompts enter generation and answers leave it: what may pass, and what an answer's text is to whoever judges
it.

Made once a phase; the generator and the supervised phase ask it. Invariants: no token id beyond the model's embedding
reaches an engine (one ends SGLang's scheduler) or a batch; every sample that passes can be stored and trained; its
tokens are as sampled, its ``response`` is the answer's text without what ends a turn, whatever
``--rollout-skip-special-tokens`` says.

What ends a turn: the end-of-sequence and padding tokens of tokenizer and generation config, what the chat template puts
after an assistant's text, and the special tokens among ``--rollout-stop-token-ids``. Texts that the user named as a
stop are another matter: a format reward looks for ``</answer>``, so they stay in ``response``, and only the built-in
graders that compare a whole text do without them (:func:`slime_cli.rewards.rewards.without_stops`).
"""

import dataclasses
import math
import pathlib
from collections.abc import Callable
from typing import Any

from slime_cli.buffer.types import PromptRow, RowError, Sample
from slime_cli.rollout import template


@dataclasses.dataclass(frozen=True)
class Boundary:
    """As it is without a tokenizer: lengths and numbers are checked, texts are left alone."""

    rows: int | None = None
    """How many the model's embedding has; None leaves ids unchecked."""
    ends: dict[int, str] = dataclasses.field(default_factory=dict)
    """Token that ends a turn -> its text in a response; empty where special tokens are left out of it."""
    stops: tuple[str, ...] = ()
    """Texts that end an answer because the user named them."""
    columns: tuple[str, ...] = ()
    """Fields that a sample must have to be trained."""
    tokenizer: Any = None

    @classmethod
    def of(cls, tokenizer: Any, model: str, rows: int | None, args: Any, columns: tuple[str, ...] = ()) -> "Boundary":
        """``model``: the HF folder, for its generation config. ``args``: options by dest."""
        named = args.rollout_stop_token_ids or []
        special = special_ids(tokenizer)
        ends = turn_ends(tokenizer, model) | {i for i in named if i in special}

        def text(token: int) -> str:
            return tokenizer.decode([token], skip_special_tokens=args.rollout_skip_special_tokens)

        plain = [text(i) for i in named if i not in ends and 0 <= i < (rows or math.inf)]
        stops = [args.rollout_stop] if isinstance(args.rollout_stop, str) else args.rollout_stop or []
        return cls(rows, {i: text(i) for i in sorted(ends)}, tuple(filter(None, [*stops, *plain])), columns, tokenizer)

    def checked(self, render: Callable[[PromptRow], Any]) -> Callable[[PromptRow], Any]:
        """``render``, whose prompts and answers pass."""

        def call(row: PromptRow) -> Any:
            found = render(row)
            for part in () if found is None else found.parts:
                self.prompt(row, [*part.tokens, *part.answer])
            return found

        return call

    def prompt(self, row: PromptRow, tokens: list[int]) -> None:
        """Raises RowError for a prompt that no engine may be sent."""
        if not tokens:
            raise RowError(row, "no_prompt", "the prompt has no token", "fix the row, or pass --on-bad-row skip")
        if self.rows is not None and not 0 <= min(tokens) <= max(tokens) < self.rows:
            wrong = next(i for i in tokens if not 0 <= i < self.rows)
            raise RowError(
                row,
                "beyond_vocabulary",
                f"it has token {wrong}{self._name(wrong)}, and the model's embedding has {self.rows} rows",
                "the tokenizer has more tokens than the model: take the model's own, or pass --on-bad-row skip",
            )

    def _name(self, token: int) -> str:
        return "" if self.tokenizer is None or token < 0 else f" ({self.tokenizer.convert_ids_to_tokens(token)!r})"

    def fault(self, sample: Sample, trained: bool = True) -> str | None:
        """Why the sample can't be stored or trained (``trained=False``: is only judged); None when it can."""
        try:
            sample.check(self.rows)
        except (ValueError, TypeError) as error:
            return str(error)
        if trained and sample.response_length == len(sample.tokens) > 0:
            return f"sample {sample.index} has no prompt token: nothing predicts its first response token"
        missing = [name for name in self.columns if trained and getattr(sample, name) is None]
        return f"sample {sample.index} has no {missing[0]}, which the options need" if missing else None

    def strip(self, sample: Sample) -> None:
        """Takes what ends a turn, and white space after it, off the end of ``response``."""
        text = rest = sample.response
        for token in reversed(sample.tokens[len(sample.tokens) - sample.response_length :]):
            if token in self.ends:
                text = rest = rest.removesuffix(self.ends[token])
            elif self.tokenizer is not None and (space := self.tokenizer.decode([token])).isspace():
                rest = rest.removesuffix(space)
            else:
                break
        sample.response = text


def special_ids(tokenizer: Any) -> set[int]:
    """Tokens that no text of a user is meant to become. ``</think>`` and the marks of tool calls are none in most
    models."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}


def turn_ends(tokenizer: Any, model: str) -> set[int]:
    """Tokens at which an engine or the template ends an assistant's turn, and padding."""
    folder = pathlib.Path(model)
    found = template.stop_ids(folder) | ({tokenizer.eos_token_id, tokenizer.pad_token_id} - {None})
    end = template.turn_end(folder)
    texts = (*template.ALSO_STOPS, end.text if end else "")
    return found | {tokenizer.added_tokens_encoder[text] for text in texts if text in tokenizer.added_tokens_encoder}
