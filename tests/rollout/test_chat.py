"""Prompts and supervised samples over a real tokenizer and chat template (those of the tiny model)."""

import dataclasses

import pytest

from slime_cli.buffer.types import PromptRow, RowError
from slime_cli.errors import DataError
from slime_cli.options.resolve import resolve
from slime_cli.rollout.chat import Renderer, RenderOptions
from tests.rollout.rendering import CALL, CALLING, CALLS, GLM, LOOKS_FOR_NULL, TURNS, renderer_text, supervised


def test_every_assistant_turn_is_trained_and_nothing_else(renderer):
    sample, trained = supervised(renderer, TURNS)
    assert trained == "3<|end|>7<|end|>"
    whole = renderer.tokenizer.apply_chat_template(TURNS, tokenize=False)
    assert renderer.tokenizer.decode(sample.tokens) == whole
    assert (
        renderer.tokenizer.decode(sample.tokens[: -sample.response_length])
        == "<|system|>Add.<|end|><|user|>1 + 2<|end|><|assistant|>"
    )


def test_a_turn_can_be_left_out_and_what_follows_the_last_one_is_cut(renderer):
    turns = [*TURNS[:2], TURNS[2] | {"step_loss_mask": 0}, *TURNS[3:]]
    _, trained = supervised(renderer, turns)
    assert trained == "7<|end|>"


def test_one_turn_is_the_same_as_a_label(renderer):
    conversation, _ = supervised(renderer, TURNS[:3])
    labelled, trained = supervised(renderer, TURNS[:2], "3")
    assert (
        conversation.tokens == labelled.tokens
        and conversation.response_length == labelled.response_length
        and trained == "3<|end|>"
    )


def test_a_conversation_without_an_answer_is_refused_by_row(renderer):
    with pytest.raises(DataError, match="data.jsonl:7: no label"):
        supervised(renderer, TURNS[:2])


ADD = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
ADDED = [TURNS[1], {"role": "assistant", "content": "wait", "tool_calls": [ADD]}, {"role": "tool", "content": "3"}]


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("{{ m.content }}", ["tools", "tool calls"]),
        ("{{ m.content }}{{ m.tool_calls }}", ["tools"]),
        ("{{ m.content }}{{ tools }}", ["tool calls"]),
        ("{{ m.content }}{{ tools }}{{ m.tool_calls }}", []),
    ],
)
def test_what_a_template_leaves_out_of_a_conversation_with_tools_is_said_once(renderer, monkeypatch, written, said):
    monkeypatch.setattr(
        renderer.tokenizer, "chat_template", f"{{% for m in messages %}}<|{{{{ m.role }}}}|>{written}{{% endfor %}}"
    )
    warnings = []
    fresh = Renderer(renderer.tokenizer.name_or_path, renderer.options, warnings.append)
    fresh.tokenizer = renderer.tokenizer
    fresh.prompt(PromptRow("plain", None, {}, "data.jsonl", 1))
    for line in (2, 3):
        fresh.prompt(
            PromptRow(ADDED, None, {"tools": [{"type": "function", "function": {"name": "add"}}]}, "data.jsonl", line)
        )
    assert warnings == [
        f"warning: data.jsonl:2: the chat template writes no {what}: the model neither sees nor learns them"
        for what in said
    ]


# -- templates of other kinds, over the same tokenizer -----------------------------------------------------------------


def test_a_role_whose_messages_a_template_leaves_out_is_said_once(renderer, monkeypatch):
    knows = "{% for m in messages if m.role != 'tool' %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    monkeypatch.setattr(renderer.tokenizer, "chat_template", knows)
    warnings = []
    fresh = Renderer(renderer.tokenizer.name_or_path, renderer.options, warnings.append)
    fresh.tokenizer = renderer.tokenizer
    for line in (1, 2, 3):
        fresh.prompt(
            PromptRow([*TURNS[:2], {"role": "tool", "content": "9"}][: line + 1], None, {}, "data.jsonl", line)
        )
    assert warnings == [
        "warning: data.jsonl:2: the chat template writes no messages of the role tool: the model neither sees nor "
        "learns them"
    ]


