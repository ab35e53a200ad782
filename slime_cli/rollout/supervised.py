"""From a row to an example: the prompt with the answers that are trained. Caller: a supervised phase.

Invariants: every trained turn ends in a token that stops generation, nothing empty is trained, and the text of a
conversation only grows, so that what is trained is what the model will have before it when it answers."""

import dataclasses
from typing import Any

from slime_cli.buffer.types import Group, PromptRow, RowError
from slime_cli.errors import DataError
from slime_cli.models.tokens import MARK
from slime_cli.rollout import template
from slime_cli.rollout.boundary import Boundary
from slime_cli.rollout.chat import Rendered, Renderer, Talk, first_answer
from slime_cli.rollout.collector import Buffer

ELSEWHERE = ("loss", "loss_mask", "weight", "train", "trainable")
"""Names that other tools give the field of a message that says if it is trained; slime's is ``step_loss_mask``."""


class SupervisedRenderer(Renderer):
    """A renderer that knows the answers."""

    def example(self, row: PromptRow) -> Rendered | None:
        """The prompt with what is trained: the row's label, ending in what stops generation; or, in a conversation that
        holds its answers already, the assistant's turns. None when the prompt is too long. Raises RowError."""
        talk = text = trained = None
        if self.apply:
            talk, trained = self._answered(row)
            text = self._begun(talk, trained[0])
            opening = self._spelled(talk, text)
        else:
            opening = self._prompt(row)
        if self._too_long(opening, self.options.training):
            return None
        if not opening.tokens:
            reason = "nothing comes before the answer, so its first token cannot be predicted"
            raise RowError(row, "no_prompt", reason, "begin with a prompt")
        if talk is None or text is None or trained is None:
            full = self._labelled(row, opening)
        else:
            full = self._turns(talk, opening, text, trained)
        self._check_context(row, len(full.tokens) + len(full.answer), 0, "shorten it, or pass --on-bad-row skip")
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

    def _turns(self, talk: Talk, opening: Rendered, text: str, trained: list[int]) -> Rendered:
        """Tokens after the prompt and their mask: 1 in the trained turns (what ends one included), 0 in everybody
        else's and in a turn with ``step_loss_mask: 0``. What follows the last turn is left out."""
        tokens = []
        mask = []
        open_turn = False
        for i in trained:
            before = text if i == trained[0] else self._text(talk, i, generate=True)
            after = self._text(talk, i + 1, generate=False)
            between = self._encode(talk, _rest(before, text, talk.row))
            turn = _rest(after, before, talk.row)
            if open_turn:
                self._required_end(talk, between)
            weight = self._weight(talk, i)
            ids = self._encode(talk, turn)
            if weight:
                self._check_answer(talk, i, turn, after)
            tokens += between + ids
            mask += [int(open_turn and k == 0) for k in range(len(between))] + [weight] * len(ids)
            open_turn = bool(weight) and not self._ended(turn, ids)
            text = after
        if open_turn:
            tokens.append(self._required_end(talk, self._following(talk, trained[-1])))
            mask.append(1)
        if not any(mask):
            reason = "no turn of it is to be trained (step_loss_mask)"
            raise RowError(talk.row, "empty_answer", reason, "leave the row out")
        response = self.tokenizer.decode(tokens) if talk.row.label is None else talk.row.label
        return dataclasses.replace(opening, answer=tokens, mask=None if all(mask) else mask, response=response)

    def _weight(self, talk: Talk, i: int) -> int:
        """1 for a turn that is trained, 0 for one with ``step_loss_mask: 0``. Other tools' names for that are refused
        where they say anything else than 1: nothing here would read them."""
        message = talk.messages[i]
        fix = "say step_loss_mask: 0 for a turn that is not trained, 1 for one that is"
        for name in ELSEWHERE:
            if message.get(name, 1) not in (1, None):
                reason = f"message {i + 1} has {name}: {message[name]!r}, which nothing here reads"
                raise RowError(talk.row, "loss_mask", reason, fix)
        weight = message.get("step_loss_mask", 1)
        if weight not in (0, 1):
            raise RowError(talk.row, "loss_mask", f"message {i + 1} has step_loss_mask: {weight!r}", fix)
        return int(weight)

    def _ended(self, turn: str, ids: list[int]) -> bool:
        """True when the template ended the turn: with a token that stops generation, with another control token, or a
        stop text."""
        if any(turn.rstrip().endswith(text.rstrip()) for text in self.options.stop_texts):
            return True
        while ids and not self.tokenizer.decode(ids[-1:]).strip():
            ids = ids[:-1]
        return bool(ids) and (ids[-1] in self.stops or ids[-1] in self.tokens.ids)

    def _following(self, talk: Talk, i: int) -> list[int]:
        """Tokens that the template writes after turn ``i``, whoever is next: a tool that was called, or the user.

        Where another turn changes this one (its reasoning is left out then), those after a turn without reasoning.
        """
        calls = talk.messages[i].get("tool_calls")
        bare = {"role": "assistant", "content": "?"} | ({"tool_calls": calls} if calls else {})
        for role in ("tool", "user") if calls else ("user",):
            for messages in (talk.messages[: i + 1], [{"role": "user", "content": "?"}, bare]):
                ids = self._encode(talk, self._next_turn(talk, messages, role))
                if ids and ids[0] in self.stops:
                    return ids
        return []

    def _next_turn(self, talk: Talk, messages: list[dict[str, Any]], role: str) -> str:
        """The text that the template adds for one more message; nothing where it changes what was there, or refuses."""
        try:
            whole = self._render(talk.row, messages, talk.tools, False)
            longer = self._render(talk.row, [*messages, {"role": role, "content": "?"}], talk.tools, False)
        except RowError:
            return ""
        return longer[len(whole) :] if longer.startswith(whole) else ""

    def _required_end(self, talk: Talk, following: list[int]) -> int:
        """The token that stops generation where the template writes none in the turn: the next role's marker."""
        if following and following[0] in self.stops:
            return following[0]
        named = ", ".join(repr(self.tokenizer.decode([i])) for i in sorted(self.stops)) or "no token"
        reason = f"nothing that the chat template writes ends the assistant's turn (generation stops at {named})"
        raise RowError(talk.row, "no_end", reason, template.END_FIX)

    def _check_answer(self, talk: Talk, i: int, turn: str, after: str) -> None:
        """Raises RowError for an answer to train that is empty, or that the template leaves out."""
        message = talk.messages[i]
        content = message["content"] or ""
        calls = message.get("tool_calls")
        shown = content.rpartition("</think>")[2].strip() or content.strip()
        if shown and shown in turn.replace(MARK, ""):
            return
        fix = "give it an answer, step_loss_mask: 0, or pass --on-bad-row skip"
        if not shown and not calls and not message.get("reasoning_content"):
            raise RowError(talk.row, "empty_answer", f"the assistant's answer in message {i + 1} is empty", fix)
        bare = [*talk.messages[:i], {"role": "assistant", "content": ""}]
        if self._render(talk.row, bare, talk.tools, False) != after.replace(MARK, ""):
            return
        if shown:
            raise RowError(
                talk.row, "empty_answer", f"the chat template leaves out the assistant's answer in message {i + 1}", fix
            )


def examples(buffer: Buffer[Any, Any], boundary: Boundary, count: int) -> list[Group]:
    """``count`` groups whose samples are their rows' own answers, finished in the buffer."""
    groups = buffer.lease(count, version=0)
    for group in groups:
        for sample in group.pending:
            group.rendered.fill(sample)
            if fault := boundary.fault(sample):
                raise RowError(group.row, "unfit", fault, "fix the row")
        buffer.finish(group, group.pending, {})
    return groups


def _rest(whole: str, known: str, row: PromptRow) -> str:
    """The text that the template adds to ``known``. Raises RowError when it changes what it said before."""
    if not whole.startswith(known):
        reason = "the chat template rewrites what came before once a turn follows"
        fix = "use a template whose text only grows (slime doctor --hf-checkpoint checks it), or pass --on-bad-row skip"
        raise RowError(row, "rewritten", reason, fix)
    return whole[len(known) :]
