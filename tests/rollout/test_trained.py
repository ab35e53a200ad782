"""The turns of a conversation that are trained, over templates of each kind."""

import pytest

from slime_cli.buffer.types import PromptRow, RowError, Sample
from tests.rollout.rendering import ASKED, CALL, CALLING, CALLS, DROPS, GLM, TURNS, renderer_text, supervised

LONG = [*TURNS[:2], {"role": "assistant", "content": "is 3"}, *TURNS[3:]]


def test_a_template_that_rewrites_earlier_turns_makes_a_sample_of_each_stretch(render):
    """Siblings of one trajectory, each after the prompt that an engine would be given."""
    changed = render(DROPS)
    example = changed.example(PromptRow(LONG, None, {"k": 1}, "data.jsonl", 7))
    siblings = example.samples(Sample(5, 2, metadata={"k": 1}))
    assert [(s.index, s.group_index, s.part, s.metadata) for s in siblings] == [
        (5, 2, 0, {"k": 1}),
        (5, 2, 1, {"k": 1}),
    ]
    texts = [changed.tokenizer.decode(s.tokens[-s.response_length :]) for s in siblings]
    assert texts == ["is 3<|end|>", "7<|end|>"] and [s.loss_mask for s in siblings] == [None, None]
    asked = "<|system|>Add.<|end|><|user|>1 + 2<|end|><|assistant|>"
    assert [s.prompt for s in siblings] == [asked, f"{asked}3<|end|><|user|>and 4<|end|><|assistant|>"]
    kept, trained = supervised(render(DROPS, rewritten_turns="keep"), LONG)
    assert trained == "is 3<|end|>7<|end|>"
    assert changed.tokenizer.decode(kept.tokens) == f"{asked}is 3<|end|><|user|>and 4<|end|><|assistant|>7<|end|>"
    with pytest.raises(RowError, match="data.jsonl:7: the chat template rewrites earlier turns") as caught:
        render(DROPS, rewritten_turns="refuse").example(PromptRow(LONG, None, {}, "data.jsonl", 7))
    assert caught.value.kind == "rewritten" and "--on-rewritten-turns fan-out" in caught.value.fix


THINKS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('</think>')[-1] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
"""DeepSeek-R1's kind: the generation prompt opens what no turn of the template's has."""


@pytest.mark.parametrize(
    ("policy", "content", "before", "trained"),
    [
        ("fill", "3", "<think>\n", "\n</think>\n\n3<|end|>"),
        ("fill", "<think>\neasy\n</think>\n\n3", "<think>\n", "easy\n</think>\n\n3<|end|>"),
        ("fill", "easy</think>3", "<think>\n", "easy</think>3<|end|>"),
        ("fill", "<think>easy</think> 3", "<think>\n", "easy</think> 3<|end|>"),
        ("cut", "3", "", "3<|end|>"),
    ],
)
def test_a_generation_prompt_that_opens_thinking_is_matched(render, policy, content, before, trained):
    changed = render(THINKS, opened_thinking=policy)
    sample, text = supervised(changed, [TURNS[1], {"role": "assistant", "content": content}])
    assert (sample.prompt, text) == (f"<|user|>1 + 2<|end|><|assistant|>{before}", trained)


def test_thinking_that_is_not_to_be_matched_is_refused(render):
    answered = [TURNS[1], {"role": "assistant", "content": "<think>easy</think>3"}]
    for policy, kind in (("refuse", "opened_thinking"), ("cut", "left_out")):
        with pytest.raises(RowError) as caught:
            supervised(render(THINKS, opened_thinking=policy), answered)
        assert caught.value.kind == kind and caught.value.fix


def test_a_field_of_reasoning_has_the_name_that_the_template_reads(render):
    reads = THINKS.replace(
        "{{ m.content", "{% if m.thinking %}<think>\n{{ m.thinking }}</think>{% endif %}{{ m.content"
    )
    _, trained = supervised(render(reads), [TURNS[1], TURNS[2] | {"reasoning_content": "easy"}])
    assert trained == "easy</think>3<|end|>"
    with pytest.raises(RowError, match="leaves out the assistant's reasoning in message 2") as caught:
        supervised(render(CALLING), [TURNS[1], TURNS[2] | {"reasoning_content": "easy"}])
    assert caught.value.kind == "left_out" and "reasoning_content" in caught.value.fix


