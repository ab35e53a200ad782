"""Examples as lines: what is read and what is trained, token by token."""

import pytest

from slime_cli.buffer.types import PromptRow
from slime_cli.rollout.shown import lines
from tests.rollout.rendering import TURNS


def shown(renderer, messages: list[dict], width: int = 80) -> list[str]:
    return lines(renderer.tokenizer, renderer.example(PromptRow(messages, None, {}, "data.jsonl", 7)), width)


def test_every_token_is_shown_once_with_what_becomes_of_it(render):
    assert shown(render(), TURNS[1:]) == [
        "read     <|user|> 1 ·+ · 2 <|end|> <|assistant|>",
        "TRAINED  3 <|end|>",
        "read     <|user|> an d · 4 <|end|> <|assistant|>",
        "TRAINED  7 <|end|>",
    ]


@pytest.mark.parametrize("width", [24, 40, 80])
def test_lines_fit_and_lose_no_trained_token(render, width):
    long = [TURNS[1], {"role": "assistant", "content": "0123456789" * 9}]
    found = shown(render(), long, width)
    assert max(map(len, found)) <= width and found[0].startswith("read     <|user|>")
    trained = " ".join(found).partition("TRAINED")[2].split()
    assert trained == [*"0123456789" * 9, "<|end|>"]


def test_the_middle_of_a_long_prompt_is_left_out(render):
    found = " ".join(shown(render(), [{"role": "user", "content": "1" * 100}, TURNS[2]])).split()
    assert found[:6] == ["read", "<|user|>", "1", "1", "1", "(75"] and found.count("1") == 3 + 22
