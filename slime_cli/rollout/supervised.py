"""From a row to an example: the prompt with the answers that are trained. Caller: a supervised phase.

Invariant: nothing empty is trained, and every answer ends in a token that ends generation. What is trained of a
conversation is told by :mod:`slime_cli.rollout.trained`."""

import dataclasses
from typing import Any

from slime_cli.buffer.types import Group, PromptRow, RowError
from slime_cli.errors import DataError
from slime_cli.rollout.boundary import Boundary
from slime_cli.rollout.chat import Rendered, Renderer, Talk, first_answer
from slime_cli.rollout.collector import Buffer
from slime_cli.rollout.trained import Turns


class SupervisedRenderer(Renderer):
    """A renderer that knows the answers."""

    def example(self, row: PromptRow) -> Rendered | None:
        """The prompt with what is trained: the row's label, ending in what stops generation; or, in a conversation that
        holds its answers already, the assistant's turns, which may be more than one example. None when the prompt is
        too long. Raises RowError."""
        if self.apply:
            talk, trained = self._answered(row)
            if self._too_long(self.spelled(talk, self.begun(talk, trained[0])), self.options.training):
                return None
            first, *more = Turns(self, talk).examples(trained)
            full = dataclasses.replace(first, more=tuple(more))
        else:
            prompt = self._prompt(row)
            if self._too_long(prompt, self.options.training):
                return None
            full = self._labelled(row, prompt)
        for part in full.parts:
            tokens = len(part.tokens) + len(part.answer)
            self._check_context(row, tokens, 0, "shorten it, or pass --on-bad-row skip")
        return full

    def _labelled(self, row: PromptRow, prompt: Rendered) -> Rendered:
        """Without a chat template."""
        label = self._label(row)
        end = self.tokenizer.eos_token_id
        if end is None:
            raise DataError(
                f"{row.source}: the tokenizer has no end-of-sequence token to end an answer with",
                "add eos_token to tokenizer_config.json",
            )
        self._refuse(row, label, "the label")
        answer = self._guarded(row, self.tokens.encode, self._marked(row, label))
        return dataclasses.replace(prompt, answer=[*answer, end], response=label)

    def _label(self, row: PromptRow) -> str:
        if row.label is None:
            fix = "name the answer's field with --label-key, or end each conversation with the assistant's turn"
            raise RowError(row, "no_label", "no label to train on", fix)
        if not row.label.strip():
            fix = "give each row an answer, or pass --on-bad-row skip"
            raise RowError(row, "empty_answer", "the label is empty", fix)
        return row.label

    def _answered(self, row: PromptRow) -> tuple[Talk, list[int]]:
        """A conversation with its answers, and the places of those to train."""
        if first_answer(row.prompt) is None:
            talk = self._talk(row, self._label(row))
            return talk, [len(talk.messages) - 1]
        if row.label is not None:
            reason = "it has a label, and a conversation that ends with the assistant's turn"
            raise RowError(row, "two_answers", reason, "leave --label-key out to train on the conversation's own turns")
        talk = self._talk(row)
        return talk, [i for i, message in enumerate(talk.messages) if message["role"] == "assistant"]


def examples(buffer: Buffer[Any, Any], boundary: Boundary, count: int) -> list[Group]:
    """``count`` groups whose samples are their rows' own answers, finished in the buffer; a conversation that fans out
    is one trajectory with a sample for each part."""
    groups = buffer.lease(count, version=0)
    for group in groups:
        made = [sample for leased in group.pending for sample in group.rendered.samples(leased)]
        if fault := next(filter(None, map(boundary.fault, made)), None):
            raise RowError(group.row, "unfit", fault, "fix the row")
        buffer.finish(group, made, {})
    return groups
