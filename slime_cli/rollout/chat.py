"""From a row to tokens: the prompt that an engine continues, or an example to train on.

Whatever is wrong with one row is a :class:`RowError` with its file and line, raised before the row is dealt: the Data
Buffer decides whether it ends the run. Callers: the phase, evaluation, and the check of the data before a run starts.
"""

import contextlib
import copy
import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

from slime_cli.buffer.types import PromptRow, RowError, Sample, Status
from slime_cli.errors import DataError
from slime_cli.models.tokens import MARK, NotText, Tokens, load
from slime_cli.options.groups import SlimeOptions
from slime_cli.rollout import forms, template
from slime_cli.rollout.forms import Messages

POLICY = "--special-tokens-in-data"
ROOM = 7
"""Tokens that SGLang wants free after a prompt, however short an answer is asked for."""


@dataclasses.dataclass(frozen=True)
class Rendered:
    """A prompt as text and as token ids; for supervised training with its answer."""

    text: str
    tokens: list[int]
    answer: list[int] = dataclasses.field(default_factory=list)
    mask: list[int] | None = None
    """Which of the answer's tokens are trained; None for all."""
    response: str = ""

    more: tuple["Rendered", ...] = ()
    """Further examples of the same row: siblings of one trajectory."""

    @property
    def parts(self) -> list["Rendered"]:
        """All examples of the row."""
        return [self, *self.more]

    def samples(self, leased: Sample) -> list[Sample]:
        """The examples as samples of the trajectory that was leased."""
        return [part._sample(leased, number) for number, part in enumerate(self.parts)]

    def _sample(self, leased: Sample, part: int) -> Sample:
        return dataclasses.replace(
            leased,
            part=part,
            prompt=self.text,
            tokens=self.tokens + self.answer,
            response_length=len(self.answer),
            response=self.response,
            loss_mask=None if self.mask is None else list(self.mask),
            metadata=dict(leased.metadata),
            status=Status.COMPLETED,
            reward=0.0,
        )


@dataclasses.dataclass(frozen=True)
class Talk:
    """A row's conversation as the template is given it; ``marked`` is None where no string holds a control token's
    text."""

    row: PromptRow
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    marked: tuple[list[dict[str, Any]], list[dict[str, Any]] | None] | None


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Tokens that there may be."""

    prompt: int | None = None
    """Longer prompts are left out."""
    answer: int = 1
    """1 where a function of the user's decides."""
    together: int | None = None
    """An answer is cut there."""

    @classmethod
    def of(cls, prompt: int | None, answer: int | None, together: int | None, users: bool) -> "Lengths":
        """``users``: a function of the user's decides how long an answer is."""
        return cls(prompt, 1 if users or not answer else answer, together)

    def room(self, prompt: int) -> int:
        """For the answer to a prompt of so many tokens."""
        return self.answer if self.together is None else max(1, min(self.answer, self.together - prompt))


@dataclasses.dataclass(frozen=True)
class RenderOptions:
    """The options of a phase that decide how its rows are rendered."""

    apply_chat_template: bool
    template_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    rewritten_turns: str = "fan-out"
    """fan-out, keep or refuse."""
    opened_thinking: str = "fill"
    """fill, cut or refuse."""
    special_tokens: str | None = None
    """text, keep or refuse; None: text with a chat template, refuse without."""
    context: int | None = None
    """Tokens of a prompt with its answer that the model takes."""
    training: Lengths = Lengths()
    evaluation: Lengths = Lengths()
    stop_token_ids: tuple[int, ...] = ()
    stop_texts: tuple[str, ...] = ()

    @classmethod
    def of(cls, s: SlimeOptions, context: int | None) -> "RenderOptions":
        """``s``: slime's own options, of a phase or of an evaluation set in it."""
        users = bool(s.custom_generate_function_path)
        return cls(
            apply_chat_template=s.apply_chat_template,
            template_kwargs=s.apply_chat_template_kwargs,
            special_tokens=s.special_tokens_in_data,
            rewritten_turns=s.on_rewritten_turns,
            opened_thinking=s.opened_thinking,
            context=context,
            training=Lengths.of(s.rollout_max_prompt_len, s.rollout_max_response_len, s.rollout_max_context_len, users),
            evaluation=Lengths.of(s.eval_max_prompt_len, s.eval_max_response_len, s.eval_max_context_len, users),
            stop_token_ids=tuple(s.rollout_stop_token_ids or ()),
            stop_texts=tuple(s.rollout_stop or ()),
        )


