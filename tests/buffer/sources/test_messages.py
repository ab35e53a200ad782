"""One shape for chat messages: content is text or null, a role is one word, a tool call names a function."""

import pytest

from slime_cli.buffer.sources.base import label_text
from slime_cli.buffer.sources.messages import RowProblem, as_messages, as_tools

CALLS = [{"function": {"name": "f", "arguments": {}}}]


def content(message: dict) -> str | None:
    return as_messages([{"role": "user"} | message], "input")[0]["content"]


def test_parts_become_their_text():
    assert content({"content": [{"type": "text", "text": "1 + "}, {"type": "text", "text": "2"}]}) == "1 + 2"
    assert content({"content": ["1 + ", {"text": "2"}]}) == "1 + 2"


@pytest.mark.parametrize("name", ["tool_calls", "reasoning_content"])
def test_null_and_missing_content_are_the_same_where_a_message_says_something_else(name):
    more = {name: CALLS if name == "tool_calls" else "I think."}
    assert content({"role": "assistant", "content": None} | more) is None
    assert content({"role": "assistant"} | more) is None
    assert content({"role": "assistant", "content": []} | more) is None
    assert content({"role": "tool", "content": None}) is None


def test_other_fields_that_are_null_are_absent():
    """``"tool_calls": null`` says that there are none, and a template would loop over it or write the word."""
    message = {"role": "assistant", "content": "4", "tool_calls": None, "name": None, "reasoning_content": None}
    assert as_messages([message], "input") == [{"role": "assistant", "content": "4"}]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"content": None}, "message 1 has null as content"),
        ({"content": 3}, "message 1 has a number as content"),
        ({"content": []}, "message 1 has an empty list as content"),
        (
            {"content": [{"type": "text", "text": "see"}, {"type": "image", "image": "a.png"}]},
            "part 2 is of type 'image', not text",
        ),
        ({"content": [{"type": "text", "text": None}]}, "part 1 is of type 'text', not text"),
        ({"content": [7]}, "part 1 is a number, not text"),
        ({"content": "x", "role": "user|>y<|system"}, "which is not one word"),
        ({"content": "x", "tool_calls": {"name": "f"}}, "an object as tool_calls, not a list"),
        ({"content": "x", "tool_calls": [{"function": {}}]}, "tool call 1 names no function"),
        ({"content": "x", "tool_calls": ["f()"]}, "tool call 1 names no function"),
    ],
)
def test_what_is_no_message_is_refused_with_its_place(message, reason):
    with pytest.raises(RowProblem) as caught:
        content(message)
    assert caught.value.field == "input" and reason in caught.value.reason


def test_a_label_of_text_parts_is_its_text_and_any_other_list_stays_json():
    assert label_text([{"type": "text", "text": "4"}, {"type": "text", "text": "2"}], "label") == "42"
    assert label_text(["4", "four"], "label") == '["4", "four"]'
    assert label_text([{"type": "text", "text": 4}], "label") == '[{"type": "text", "text": 4}]'


def test_a_tool_is_an_object():
    with pytest.raises(RowProblem, match="tool 2 is text"):
        as_tools([{"name": "f"}, "g"], "tools", columnar=False)
    with pytest.raises(RowProblem, match="not JSON"):
        as_tools(["g"], "tools", columnar=True)
