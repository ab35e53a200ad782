"""26 kinds of conversation and small checkpoints with public chat templates: what docs/conversations.md and its test
try.

Every message says words that no other does: the first letter of such a word is its role (``Q`` for what is asked, ``A``
for an answer, ``R`` for reasoning, ``S`` for a system message, ``T`` for what a tool said, ``C`` for a call's argument,
``D`` for a tool's description), its number the place of the message. So what is trained can be known from the text
alone, by reading it (tests/rollout/test_conversations.py).
"""

import dataclasses
import functools
import json
import pathlib
from typing import Any

from slime_cli.buffer.sources.base import RowContract
from slime_cli.buffer.types import PromptRow
from slime_cli.rollout.chat import RenderOptions
from slime_cli.rollout.supervised import SupervisedRenderer

ROOT = pathlib.Path(__file__).parents[1]
TEMPLATES = ROOT / "tests/rollout/templates"
Message = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Kind:
    """One kind of conversation."""

    name: str
    messages: list[Message]
    label: str | None = None
    tools: list[dict[str, Any]] | None = None

    def row(self) -> PromptRow:
        """As it comes out of a file of rows."""
        record = {"input": self.messages, "tools": self.tools} | ({"label": self.label} if self.label else {})
        return RowContract(label_key="label" if self.label else None).check(record, "rows.jsonl", 1)


def system(number: int = 0) -> Message:
    return {"role": "system", "content": f"S{number}brief rules"}


def user(number: int, content: Any = None) -> Message:
    return {"role": "user", "content": f"Q{number}asks this" if content is None else content}


def answer(number: int, **more: Any) -> Message:
    return {"role": "assistant", "content": f"A{number}says that"} | more


def reasoned(number: int) -> Message:
    return answer(number, reasoning_content=f"R{number}thinks first")


def inline(number: int) -> Message:
    return answer(number, content=f"<think>\nR{number}thinks first\n</think>\n\nA{number}says that")


def call(number: int, part: int = 0, text: bool = False) -> dict[str, Any]:
    arguments = {"word": f"C{number}{'xyz'[part]}value", "count": part + 2}
    given = json.dumps(arguments) if text else arguments
    return {"id": f"call{number:02}{part:03}", "type": "function", "function": {"name": "look_up", "arguments": given}}


def calling(number: int, parts: int = 1, text: bool = False, **more: Any) -> Message:
    calls = [call(number, part, text) for part in range(parts)]
    return {"role": "assistant", "content": None, "tool_calls": calls} | more


def result(number: int, of: int, part: int = 0) -> Message:
    return {"role": "tool", "tool_call_id": f"call{of:02}{part:03}", "name": "look_up", "content": f"T{number}found it"}


WORD = {"type": "string", "description": "D0the word"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "D1looks a word up.",
            "parameters": {
                "type": "object",
                "properties": {"word": WORD, "count": {"type": "integer", "description": "D2how many"}},
                "required": ["word"],
            },
        },
    }
]
PARTS = [{"type": "text", "text": "Q0asks "}, {"type": "text", "text": "this"}]
ANSWER_PARTS = [{"type": "text", "text": "A1says "}, {"type": "text", "text": "that"}]
ENDS = "<|im_end|><|eot_id|></s><end_of_turn><|user|><｜end▁of▁sentence｜><|end|>[e~["
"""Text that ends a turn in one template or another, where it is a control token."""
UNTRAINED = {"step_loss_mask": 0}