def prompt(renderer, value, **metadata) -> list[str]:
    rendered = renderer.prompt(PromptRow(value, None, metadata, "data.jsonl", 7))
    return renderer.tokenizer.convert_ids_to_tokens(rendered.tokens)


def test_null_content_is_empty_and_never_the_word(render):
    _, trained = supervised(render(CALLING), CALLS)
    assert trained == "[add]<|end|>It is 3.<|end|>"
    missing = [CALLS[0], {"role": "assistant", "tool_calls": CALL}, {"role": "tool", "content": None}, CALLS[3]]
    sample, trained = supervised(render(CALLING), missing)
    assert trained == "[add]<|end|>It is 3.<|end|>" and "None" not in renderer_text(render(), sample)


def test_a_template_that_looks_for_null_is_given_it(render):
    _, trained = supervised(render(LOOKS_FOR_NULL), CALLS)
    assert trained == "[add]<|end|>say It is 3.<|end|>"


@pytest.mark.parametrize(
    ("template", "row", "label", "kind", "words"),
    [
        (None, TURNS[:2], " ", "empty_answer", "the label is empty"),
        (None, [*TURNS[:2], {"role": "assistant", "content": "\n"}], None, "empty_answer", "message 3 is empty"),
        (
            CALLING.replace("{{ m.content }}", ""),
            TURNS[:3],
            None,
            "left_out",
            "leaves out the assistant's answer in message 3",
        ),
        (None, [*TURNS[:2], TURNS[2] | {"step_loss_mask": 0}], None, "empty_answer", "no turn of it"),
        (None, [*TURNS[:2], TURNS[2] | {"loss": 0}], None, "loss_mask", "loss: 0, which nothing here reads"),
        (None, [*TURNS[:2], TURNS[2] | {"weight": 0.5}], None, "loss_mask", "weight: 0.5"),
        (None, [*TURNS[:2], TURNS[2] | {"step_loss_mask": "no"}], None, "loss_mask", "step_loss_mask: 'no'"),
        (None, TURNS[:3], "3", "two_answers", "it has a label"),
        ("{{ raise_exception('no such role') }}", TURNS, None, "template", "no such role"),
        ("{{ nothing.there }}", "1 + 2", "3", "template", "undefined"),
        ("{{ messages[0].role }}" + GLM, [TURNS[2]], None, "begins_with_assistant", "begins with the assistant"),
        (GLM.replace("<|assistant|>", ""), [TURNS[2]], None, "no_prompt", "nothing comes before the answer"),
    ],
)
def test_what_is_wrong_with_one_row_is_an_error_of_its_row(render, template, row, label, kind, words):
    with pytest.raises(RowError) as caught:
        supervised(render(template), row, label)
    assert (
        caught.value.kind == kind
        and caught.value.message.startswith("data.jsonl:7: ")
        and words in caught.value.message
    )


def test_a_conversation_that_begins_with_the_assistant_is_trained_where_the_template_can(renderer):
    sample, trained = supervised(renderer, [TURNS[2], *TURNS[3:]])
    assert trained == "3<|end|>7<|end|>" and sample.tokens[0] == renderer.tokenizer.convert_tokens_to_ids(
        "<|assistant|>"
    )


SPELLED = list("<|end|>")


def test_control_tokens_in_a_row_are_text(render):
    assert prompt(render(), "<|end|>") == ["<|user|>", *SPELLED, "<|end|>", "<|assistant|>"]
    asked = [TURNS[1], {"role": "assistant", "content": "a"}, {"role": "tool", "content": "<|end|>"}]
    assert prompt(render(), asked)[-9:] == [*SPELLED, "<|end|>", "<|assistant|>"]
    halves = [{"role": "user", "content": "<|e"}, {"role": "user", "content": "nd|>"}]
    assert prompt(render("{% for m in messages %}{{ m.content }}{% endfor %}"), halves) == SPELLED
    listed = "{{ tools | tojson }}<|{{ messages[0].role }}|>"
    assert prompt(render(listed), "hi", tools=[{"name": "<|end|>", "<|pad|>": 1}])[-1] == "<|user|>"
    assert not {"<|end|>", "<|pad|>"} & set(prompt(render(listed), "hi", tools=[{"name": "<|end|>", "<|pad|>": 1}]))


