"""What ends a turn in a chat template, from a checkpoint's files alone."""

import json

import pytest

from slime_cli.commands.doctor_checkpoint import check_chat_template
from slime_cli.errors import DataError
from slime_cli.rollout import template

GLM = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
CHATML = "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
LLAMA = (
    "{% for m in messages %}{{ bos_token }}[{{ m.content }}]"
    "{% if m.role == 'assistant' %} {{ eos_token }}{% endif %}{% endfor %}"
)
TOKENS = ["<s>", "</s>", "<|start|>", "<|end|>", "<|user|>", "<|assistant|>", "<|eom_id|>"]


@pytest.fixture
def checkpoint(tmp_path):
    def write(
        text: str,
        eos: int | list[int] | None = None,
        generation: int | list[int] | None = None,
        eos_token: str | None = None,
    ):
        added = [{"id": i, "content": token, "special": True} for i, token in enumerate(TOKENS)]
        (tmp_path / "tokenizer.json").write_text(
            json.dumps({"added_tokens": added, "model": {"type": "BPE", "vocab": {"a": 9}}})
        )
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": eos_token}))
        (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": eos}}))
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
        (tmp_path / "chat_template.jinja").write_text(text)
        return tmp_path

    return write


@pytest.mark.parametrize(
    ("text", "stops", "kind", "token"),
    [
        (CHATML, dict(eos=3), "stop", "<|end|>"),
        (CHATML, dict(eos=1, generation=[1, 3]), "stop", "<|end|>"),
        (LLAMA, dict(eos_token="</s>"), "stop", "</s>"),
        (CHATML.replace("<|end|>", "<|eom_id|>"), dict(eos=1), "stop", "<|eom_id|>"),
        (GLM, dict(generation=[1, 4]), "next", "<|user|>"),
        (CHATML, dict(eos=1), "other", "<|end|>"),
        (GLM, dict(eos=1), "none", ""),
        (GLM, dict(), "none", ""),
    ],
)
def test_what_ends_a_turn(checkpoint, text, stops, kind, token):
    found = template.turn_end(checkpoint(text, **stops))
    assert (found.kind, found.text) == (kind, token) and bool(found.problem()) == (kind in ("other", "none"))


def test_what_cannot_be_known_is_not_claimed(checkpoint):
    assert template.turn_end(checkpoint(GLM, eos=77)) is None, "a stop whose text is not in the tokenizer"
    assert template.turn_end(checkpoint(GLM + "{{ raise_exception('no') }}", eos=1)) is None
    assert template.turn_end(checkpoint(GLM.replace("{{ m.content }}", "{{ m.content }}."), eos=None)) is None, (
        "it writes something"
    )


def test_training_needs_an_end_and_doctor_names_a_missing_one(checkpoint):
    template.require_end(checkpoint(GLM, eos=4))
    template.require_end(checkpoint(CHATML, eos=1))
    with pytest.raises(
        DataError, match="nothing in it ends the assistant's turn: generation stops at '</s>'"
    ) as caught:
        template.require_end(checkpoint(GLM, eos=1))
    assert "generation_config.json" in caught.value.fix
    found = check_chat_template(checkpoint(GLM, eos=1))
    assert found.status == "warn" and "nothing in it ends" in found.detail and found.fix == template.END_FIX
    found = check_chat_template(checkpoint(CHATML, eos=1))
    assert found.status == "warn" and "ends a turn with '<|end|>', and generation stops at '</s>'" in found.detail
    found = check_chat_template(checkpoint(GLM, eos=4))
    assert found.status == "ok" and "'<|user|>' ends a turn" in found.detail
