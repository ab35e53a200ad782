"""The turns of a conversation that are trained, each after what the model has before it when it is asked for that turn.

Invariants: a turn's tokens follow those of the prompt that an engine would be given for it (``--opened-thinking cut``
leaves out of that prompt what the template's own turn has not); every trained turn ends in a token that ends a turn;
all of a message is in what is trained of it, and the messages before it are in its context, or the row is refused.
Where the template rewrites earlier turns the conversation fans out: one example for each stretch of turns in which the
text only grows; or the turns are kept as they were trained (``--on-rewritten-turns keep``)."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from slime_cli.buffer.types import RowError
from slime_cli.models.tokens import MARK, strings
from slime_cli.rollout import forms, reasoning, template
from slime_cli.rollout.forms import Messages

if TYPE_CHECKING:
    from slime_cli.rollout.chat import Rendered, Renderer, Talk

ELSEWHERE = ("loss", "loss_mask", "weight", "train", "trainable")
"""Names that other tools give the field of a message that says if it is trained; slime's is ``step_loss_mask``."""
SENTINEL = "\ufdd1"
"""A noncharacter, as :data:`slime_cli.models.tokens.MARK`: it shows where a template writes a message's content."""
REASONING = (
    "put it where the template reads it (reasoning_content, or <think>...</think> in content), take it out, or pass "
    "--on-bad-row skip"
)
ANOTHER = "take the template of the model's instruct version, step_loss_mask: 0 or --on-bad-row skip"


@dataclasses.dataclass(frozen=True)
class Turn:
    """Both as the template writes them, with marks."""

    before: str
    answer: str


@dataclasses.dataclass
class Stretch:
    """Turns whose text only grows."""

    opening: "Rendered"
    text: str
    tokens: list[int] = dataclasses.field(default_factory=list)
    mask: list[int] = dataclasses.field(default_factory=list)
    open: int | None = None
    """The last turn, where the template writes no end of it: the next role's marker is that."""

    def add(self, ids: list[int], trained: int) -> None:
        self.tokens += ids
        self.mask += [trained] * len(ids)


