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
        text = self._text(row.prompt, row, generate=True)
        tokens = self.tokenizer(text, add_special_tokens=not self.apply)["input_ids"]
        if self.max_prompt is not None and len(tokens) > self.max_prompt:
            return None
        return Rendered(text, tokens)

    def supervised(self, row: PromptRow, prompt: Rendered, sample: Sample) -> None:
        """Fills ``sample`` with the row's label as the response (SFT), ending in the end-of-sequence token."""
        if row.label is None:
            raise DataError(f"{row.source}:{row.row}: no label to train on", "name the answer's field with --label-key")
        if self.apply:
            messages = [*_messages(row.prompt), {"role": "assistant", "content": row.label}]
            whole = self._text(messages, row, generate=False)
            if not whole.startswith(prompt.text):
                raise DataError(
                    f"{row.source}:{row.row}: the chat template rewrites the prompt once the answer follows",
                    "use a template whose text only grows (slime doctor --hf-checkpoint checks it)",
                )
            answer = self.tokenizer(whole[len(prompt.text) :], add_special_tokens=False)["input_ids"]
        else:
            answer = [*self.tokenizer(row.label, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id]
        sample.tokens, sample.response, sample.response_length = prompt.tokens + answer, row.label, len(answer)
        sample.status, sample.reward = Status.COMPLETED, 0.0

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
