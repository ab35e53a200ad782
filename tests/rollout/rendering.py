"""Conversations and templates over the tiny model's tokenizer, for tests of what is rendered and trained."""

from slime_cli.buffer.types import PromptRow, Sample
from slime_cli.rollout.supervised import SupervisedRenderer

TURNS = [
    {"role": "system", "content": "Add."},
    {"role": "user", "content": "1 + 2"},
    {"role": "assistant", "content": "3"},
    {"role": "user", "content": "and 4"},
    {"role": "assistant", "content": "7"},
]


ASKED = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
GLM = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}" + ASKED
CALLING = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }}]{% endfor %}<|end|>{% endfor %}" + ASKED
)
LOOKS_FOR_NULL = CALLING.replace(
    "<|{{ m.role }}|>{{ m.content }}", "<|{{ m.role }}|>{% if m.content is not none %}say {{ m.content }}{% endif %}"
)
CALL = [{"function": {"name": "add", "arguments": {}}}]
CALLS = [
    {"role": "user", "content": "1 + 2"},
    {"role": "assistant", "content": None, "tool_calls": CALL},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "It is 3."},
]


DROPS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content if loop.last or m.role != 'assistant' else m.content[-1] }}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Qwen3's kind: an earlier turn loses what it began with."""


def supervised(renderer: SupervisedRenderer, prompt, label=None) -> tuple[Sample, str]:
    """The sample, and the text of its trained tokens."""
    row = PromptRow(prompt, label, {}, "data.jsonl", 7)
    example = renderer.example(row)
    (sample,) = example.samples(Sample(0, 0, example.text))
    sample.check()
    answer = sample.tokens[len(sample.tokens) - sample.response_length :]
    return sample, renderer.tokenizer.decode([t for t, m in zip(answer, sample.effective_mask()) if m])


def renderer_text(renderer, sample) -> str:
    return renderer.tokenizer.decode(sample.tokens)