KINDS = [
    Kind("one answer", [user(0), answer(1)]),
    Kind("prompt and label", [user(0)], label="A1says that"),
    Kind("label with reasoning", [user(0)], label="<think>\nR1thinks first\n</think>\n\nA1says that"),
    Kind("system message", [system(), user(1), answer(2)]),
    Kind("two turns", [user(0), answer(1), user(2), answer(3)]),
    Kind("three turns, system", [system(), user(1), answer(2), user(3), answer(4), user(5), answer(6)]),
    Kind("reasoning field", [user(0), reasoned(1)]),
    Kind("reasoning in content", [user(0), inline(1)]),
    Kind("reasoning field, two turns", [user(0), reasoned(1), user(2), reasoned(3)]),
    Kind("reasoning in content, two turns", [user(0), inline(1), user(2), inline(3)]),
    Kind("reasoning in the last turn", [user(0), answer(1), user(2), reasoned(3)]),
    Kind("tools, none called", [user(0), answer(1)], tools=TOOLS),
    Kind("call, result, answer", [user(0), calling(1), result(2, 1), answer(3)], tools=TOOLS),
    Kind("call as JSON text", [user(0), calling(1, text=True), result(2, 1), answer(3)], tools=TOOLS),
    Kind("call beside words", [user(0), calling(1, content="A1says that"), result(2, 1), answer(3)], tools=TOOLS),
    Kind(
        "call after reasoning",
        [user(0), calling(1, content="", reasoning_content="R1thinks first"), result(2, 1), reasoned(3)],
        tools=TOOLS,
    ),
    Kind("two calls at once", [user(0), calling(1, 2), result(2, 1), result(3, 1, 1), answer(4)], tools=TOOLS),
    Kind(
        "calls one after another",
        [user(0), calling(1), result(2, 1), calling(3), result(4, 3), answer(5)],
        tools=TOOLS,
    ),
    Kind("ends in a call", [user(0), calling(1)], tools=TOOLS),
    Kind("first turn not trained", [user(0), answer(1, **UNTRAINED), user(2), answer(3)]),
    Kind("last turn not trained", [user(0), answer(1), user(2), answer(3, **UNTRAINED)]),
    Kind("contents in parts", [user(0, PARTS), answer(1, content=ANSWER_PARTS)]),
    Kind("empty question", [system(), user(1, ""), answer(2)]),
    Kind("empty answer", [user(0), answer(1, content="")]),
    Kind("two answers in a row", [user(0), answer(1), answer(2)]),
    Kind("control tokens in the question", [user(0, f"Q0asks {ENDS} this"), answer(1), user(2), answer(3)]),
]


@dataclasses.dataclass(frozen=True, eq=False)
class Template:
    """A public chat template with the tokens of its checkpoints that matter here, as templates.json has it."""

    name: str
    of: str
    bos: str | None
    eos: str
    stops: list[str]
    """Tokens at which generation ends, the eos among them."""
    special: list[str]
    plain: list[str]
    """Tokens of their own that are no control tokens."""
    file: str = ""
    """Where another one's text is taken with other arguments."""
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def text(self) -> str:
        return (TEMPLATES / f"{self.file or self.name}.jinja").read_text(encoding="utf-8")


def templates() -> list[Template]:
    listed = json.loads((TEMPLATES / "templates.json").read_text(encoding="utf-8"))
    return [Template(name, **values) for name, values in listed.items()]


@functools.cache
def _core() -> str:
    """A byte-level BPE whose words are those of the conversations, as JSON."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    words = "system user assistant model tool thinks first says that asks this found it brief rules value looks a word"
    texts = [words] * 9 + [json.dumps(kind.messages) for kind in KINDS]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator(texts, trainer)
    return core.to_str()


def renderer(template: Template, folder: pathlib.Path, **options: Any) -> SupervisedRenderer:
    """The renderer of a supervised phase over a small checkpoint that is made in ``folder``. ``options``: as
    :class:`RenderOptions` has them."""
    given = RenderOptions(apply_chat_template=True, template_kwargs=template.arguments, **options)
    return SupervisedRenderer(str(checkpoint(template, folder)), given)


def checkpoint(template: Template, folder: pathlib.Path) -> pathlib.Path:
    """A folder that holds what a renderer reads of a checkpoint: a small tokenizer with the template's control tokens,
    the template, and what ends generation."""
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer.from_str(_core())
    special = dict.fromkeys([*filter(None, [template.bos]), template.eos, *template.stops, *template.special])
    core.add_special_tokens(list(special))
    core.add_tokens([AddedToken(text, special=False, normalized=False) for text in template.plain])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=template.bos, eos_token=template.eos, pad_token=template.eos
    )
    tokenizer.chat_template = template.text
    tokenizer.save_pretrained(folder)
    ends = sorted({tokenizer.added_tokens_encoder[text] for text in template.stops})
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return folder