def test_control_tokens_in_a_label_are_text(render):
    sample, trained = supervised(render(), "1", "<|end|>2")
    assert trained == "<|end|>2<|end|>" and sample.tokens.count(1) == 2, "one after the prompt, one after the answer"


def test_control_tokens_are_refused_or_allowed_by_option(render):
    with pytest.raises(RowError, match=r"data.jsonl:7: it holds the control token <\|end\|>"):
        prompt(render(special_tokens="refuse"), "a<|end|>")
    assert prompt(render(special_tokens="keep"), "<|end|>") == ["<|user|>", "<|end|>", "<|end|>", "<|assistant|>"]


def test_plain_text_with_control_tokens_needs_a_word_from_the_user(render):
    """It may be a prompt that is rendered already, or an attack: nobody but the user knows."""
    with pytest.raises(RowError, match=r"the prompt holds the control token <\|user\|>") as caught:
        prompt(render(apply_chat_template=False), "<|user|>hi")
    assert "--special-tokens-in-data" in caught.value.fix and "keep" in caught.value.fix
    assert prompt(render(apply_chat_template=False, special_tokens="keep"), "<|user|>hi") == ["<|user|>", "h", "i"]
    assert prompt(render(apply_chat_template=False, special_tokens="text"), "<|end|>") == SPELLED
    with pytest.raises(RowError, match="the label holds the control token"):
        supervised(render(apply_chat_template=False, special_tokens=None), "1", "2<|end|>")


def test_a_template_that_looks_for_a_control_token_in_the_text_is_not_deceived_and_not_wrong(render):
    splits = "{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('<|pad|>')[-1] }}{% endfor %}"
    with pytest.raises(RowError, match="looks for that") as caught:
        prompt(render(splits), "a<|pad|>b")
    assert caught.value.kind == "special_token"
    assert prompt(render(splits, special_tokens="keep"), "a<|pad|>b") == ["<|user|>", "b"]


def test_a_prompt_and_its_answer_must_fit_the_model(render):
    assert len(prompt(render(context=16, answer=8), "abcde")) == 8
    with pytest.raises(
        RowError, match="data.jsonl:7: it has 9 tokens, 8 are kept for the answer, and the model takes 16"
    ):
        prompt(render(context=16, answer=8), "abcdef")
    with pytest.raises(RowError, match="7 are kept"):
        prompt(render(context=15, answer=1), "abcdef")
    row = PromptRow("abcdef", None, {}, "data.jsonl", 7)
    assert render(context=16, answer=8, max_prompt=8).prompt(row) is None, "left out, as asked"
    assert len(render(context=16, answer=8, eval_answer=7, max_prompt=None).eval_prompt(row).tokens) == 9
    assert render(context=16, eval_max_prompt=8).eval_prompt(row) is None
    assert len(render(context=16, answer=8, together=16).prompt(row).tokens) == 9, "the answer is cut at 16"
    with pytest.raises(RowError, match="it has 9 tokens, 8 are kept"):
        render(context=16, answer=8, together=17).prompt(row)
    with pytest.raises(RowError, match="it has 13 tokens, and the model takes 12") as caught:
        supervised(render(context=12), "abcdef", "abc")
    assert caught.value.kind == "beyond_context"


def test_the_options_of_a_stage():
    s = resolve(
        ["--rollout-max-response-len", "6", "--eval-max-response-len", "9", "--rollout-stop-token-ids", "3"]
    ).slime
    options = RenderOptions.of(s, 512)
    lengths = (options.training.answer, options.evaluation.answer)
    assert (*lengths, options.context, options.stop_token_ids) == (6, 9, 512, (3,))
    own = RenderOptions.of(dataclasses.replace(s, custom_generate_function_path="f.py:f"), 512)
    assert (own.training.answer, own.evaluation.answer) == (1, 1), (
        "how long an answer it asks for is the function's own affair"
    )
