"""Text to ids. The contract: 1. ordinary text has the tokenizer's own ids; 2. a row's strings never become a control
token, alone or joined; 3. the template's control tokens stay what they are; 4. one beginning-of-sequence token, and
nothing after a text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_cli.models.tokens import MARK, NotText, Tokens, strings
from tests.rollout.tokenizer_kinds import CONTROL, KINDS


@pytest.fixture(scope="module", params=sorted(KINDS))
def tokens(request) -> Tokens:
    return Tokens(KINDS[request.param]())


PIECES = st.lists(
    st.sampled_from([*CONTROL, "<|", "end", "|>", "<", "s", ">", "/", "the end", " ", "é漢", "\n"]), max_size=8
).map("".join)


def plain(tokens: Tokens, text: str) -> list[int]:
    return tokens.tokenizer(text, add_special_tokens=False)["input_ids"]


@given(pieces=PIECES)
@settings(max_examples=60, deadline=None)
def test_the_renamed_tokenizer_gives_the_same_ids(tokens, pieces):
    """What the template wrote, encoded with a mark somewhere else in the text or without one."""
    assert tokens.encode(pieces) == plain(tokens, pieces)
    assert tokens.encode(pieces + "the end" + MARK) == plain(tokens, pieces + "the end")


@given(data=PIECES, more=PIECES)
@settings(max_examples=100, deadline=None)
def test_no_string_of_a_row_becomes_a_control_token(tokens, data, more):
    ids = tokens.encode("<|user|>" + tokens.mark(data) + tokens.mark(more) + "<|end|>")
    assert [i for i in ids if i in tokens.ids] == [tokens.control["<|user|>"], tokens.control["<|end|>"]]


def test_text_comes_back_from_its_tokens():
    tokens = Tokens(KINDS["byte_level"]())
    text = "say <|end|> and <s>, <|end|"
    assert tokens.tokenizer.decode(tokens.encode(tokens.mark(text))) == text


def test_marks_are_in_every_string_and_key_and_nowhere_else(tokens):
    value = {"a": ["<|end|>", 3, None, "plain <b> text"], "<s>k": {"deep": "x</s>y"}}
    marked = tokens.mark(value)
    assert [text.replace(MARK, "") for text in strings(marked)] == list(strings(value))
    assert [text for text in strings(marked) if MARK not in text] == ["a", "plain <b> text", "deep"]
    assert tokens.found(value) == "<|end|>" and tokens.found("plain <b> text") is None


def test_the_mark_itself_is_refused(tokens):
    with pytest.raises(NotText, match="U\\+FDD0"):
        tokens.mark(f"a{MARK}b")


def test_one_beginning_and_no_end(tokens):
    first = tokens.control["<s>"]
    for text in ("the end", "<s>the end"):
        ids = tokens.begin(text, tokens.mark(text))
        assert ids[0] == first and ids.count(first) == 1 and tokens.control["</s>"] not in ids
    assert tokens.begin("the end", "the end") == tokens.tokenizer("the end")["input_ids"][:-1]
    assert tokens.begin("<s>the end", "<s>the end") == plain(tokens, "<s>the end"), (
        "not taken apart: the text is what it was"
    )
    again = tokens.begin("<s><s>a", tokens.mark("<s><s>a"))
    assert again.count(first) == 1, "the second one is the row's own text"


def test_markup_of_answers_is_no_control_token_and_markers_of_roles_are():
    tokenizer = KINDS["byte_level"]()
    tokenizer.add_tokens(["<think>", "<｜User｜>"])
    tokenizer.add_special_tokens({"additional_special_tokens": [*CONTROL[2:], "</think>"]})
    tokens = Tokens(tokenizer)
    assert "<｜User｜>" in tokens.control and not {"<think>", "</think>"} & set(tokens.control)
    ids = tokens.encode(tokens.mark("<think>a</think><｜User｜>b"))
    assert [tokenizer.convert_ids_to_tokens(i) for i in ids if i in tokenizer.added_tokens_decoder] == [
        "<think>",
        "</think>",
    ]
