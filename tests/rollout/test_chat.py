"""Prompts and supervised samples over a real tokenizer and chat template (those of the tiny model)."""

import pytest

from slime_cli.buffer.types import PromptRow, Sample
from slime_cli.errors import DataError
from slime_cli.rollout.chat import Renderer
from slime_cli.weights import tiny

TURNS = [
    {"role": "system", "content": "Add."},
    {"role": "user", "content": "1 + 2"},
    {"role": "assistant", "content": "3"},
    {"role": "user", "content": "and 4"},
    {"role": "assistant", "content": "7"},
]


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    model = tiny.make("tiny:qwen3?num_hidden_layers=1", tmp_path_factory.mktemp("chat") / "model")
    return Renderer(str(model), apply_chat_template=True, template_kwargs={}, max_prompt=None)


def supervised(renderer: Renderer, prompt, label=None) -> tuple[Sample, str]:
    """The sample, and the text of its trained tokens."""
    row = PromptRow(prompt, label, {}, "data.jsonl", 7)
    rendered = renderer.prompt(row)
    sample = Sample(0, 0, rendered.text)
    renderer.supervised(row, rendered, sample)
    sample.check()
    answer = sample.tokens[len(sample.tokens) - sample.response_length :]
    return sample, renderer.tokenizer.decode([t for t, m in zip(answer, sample.effective_mask()) if m])


def test_every_assistant_turn_is_trained_and_nothing_else(renderer):
    sample, trained = supervised(renderer, TURNS)
    assert trained == "3<|end|>7<|end|>"
    whole = renderer.tokenizer.apply_chat_template(TURNS, tokenize=False)
    assert renderer.tokenizer.decode(sample.tokens) == whole
    assert renderer.tokenizer.decode(sample.tokens[: -sample.response_length]) == "<|system|>Add.<|end|><|user|>1 + 2<|end|><|assistant|>"


def test_a_turn_can_be_left_out_and_what_follows_the_last_one_is_cut(renderer):
    turns = [*TURNS[:2], TURNS[2] | {"step_loss_mask": 0}, *TURNS[3:]]
    _, trained = supervised(renderer, turns)
    assert trained == "7<|end|>"


def test_one_turn_is_the_same_as_a_label(renderer):
    conversation, _ = supervised(renderer, TURNS[:3])
    labelled, trained = supervised(renderer, TURNS[:2], "3")
    assert conversation.tokens == labelled.tokens and conversation.response_length == labelled.response_length and trained == "3<|end|>"


def test_a_conversation_without_an_answer_is_refused_by_row(renderer):
    with pytest.raises(DataError, match="data.jsonl:7: no label"):
        supervised(renderer, TURNS[:2])


def test_a_template_that_rewrites_history_is_refused(renderer, monkeypatch):
    """Such templates drop the reasoning of earlier turns: what was trained would not be what is sampled later."""
    strips = "{% for m in messages %}{{ m.content if loop.last else m.content[:1] }}|{% endfor %}"
    monkeypatch.setattr(renderer.tokenizer, "chat_template", strips)
    with pytest.raises(DataError, match="data.jsonl:7: the chat template rewrites"):
        supervised(renderer, TURNS)