@pytest.mark.parametrize("given", ['{"a": 1}', {"a": 1}])
@pytest.mark.parametrize("written", ["c.function.arguments | tojson", "'[' + c.function.arguments + ']'"])
def test_a_calls_arguments_have_the_form_that_the_template_takes(render, given, written):
    template = CALLING.replace("c.function.name", written)
    calls = [{"function": {"name": "", "arguments": given}}]
    _, trained = supervised(render(template), [TURNS[1], {"role": "assistant", "content": "", "tool_calls": calls}])
    assert trained.strip("[]").replace("]", "") == '{"a": 1}<|end|>'


def test_a_message_that_the_template_leaves_out_of_an_answers_context_is_refused(render):
    knows = "{% for m in messages if m.role != 'tool' %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}" + ASKED
    with pytest.raises(RowError, match=r"leaves out message 2 \(tool\), which comes before message 3") as caught:
        supervised(render(knows), [TURNS[1], {"role": "tool", "content": "9"}, TURNS[2]])
    assert caught.value.kind == "left_out"


def test_nothing_is_trained_behind_the_token_that_stops_generation(render):
    """Phi-3.5's kind: it ends a whole conversation once more."""
    ends = (
        GLM.replace("{{ m.content }}", "{{ m.content }}<|end|>\n")
        + "{% if not add_generation_prompt %}<|pad|>{% endif %}"
    )
    sample, trained = supervised(render(ends), TURNS)
    assert trained == "3<|end|>7<|end|>"
    assert renderer_text(render(), sample).endswith("\n<|user|>and 4<|end|>\n<|assistant|>7<|end|>")


def test_the_next_roles_marker_is_trained_where_it_ends_generation(render):
    """GLM's kind. The last turn ends in the marker too, though nothing follows it in the row."""
    sample, trained = supervised(render(GLM, stops=["<|user|>"]), TURNS)
    assert trained == "3<|user|>7<|user|>"
    labelled, trained = supervised(render(GLM, stops=["<|user|>"]), TURNS[:2], "3")
    assert trained == "3<|user|>" and labelled.tokens == sample.tokens[: len(labelled.tokens)]
    skipped, trained = supervised(
        render(GLM, stops=["<|user|>"]), [*TURNS[:2], TURNS[2] | {"step_loss_mask": 0}, *TURNS[3:]]
    )
    assert trained == "7<|user|>" and skipped.tokens == sample.tokens


def test_a_turn_that_calls_a_tool_ends_in_the_tools_marker(render):
    calling = CALLING.replace("<|end|>", "")
    _, trained = supervised(
        render(calling, stops=["<|user|>", "<|tool|>"]), [CALLS[0], CALLS[1] | {"content": "wait"}, *CALLS[2:]]
    )
    assert trained == "wait[add]<|tool|>It is 3.<|user|>"
    _, trained = supervised(render(calling, stops=["<|user|>", "<|tool|>"]), [CALLS[0], CALLS[1] | {"content": "wait"}])
    assert trained == "wait[add]<|tool|>"


def test_the_marker_is_found_where_another_turn_would_drop_the_reasoning(render):
    drops = GLM.replace("{{ m.content }}", "{{ m.content if loop.last else m.content.split('</think>')[-1] }}")
    _, trained = supervised(render(drops, stops=["<|user|>"]), "1 + 2", "<think>easy</think>3")
    assert trained == "<think>easy</think>3<|user|>"


def test_a_template_in_which_nothing_ends_a_turn_is_refused(render):
    with pytest.raises(
        RowError, match="data.jsonl:7: nothing that the chat template writes ends the assistant's turn"
    ) as caught:
        supervised(render(GLM), TURNS)
    assert caught.value.kind == "no_end" and "generation_config.json" in caught.value.fix
    _, trained = supervised(
        render(GLM.replace("{{ m.content }}", "{{ m.content }}\n##\n"), stop_texts=("##",)), TURNS[:3]
    )
    assert trained == "3\n##\n", "a stop text of the user's ends it"


def test_calls_that_the_template_leaves_out_are_never_learned_as_silence(render):
    with pytest.raises(RowError, match="leaves out the assistant's tool calls in message 2") as caught:
        supervised(render(), CALLS)
    assert caught.value.kind == "left_out"
    _, trained = supervised(render(), [CALLS[0], CALLS[1] | {"step_loss_mask": 0}, *CALLS[2:]])
    assert trained == "It is 3.<|end|>"
    twice = CALLING.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
    two = CALL + [{"function": {"name": "take", "arguments": {}}}]
    with pytest.raises(RowError, match="leaves out the assistant's tool calls"):
        supervised(render(twice), [CALLS[0], CALLS[1] | {"tool_calls": two}, *CALLS[2:]])
