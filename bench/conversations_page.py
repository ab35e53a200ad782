"""``python -m bench.conversations_page``: writes docs/conversations.md, what is trained of 26 kinds of conversation
with public chat templates."""

import pathlib
import tempfile

from bench import conversations
from bench.conversations import KINDS, Kind, Template
from slime_cli.buffer.types import RowError
from slime_cli.rollout.chat import Rendered
from slime_cli.rollout.shown import lines
from slime_cli.rollout.supervised import SupervisedRenderer

PAGE = conversations.ROOT / "docs/conversations.md"
INTRODUCTION = """<!-- Written by `python -m bench.conversations_page`. -->
# Conversations

What supervised training learns of a conversation, by the chat template of the checkpoint. {kinds} kinds of
conversation were rendered with {templates} templates of public checkpoints
([where each is from](../tests/rollout/templates/README.md)), over small tokenizers that have the checkpoint's control
tokens. `slime doctor --hf-checkpoint DIR` shows the same for a checkpoint of yours, token by token, with its own
tokenizer.

Each turn of the assistant is trained after the prompt that an engine would be given for it, up to the token that ends
it. A test reads every example of this page: no word of a system message, a user or a tool is trained, every word of
each turn that is to be trained is, and what comes before it is the prompt as transformers renders it.

- `--on-rewritten-turns fan-out` (as here): where the template rewrites earlier turns, each stretch that only grows is a
  sample; they are siblings of one trajectory and share one denominator in the loss. `keep`: one sample in which each
  turn stays as it was trained, as a function that appends tokens samples it. `refuse`: the row is an error.
- `--opened-thinking fill` (as here): where the generation prompt opens `<think>` and the template's own turn does not,
  the answer fills and closes it. `cut`: the opening is left out of the prompt. `refuse`: the row is an error.
- `--special-tokens-in-data text` (as here): a control token that a row's own strings spell is text, in prompts for
  reinforcement learning too. `keep` takes it as the token, `refuse` makes the row an error.
- `"step_loss_mask": 0` in a message: that turn is not trained.

## {trained} trained, {fanned} of them fanned out; {refused} refused

A number is the samples of the conversation, a letter why it is refused. None was wrong in silence.

"""
REASONS = {
    "empty_answer": ("e", "the answer is empty: give it one, or `step_loss_mask: 0`"),
    "left_out": (
        "o",
        "the template leaves out a part of the turn, or a message before it: take the template of the model's instruct "
        "version, put reasoning into the content, or `step_loss_mask: 0`",
    ),
    "thinking_off": (
        "i",
        "the generation prompt ends the reasoning (`</think>`), and the row has some: take it out of the row, or the "
        "argument that turns thinking off out of `--apply-chat-template-kwargs`",
    ),
    "rewritten": ("r", "the template writes the turn otherwise than its generation prompt begins it"),
    "no_turn": ("t", "the template begins no turn for a second answer in a row: join the two"),
    "no_end": ("n", "nothing that the template writes ends the turn"),
    "template": ("x", "the template itself raises: an order of roles or two calls at once that it does not take"),
}
"""Kind of a refusal -> its letter, and what to do."""
SAMPLES = (
    ("qwen3", "reasoning field, two turns"),
    ("qwen3", "call, result, answer"),
    ("qwen2.5-instruct", "call, result, answer"),
    ("deepseek-r1-distill", "two turns"),
    ("deepseek-r1-distill", "reasoning in content"),
    ("glm-4.5", "call after reasoning"),
    ("llama-3.1", "two turns"),
    ("mistral-7b-v0.3", "three turns, system"),
    ("gemma-3", "control tokens in the question"),
    ("gpt-oss", "reasoning field, two turns"),
)
"""Template and kind of conversation that are shown token by token."""


def outcome(renderer: SupervisedRenderer, kind: Kind) -> Rendered | RowError:
    """The cell of one template and kind: the trained text, or the reason for training nothing."""
    try:
        example = renderer.example(kind.row())
    except RowError as error:
        return error
    if example is None:
        raise AssertionError(f"{kind.name} was left out as too long")
    return example


def cell(found: Rendered | RowError) -> str:
    return REASONS[found.kind][0] if isinstance(found, RowError) else str(len(found.parts))


def table(found: dict[Template, list[Rendered | RowError]]) -> list[str]:
    """Templates by rows, conversations by numbered columns."""
    numbers = range(1, len(KINDS) + 1)
    out = ["| | " + " | ".join(map(str, numbers)) + " |", "|---" * (len(KINDS) + 1) + "|"]
    out += [f"| {template.of} | " + " | ".join(map(cell, row)) + " |" for template, row in found.items()]
    out += ["", "; ".join(f"{number}: {kind.name}" for number, kind in zip(numbers, KINDS, strict=True)) + ".", ""]
    return [*out, *(f"- {letter}: {what}." for letter, what in REASONS.values()), ""]


def page() -> str:
    """The text of docs/conversations.md."""
    with tempfile.TemporaryDirectory(prefix="slime-") as name:
        folder = pathlib.Path(name)
        renderers = {t: conversations.renderer(t, folder / t.name) for t in conversations.templates()}
        found = {t: [outcome(renderer, kind) for kind in KINDS] for t, renderer in renderers.items()}
        shown = [_shown(renderers, *sample) for sample in SAMPLES]
    flat = [one for column in found.values() for one in column]
    counts = {
        "kinds": len(KINDS),
        "templates": len(found),
        "trained": sum(isinstance(one, Rendered) for one in flat),
        "fanned": sum(isinstance(one, Rendered) and bool(one.more) for one in flat),
        "refused": sum(isinstance(one, RowError) for one in flat),
    }
    return INTRODUCTION.format(**counts) + "\n".join([*table(found), "## Token by token", "", TOKENS, *shown])


TOKENS = """A space parts two tokens, a middle dot is a space in one, `\\n` a line break; of what is only read the
middle of a long stretch is left out. The words are cut finer here than a real tokenizer cuts them.
"""


def _shown(renderers: dict[Template, SupervisedRenderer], template: str, name: str) -> str:
    renderer = next(renderer for t, renderer in renderers.items() if t.name == template)
    kind = next(kind for kind in KINDS if kind.name == name)
    found = outcome(renderer, kind)
    if isinstance(found, RowError):
        raise found
    body = "\n".join(lines(renderer.tokenizer, found, 110))
    return f"### {template}: {name}\n\n```\n{body}\n```\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
