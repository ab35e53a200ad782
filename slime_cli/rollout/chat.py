"""From a prompt row to the tokens that an engine is sent: chat template, tokenizer, limits."""

import dataclasses
import os
from typing import Any

from slime_cli.buffer.types import PromptRow, Sample, Status
from slime_cli.errors import DataError, UsageError


@dataclasses.dataclass(frozen=True)
class Rendered:
    """A prompt as text and as token ids."""

    text: str
    tokens: list[int]


class Renderer:
    """One tokenizer with the run's template options."""

    def __init__(self, checkpoint: str, *, apply_chat_template: bool, template_kwargs: dict[str, Any], max_prompt: int | None):
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        from transformers import AutoTokenizer

        try:
            self.tokenizer = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
        except (OSError, ValueError) as error:
            raise DataError(f"{checkpoint}: no tokenizer could be loaded ({error})", "--hf-checkpoint must hold the tokenizer's files") from None
        if apply_chat_template and not self.tokenizer.chat_template:
            raise DataError(
                f"{checkpoint}: the tokenizer has no chat template, and --apply-chat-template asks for one",
                "add chat_template.jinja to the checkpoint, or leave --apply-chat-template out",
            )
        self.apply, self.kwargs, self.max_prompt = apply_chat_template, template_kwargs, max_prompt

    def prompt(self, row: PromptRow) -> Rendered | None:
        """What the engine is to continue; None when it is longer than ``--rollout-max-prompt-len``."""
        answers_from = _begins_to_answer(row.prompt)
        text = self._text(row.prompt if answers_from is None else row.prompt[:answers_from], row, generate=True)
        tokens = self.tokenizer(text, add_special_tokens=not self.apply)["input_ids"]
        if self.max_prompt is not None and len(tokens) > self.max_prompt:
            return None
        return Rendered(text, tokens)

    def supervised(self, row: PromptRow, prompt: Rendered, sample: Sample) -> None:
        """Fills ``sample`` for SFT: the row's label as the answer, ending in the end-of-sequence token; or, for a conversation
        that holds its answers already, all of it with the assistant's turns trained (:meth:`_conversation`)."""
        if row.label is None and _begins_to_answer(row.prompt) is not None:
            answer, sample.loss_mask = self._conversation(row, prompt)
            sample.response = self.tokenizer.decode(answer)
        elif row.label is None:
            fix = "name the answer's field with --label-key, or end each conversation with the assistant's turn"
            raise DataError(f"{row.source}:{row.row}: no label to train on", fix)
        else:
            answer, sample.response = self._answer(row, prompt), row.label
        sample.tokens, sample.response_length = prompt.tokens + answer, len(answer)
        sample.status, sample.reward = Status.COMPLETED, 0.0

    def _answer(self, row: PromptRow, prompt: Rendered) -> list[int]:
        if not self.apply:
            return [*self._tokens(row.label), self.tokenizer.eos_token_id]
        whole = self._text([*_messages(row.prompt), {"role": "assistant", "content": row.label}], row, generate=False)
        return self._tokens(_rest(whole, prompt.text, row))

    def _conversation(self, row: PromptRow, prompt: Rendered) -> tuple[list[int], list[int]]:
        """Tokens after the prompt and their loss mask: 1 in the assistant's turns (what the template adds to end one
        included), 0 in everybody else's and in a turn with ``step_loss_mask: 0``. What follows the last turn is left out."""
        text, tokens, mask = prompt.text, [], []
        for i, message in enumerate(row.prompt):
            if message["role"] != "assistant":
                continue
            before = self._text(row.prompt[:i], row, generate=True)
            after = self._text(row.prompt[: i + 1], row, generate=False)
            between, turn = self._tokens(_rest(before, text, row)), self._tokens(_rest(after, before, row))
            tokens += between + turn
            mask += [0] * len(between) + [int(message.get("step_loss_mask", 1))] * len(turn)
            text = after
        return tokens, mask

    def _tokens(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _text(self, prompt: str | list, row: PromptRow, generate: bool) -> str:
        if not self.apply:
            if isinstance(prompt, str):
                return prompt
            raise DataError(f"{row.source}:{row.row}: the prompt is a list of messages", "pass --apply-chat-template")
        kwargs = dict(self.kwargs)
        if row.metadata.get("tools"):
            kwargs["tools"] = row.metadata["tools"]
        try:
            return self.tokenizer.apply_chat_template(_messages(prompt), tokenize=False, add_generation_prompt=generate, **kwargs)
        except Exception as error:  # templates raise anything: name the row instead
            raise DataError(f"{row.source}:{row.row}: the chat template failed: {error}", "mend the row or the template") from error


def _begins_to_answer(prompt: str | list) -> int | None:
    """Where the assistant's first turn is in a conversation that ends with one; None for anything that is to be continued."""
    if isinstance(prompt, str) or not prompt or prompt[-1].get("role") != "assistant":
        return None
    return next(i for i, message in enumerate(prompt) if message["role"] == "assistant")


def _rest(whole: str, known: str, row: PromptRow) -> str:
    """What the template adds to ``known``. Raises DataError when it changes what it said before."""
    if not whole.startswith(known):
        raise DataError(
            f"{row.source}:{row.row}: the chat template rewrites what came before once a turn follows",
            "use a template whose text only grows (slime doctor --hf-checkpoint checks it)",
        )
    return whole[len(known) :]


def _messages(prompt: str | list) -> list[dict[str, Any]]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def check_lengths(max_response: int | None, context: int | None, max_prompt: int | None) -> None:
    """The longest prompt and answer must fit the model's context."""
    if max_response and context and max_response + (max_prompt or 1) > context:
        raise UsageError(
            f"--rollout-max-prompt-len {max_prompt or 1} + --rollout-max-response-len {max_response} is more than the model's "
            f"{context} positions",
            "lower one of them",
        )