class Turns:
    """One conversation's."""

    def __init__(self, renderer: "Renderer", talk: "Talk"):
        self.renderer = renderer
        self.talk = talk
        self._stops = [text for text, token in renderer.tokens.control.items() if token in renderer.stops]

    def examples(self, places: list[int]) -> list["Rendered"]:
        """The trained turns among ``places`` of the messages, one example for each stretch. Raises RowError."""
        stretches: list[Stretch] = []
        seen = 0
        for i in [i for i in places if self._weight(i)]:
            turn = self._turn(i)
            self._check_context(seen, i, turn.before)
            if not stretches:
                stretches.append(self._begin(turn.before))
            elif turn.before.startswith(stretches[-1].text):
                self._continue(stretches[-1], turn.before[len(stretches[-1].text) :])
            elif self.renderer.options.rewritten_turns == "keep":
                self._continue(stretches[-1], self._between(stretches[-1], seen, i, turn.before))
            else:
                stretches.append(self._begin_again(turn.before))
            self._add(stretches[-1], i, turn)
            seen = i
        if not stretches:
            self._refuse("empty_answer", "no turn of it is to be trained (step_loss_mask)", "leave the row out")
        return [self._finished(stretch) for stretch in stretches]

    def _refuse(self, kind: str, reason: str, fix: str) -> None:
        raise RowError(self.talk.row, kind, reason, fix)

    # -- stretches ---------------------------------------------------------------------------------------------------

    def _begin_again(self, before: str) -> Stretch:
        if self.renderer.options.rewritten_turns == "refuse":
            reason = "the chat template rewrites earlier turns once later ones follow"
            self._refuse(
                "rewritten", reason, "--on-rewritten-turns fan-out makes a sample of each part, keep one of all"
            )
        return self._begin(before)

    def _begin(self, before: str) -> Stretch:
        opening = self.renderer.spelled(self.talk, before)
        if not opening.tokens:
            reason = "nothing comes before the answer, so its first token cannot be predicted"
            self._refuse("no_prompt", reason, "begin with a prompt")
        return Stretch(opening, before)

    def _continue(self, stretch: Stretch, text: str) -> None:
        """With what others say between two trained turns."""
        between = self.renderer.encode(self.talk, text)
        if stretch.open is not None:
            self._required_end(between)
            stretch.add(between[:1], 1)
            between = between[1:]
        stretch.add(between, 0)

    def _between(self, stretch: Stretch, i: int, j: int, before: str) -> str:
        """The text between the turns ``i`` and ``j`` where turn ``i`` is kept as it was trained: from its end in a
        rendering in which its content is a sentinel, to the end of the prompt for turn ``j``."""

        def marked(messages: Messages) -> Messages:
            kept = reasoning.without(messages[i]) | {"content": SENTINEL}
            return [*messages[:i], kept, *messages[i + 1 : j]]

        tail = self.renderer.written(self.talk, marked, generate=True).partition(SENTINEL)[2]
        prompt = self._end(self.renderer.begun(self.talk, j))
        found = self.renderer.tokens.places(tail)
        ends = {self._end(stretch.text)} if stretch.open is None else set(self._stops)
        if not any(place[0] in ends for place in found) and not forms.calls(self.talk.messages[i]):
            ends = {place[0] for place in found[:1]}  # another token than that of a last turn
        end = next((place for place in found if place[0] in ends), None)
        if end is None or not tail.endswith(prompt):
            reason = f"the chat template writes no end of message {i + 1} that what follows could be put after"
            raise RowError(self.talk.row, "rewritten", reason, "--on-rewritten-turns fan-out makes a sample of each")
        tail = tail[: len(tail) - len(prompt)] + self._end(before)
        return tail[end.start() if stretch.open is not None else end.end() :]

    def _add(self, stretch: Stretch, i: int, turn: Turn) -> None:
        ids = self.renderer.encode(self.talk, turn.answer)
        stretch.add(ids, 1)
        stretch.open = None if self._ended(turn.answer, ids) else i
        stretch.text = turn.before + turn.answer

    def _finished(self, stretch: Stretch) -> "Rendered":
        if stretch.open is not None:
            stretch.add([self._required_end(self._following(stretch.open))], 1)
        label = self.talk.row.label
        return dataclasses.replace(
            stretch.opening,
            answer=stretch.tokens,
            mask=None if all(stretch.mask) else stretch.mask,
            response=self.renderer.tokenizer.decode(stretch.tokens) if label is None else label,
        )

    # -- one turn ----------------------------------------------------------------------------------------------------

    def _turn(self, i: int) -> Turn:
        before = self.renderer.begun(self.talk, i)
        if before.endswith(tuple(self._stops)):
            reason = f"the chat template begins no turn for message {i + 1}: the prompt for it ends where a turn does"
            self._refuse("no_turn", reason, f"join it with the message before it, or {ANOTHER}")
        if reasoning.CLOSED.search(before) and reasoning.of(self.talk.messages[i]):
            reason = f"the generation prompt ends the reasoning (</think>), and message {i + 1} has some"
            fix = "is thinking turned off by --apply-chat-template-kwargs? Or take the reasoning out of the row"
            self._refuse("thinking_off", reason, fix)
        after = self.renderer.text(self.talk, i + 1, generate=False)
        if after.startswith(before):
            turn = self._restored(i, Turn(before, after[len(before) :]))
        else:
            turn = self._found(i, before, after) or self._opened(i, before)
        ended = dataclasses.replace(turn, answer=self._until_end(turn.answer))
        self._check_answer(i, ended, turn)
        return ended

    def _restored(self, i: int, turn: Turn) -> Turn:
        """With the reasoning that begins the content, where the template strips even the last turn of it."""
        message = self._marked(i)
        own = reasoning.of_content(message)
        if own is None or own.strip() in turn.answer:
            return turn
        return dataclasses.replace(turn, answer=reasoning.verbatim(message, turn.answer))

    def _found(self, i: int, before: str, after: str) -> Turn | None:
        """The turn in a text whose earlier turns are other than in its prompt: it follows what the prompt ends in."""
        header = self._header(i)
        known = self._known(header, self._end(before))
        return Turn(before, after[len(known) :]) if known is not None and after.startswith(known) else None

    @staticmethod
    def _known(header: str, end: str) -> str | None:
        """A header as far as ``end``, the end of the prompt; None where it is not in it."""
        return header[: header.rfind(end) + len(end)] if end in header else None

    def _opened(self, i: int, before: str) -> Turn:
        """The turn after a generation prompt that says more than the template's own turn: it opens ``<think>``."""
        opened = reasoning.OPENED.search(before)
        header = self._header(i)
        whole = self._written(i, reasoning.without)
        known = self._known(header, self._end(before[: opened.start()])) if opened else None
        if opened is None or known is None or not whole.startswith(header):
            reason = "the chat template writes the turn otherwise than its generation prompt begins it"
            raise RowError(self.talk.row, "rewritten", reason, ANOTHER)
        policy = self.renderer.options.opened_thinking
        if policy == "cut":
            return Turn(before[: opened.start()] + header[len(known) :], whole[len(header) :])
        if policy == "refuse":
            reason = f"the generation prompt ends in {opened[0].strip()}, and the template's own turn has none of that"
            self._refuse("opened_thinking", reason, "see --opened-thinking: fill or cut")
        return Turn(before, reasoning.filled(self._marked(i), opened, whole[len(known) :]))

    def _header(self, i: int) -> str:
        """All that the template writes before the content of message ``i``."""
        return self._written(i, lambda m: reasoning.without(m) | {"content": SENTINEL}).partition(SENTINEL)[0]

    def _end(self, text: str) -> str:
        """Its last control token, and what follows that."""
        places = self.renderer.tokens.places(text)
        return text[places[-1].start() :] if places else text

    def _marked(self, i: int) -> dict[str, Any]:
        return (self.talk.messages if self.talk.marked is None else self.talk.marked[0])[i]

    def _written(self, i: int, change: Any) -> str:
        """The messages to ``i``, of which that one is changed."""
        return self.renderer.written(self.talk, lambda m: [*m[:i], change(m[i])])

    def _until_end(self, turn: str) -> str:
        """To the first token that stops generation, for no engine gets further; without the white space behind another
        token that ends the turn."""
        places = [turn.find(text) + len(text) for text in self._stops if text in turn]
        if places:
            return turn[: min(places)]
        bare = turn.rstrip()
        return bare if any(bare.endswith(text) for text in self.renderer.tokens.control) else turn

    def _weight(self, i: int) -> int:
        """1 for a turn that is trained, 0 for one with ``step_loss_mask: 0``. Other tools' names for that are refused
        where they say anything else than 1: nothing here would read them."""
        message = self.talk.messages[i]
        fix = "say step_loss_mask: 0 for a turn that is not trained, 1 for one that is"
        for name in ELSEWHERE:
            if message.get(name, 1) not in (1, None):
                reason = f"message {i + 1} has {name}: {message[name]!r}, which nothing here reads"
                self._refuse("loss_mask", reason, fix)
        weight = message.get("step_loss_mask", 1)
        if weight not in (0, 1):
            self._refuse("loss_mask", f"message {i + 1} has step_loss_mask: {weight!r}", fix)
        return int(weight)

    # -- what ends a turn --------------------------------------------------------------------------------------------

    def _ended(self, turn: str, ids: list[int]) -> bool:
        """True when the template ended the turn: with a token that stops generation, with another that ends every plain
        turn, or a stop text."""
        if any(turn.rstrip().endswith(text.rstrip()) for text in self.renderer.options.stop_texts):
            return True
        while ids and not self.renderer.tokenizer.decode(ids[-1:]).strip():
            ids = ids[:-1]
        return bool(ids) and (ids[-1] in self.renderer.stops or ids[-1] == self._plain_end)

    @functools.cached_property
    def _plain_end(self) -> int | None:
        """The control token that ends a plain answer in this template."""
        messages = [{"role": role, "content": "?"} for role in ("user", "assistant")]
        with contextlib.suppress(RowError):
            text = self.renderer.render(self.talk.row, messages, None, False).rstrip()
            return self.renderer.tokens.control.get(self._end(text))
        return None

    def _following(self, i: int) -> list[int]:
        """Tokens that the template writes after turn ``i``, whoever is next: a tool that was called, or the user.

        Where another turn changes this one (its reasoning is left out then), those after a turn without reasoning.
        """
        calls = forms.calls(self.talk.messages[i])
        bare = {"role": "assistant", "content": "?"} | ({"tool_calls": calls} if calls else {})
        for role in ("tool", "user") if calls else ("user",):
            for messages in (self.talk.messages[: i + 1], [{"role": "user", "content": "?"}, bare]):
                ids = self.renderer.encode(self.talk, self._next_turn(messages, role))
                if ids and ids[0] in self.renderer.stops:
                    return ids
        return []

    def _next_turn(self, messages: Messages, role: str) -> str:
        """The text that the template adds for one more message; nothing where it changes what was there, or refuses."""
        talk = self.talk
        try:
            whole = self.renderer.render(talk.row, messages, talk.tools, False)
            longer = self.renderer.render(talk.row, [*messages, {"role": role, "content": "?"}], talk.tools, False)
        except RowError:
            return ""
        return longer[len(whole) :] if longer.startswith(whole) else ""

    def _required_end(self, following: list[int]) -> int:
        """The token that stops generation where the template writes none in the turn: the next role's marker."""
        stops = self.renderer.stops
        if not following or following[0] not in stops:
            named = ", ".join(repr(self.renderer.tokenizer.decode([i])) for i in sorted(stops)) or "no token"
            reason = f"nothing that the chat template writes ends the assistant's turn (generation stops at {named})"
            self._refuse("no_end", reason, template.END_FIX)
        return following[0]

    # -- nothing is left out -----------------------------------------------------------------------------------------

    def _check_answer(self, i: int, turn: Turn, written: Turn) -> None:
        """Raises RowError for an answer that is empty, or of which the template leaves something out. ``written``: with
        what follows the token that ends it."""
        message = self.talk.messages[i]
        thought = reasoning.of(message)
        calls = forms.calls(message)
        shown = reasoning.answer(message).strip() or ("" if thought else (message.get("content") or "").strip())
        if not (shown or thought or calls):
            fix = "give it an answer, step_loss_mask: 0, or pass --on-bad-row skip"
            self._refuse("empty_answer", f"the assistant's answer in message {i + 1} is empty", fix)
        said = turn.answer.replace(MARK, "")
        for part, words, change in (
            ("answer", [shown], lambda m: m | {"content": ""}),
            ("reasoning", [thought], reasoning.without),
            *(("tool calls", list(strings(forms.function(c))), _less(number)) for number, c in enumerate(calls)),
        ):
            if all(word in said for word in words):
                continue
            behind = all(word in written.answer.replace(MARK, "") for word in words)
            if part == "reasoning" or behind or self._same(i, change):
                fix = REASONING if part == "reasoning" else ANOTHER
                self._refuse("left_out", f"the chat template leaves out the assistant's {part} in message {i + 1}", fix)

    def _same(self, i: int, change: Any) -> bool:
        """True where the template writes the same for the changed message ``i``, the last."""
        try:
            changed = self._written(i, change)
        except RowError:
            return False
        return changed == self._written(i, lambda message: message)

    def _check_context(self, seen: int, i: int, before: str) -> None:
        """Raises RowError where the template leaves out what others say between the turn ``seen`` and turn ``i``: the
        answer would be learned without it."""
        text = before.replace(MARK, "")
        for k in range(seen, i):
            message = self.talk.messages[k]
            said = (message.get("content") or "").strip()
            if message["role"] == "assistant" or not said or said in text:
                continue
            other = [*self.talk.messages[:k], message | {"content": f"?{said}"}, *self.talk.messages[k + 1 : i]]
            try:
                left_out = self.renderer.render(self.talk.row, other, self.talk.tools, True) == text
            except RowError:
                left_out = False
            if left_out:
                reason = f"the chat template leaves out message {k + 1} ({message['role']}), which comes before"
                self._refuse("left_out", f"{reason} message {i + 1}", f"take it out of the row, or {ANOTHER}")


def _less(number: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Takes one tool call out of a message, or all of them where there is but one."""

    def change(message: dict[str, Any]) -> dict[str, Any]:
        rest = [call for k, call in enumerate(forms.calls(message)) if k != number]
        return {k: v for k, v in message.items() if k != "tool_calls"} | ({"tool_calls": rest} if rest else {})

    return change