class Renderer:
    """One tokenizer with the options of a phase."""

    def __init__(self, checkpoint: str, options: RenderOptions, say: Callable[[str], None] | None = None):
        self.checkpoint = checkpoint
        self.say = say
        self._looked_for: set[str] = set()
        """Parts of a row that a template may leave out."""
        self.tokenizer = load(checkpoint)
        self._take(options)
        self.tokens = Tokens(self.tokenizer)
        self.stops = template.stop_ids(pathlib.Path(checkpoint)) | set(options.stop_token_ids)
        if self.tokenizer.eos_token_id is not None:
            self.stops.add(self.tokenizer.eos_token_id)

    def _take(self, options: RenderOptions) -> None:
        self.options = options
        self.apply = options.apply_chat_template
        if self.apply and not self.tokenizer.chat_template:
            raise DataError(
                f"{self.checkpoint}: the tokenizer has no chat template, and --apply-chat-template asks for one",
                "add chat_template.jinja to the checkpoint, or leave --apply-chat-template out",
            )
        self.policy = options.special_tokens or ("text" if self.apply else "refuse")

    def having(self, options: RenderOptions) -> "Renderer":
        """The same tokenizer with the options of an evaluation set."""
        if options == self.options:
            return self
        out = copy.copy(self)
        out._take(options)
        return out

    # -- what the buffer asks for -----------------------------------------------------------------------------------

    def prompt(self, row: PromptRow) -> Rendered | None:
        """The prompt that the engine continues; None when it is longer than ``--rollout-max-prompt-len``. Raises
        RowError."""
        return self._continued(row, self.options.training)

    def eval_prompt(self, row: PromptRow) -> Rendered | None:
        """As :meth:`prompt`, with the lengths of an evaluation."""
        return self._continued(row, self.options.evaluation)

    def _continued(self, row: PromptRow, lengths: Lengths) -> Rendered | None:
        rendered = self._opening(self._talk(row)) if self.apply else self._prompt(row)
        if self._too_long(rendered, lengths):
            return None
        fix = "--rollout-max-prompt-len leaves longer prompts out and counts them; --on-bad-row skip does too"
        self._check_context(row, len(rendered.tokens), max(lengths.room(len(rendered.tokens)), ROOM), fix)
        return rendered

    def _too_long(self, prompt: Rendered, lengths: Lengths) -> bool:
        return lengths.prompt is not None and len(prompt.tokens) > lengths.prompt

    def _check_context(self, row: PromptRow, tokens: int, answer: int, fix: str) -> None:
        """An engine refuses a prompt that leaves no room for the answer that is asked for."""
        if self.options.context is not None and tokens + answer > self.options.context:
            room = f", {answer} are kept for the answer" if answer else ""
            reason = f"it has {tokens} tokens{room}, and the model takes {self.options.context}"
            raise RowError(row, "beyond_context", reason, fix)

    # -- text ---------------------------------------------------------------------------------------------------------

    def _prompt(self, row: PromptRow) -> Rendered:
        """Without a chat template."""
        if not isinstance(row.prompt, str):
            raise RowError(row, "messages", "the prompt is a list of messages", "pass --apply-chat-template")
        first = self.tokenizer.bos_token if self.tokens.before else None
        self._refuse(row, row.prompt.removeprefix(first or ""), "the prompt")
        marked = self._marked(row, row.prompt)
        return Rendered(row.prompt, self._guarded(row, self.tokens.begin, row.prompt, marked))

    def _refuse(self, row: PromptRow, value: Any, where: str) -> None:
        if self.policy == "refuse" and (found := self.tokens.found(value)):
            fix = f"{POLICY} text takes it as text, keep as the control token (for prompts that are rendered already)"
            raise RowError(row, "special_token", f"{where} holds the control token {found}", fix)

    def _marked(self, row: PromptRow, value: Any) -> Any:
        return value if self.policy == "keep" else self._guarded(row, self.tokens.mark, value)

    def _guarded(self, row: PromptRow, call: Callable, *values: Any) -> Any:
        try:
            return call(*values)
        except NotText as error:
            fix = f"{POLICY} keep takes it as the control token; or change the row"
            raise RowError(row, "special_token", str(error), fix) from None

    def _talk(self, row: PromptRow, label: str | None = None) -> Talk:
        """The row's messages, with the label as the answer to them. Raises RowError."""
        messages = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
        if label is not None:
            messages = [*messages, {"role": "assistant", "content": label}]
        tools = row.metadata.get("tools") or None
        messages = forms.settled(messages, lambda form: self.render(row, form, tools, False))
        self._say_what_is_left_out(row, messages, tools)
        self._refuse(row, [messages, tools], "it")
        marked = self._marked(row, [messages, tools])
        return Talk(row, messages, tools, None if marked == [messages, tools] else tuple(marked))

    def _say_what_is_left_out(self, row: PromptRow, messages: list[dict[str, Any]], tools: list | None) -> None:
        """Once for tools, for calls of them and for messages of a role, at the first row that has some: a template that
        does not know of them leaves them out."""
        without_calls = [{key: value for key, value in m.items() if key != "tool_calls"} for m in messages]
        looked = {
            "tools": (tools, messages, None),
            "tool calls": (any(m.get("tool_calls") for m in messages), without_calls, tools),
        }
        for role in {m["role"] for m in messages if m.get("content")} - {"assistant"}:
            looked[f"messages of the role {role}"] = (True, [_other(m, role) for m in messages], tools)
        for what, (there, other_messages, other_tools) in looked.items():
            if not there or self.say is None or what in self._looked_for:
                continue
            self._looked_for.add(what)
            with contextlib.suppress(RowError):  # what is wrong with the row is said where it is rendered
                if self.render(row, messages, tools, False) == self.render(row, other_messages, other_tools, False):
                    self.say(
                        f"warning: {row.where}: the chat template writes no {what}: the model neither sees nor learns"
                        " them"
                    )

    def render(self, row: PromptRow, messages: list[dict[str, Any]], tools: list | None, generate: bool) -> str:
        kwargs = self.options.template_kwargs | ({"tools": tools} if tools else {})
        try:  # as a batch of one: transformers looks at the first message of a single conversation; there may be none
            return self.tokenizer.apply_chat_template(
                [messages], tokenize=False, add_generation_prompt=generate, **kwargs
            )[0]
        except Exception as error:  # templates raise anything: name the row instead
            reason = f"the chat template failed: {type(error).__name__}: {error}"
            raise RowError(row, "template", reason, "fix the row or the template, or pass --on-bad-row skip") from error

    def text(self, talk: Talk, count: int, generate: bool) -> str:
        """The first messages as the template writes them, with marks where the row's own strings hold control
        tokens."""
        return self.written(talk, lambda messages: messages[:count], generate)

    def written(self, talk: Talk, change: Callable[[Messages], Messages], generate: bool = False) -> str:
        """As :meth:`text`, of what ``change`` makes of the messages, of which none may be marked."""
        plain = self.render(talk.row, change(talk.messages), talk.tools, generate)
        if talk.marked is None:
            return plain
        messages, tools = talk.marked
        marked = self.render(talk.row, change(messages), tools, generate)
        if marked.replace(MARK, "") != plain:
            found = self.tokens.found([talk.messages, talk.tools]) or "(a part of one)"
            reason = f"it holds the control token {found}, and the chat template looks for that"
            fix = f"change the row, or {POLICY} keep takes it as the control token"
            raise RowError(talk.row, "special_token", reason, fix)
        return marked

    def encode(self, talk: Talk, text: str) -> list[int]:
        return self._guarded(talk.row, self.tokens.encode, text)

    def _opening(self, talk: Talk) -> Rendered:
        """The prompt: all of a conversation, or what precedes the first answer of one that ends in an answer."""
        return self.spelled(talk, self.begun(talk, first_answer(talk.messages)))

    def spelled(self, talk: Talk, text: str) -> Rendered:
        return Rendered(text.replace(MARK, ""), self.encode(talk, text))

    def begun(self, talk: Talk, count: int | None) -> str:
        if count == 0:
            try:
                return self.text(talk, 0, generate=True)
            except RowError as error:
                reason = f"the chat template writes no prompt before that ({error.__cause__})"
                reason = f"the conversation begins with the assistant, and {reason}"
                fix = "begin it with a user's or a system message"
                raise RowError(talk.row, "begins_with_assistant", reason, fix) from error
        return self.text(talk, len(talk.messages) if count is None else count, generate=True)


def _other(message: dict[str, Any], role: str) -> dict[str, Any]:
    """Another content in a message of the role."""
    return message | {"content": f"?{message.get('content')}"} if message["role"] == role else message


def first_answer(prompt: str | list[dict[str, Any]]) -> int | None:
    """Where the assistant's first turn is in a conversation that ends with one; None for anything that is to be
    continued."""
    if isinstance(prompt, str) or not prompt or prompt[-1].get("role") != "assistant":
        return None
    return next(i for i, message in enumerate(prompt) if message["role"] == "assistant")
