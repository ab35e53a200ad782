"""An option takes the characters that are written, in a profile as on the command line: YAML's guesses have no part in
it."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slime_cli.errors import UsageError
from slime_cli.models import tiny
from slime_cli.options import characters, profiles, roles
from slime_cli.options.layers import from_argv
from slime_cli.options.spec import UNSET

GUESSED = (
    "12:30 1:30:15 010 0o17 0x1F 0b11 1_000 1e-6 1.0 .5 +5 .inf .NaN on off yes no On NO y n true False 2026-11-30 "
    "2026-11-30T10:00:00Z null ~ = 007 1e3"
).split()
"""Scalars that YAML 1.1 takes for something else, or that people expect it to."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("profiles")


def layer(folder, text: str) -> dict:
    path = folder / "mine.yaml"
    path.write_text(text)
    return profiles.load(str(path)).layer


def value(folder, section: str, entry: str):
    (found,) = layer(folder, f"{section}:\n  {entry}\n").values()
    return found


def refused(folder, section: str, entry: str) -> str:
    with pytest.raises(UsageError) as caught:
        value(folder, section, entry)
    return f"{caught.value.message} | {caught.value.fix}"


def test_the_items_of_a_text_list_are_the_characters_written(folder):
    assert value(folder, "slime", f"rollout_stop: [{', '.join(GUESSED)}]") == GUESSED
    assert value(folder, "slime", "rollout-stop:\n" + "".join(f"    - {text}\n" for text in GUESSED)) == GUESSED


@pytest.mark.parametrize("text", [text for text in GUESSED if text not in characters.NULLS])
@pytest.mark.parametrize(
    ("section", "key", "dest"),
    [
        ("slime", "label_key", "label_key"),
        ("megatron", "te-precision-config-file", "te_precision_config_file"),
        ("sglang", "served-model-name", "served_model_name"),
        ("router", "api-key", "api_key"),
    ],
)
def test_a_text_option_takes_the_characters_written(folder, section, key, dest, text):
    assert layer(folder, f"{section}: {{{key}: {text}}}") == {(section, dest): text}
    assert layer(folder, f"{section}: {{{key}: '{text}'}}") == {(section, dest): text}


@pytest.mark.parametrize(
    ("section", "entry", "said"),
    [
        ("megatron", "lr: 12:30", "megatron.lr takes a number, got '12:30'"),
        ("megatron", "lr: .inf", "megatron.lr takes a number, got '.inf'"),
        ("megatron", "lr: on", "got 'on'"),
        ("megatron", "lr: 2026-11-30", "got '2026-11-30'"),
        ("megatron", "num-layers: 1:30", "takes a whole number, got '1:30'"),
        ("megatron", "num-layers: 0x1F", "got '0x1F'"),
        ("megatron", "num-layers: 1e3", "got '1e3'"),
        ("megatron", "num-layers: true", "got 'true'"),
        ("megatron", "bf16: on", "megatron.bf16 is a flag and takes true (given) or false (not given), got 'on'"),
        ("megatron", "bf16: 1", "got '1'"),
        ("megatron", "bf16:", "got 'nothing'"),
        ("slime", "trace: yes", "slime.trace got 'yes' | choose from on, off"),
        ("slime", "label_key: [a]", "slime.label_key takes text, got [a]"),
        ("slime", "label_key: {a: 1}", "got {a: 1}"),
        ("slime", "rollout_stop: [[a]]", "got [a]"),
        ("slime", "rollout_stop:\n    -\n", 'got nothing | write "" for an empty text'),
        ("slime", "apply_chat_template_kwargs: '{\"a\": NaN}'", "takes JSON"),
        ("slime", "apply_chat_template_kwargs: on", "takes JSON, got 'on'"),
        ("sglang", "mem-fraction-static: 0:30", "takes a number, got '0:30'"),
    ],
)
def test_a_number_that_is_none_is_refused_with_file_key_and_value(folder, section, entry, said):
    message = refused(folder, section, entry)
    assert said in message and "mine.yaml" in message


def test_numbers_are_those_of_the_command_line(folder):
    assert value(folder, "megatron", "lr: 1e-6") == value(folder, "megatron", "lr: '1e-6'") == 1e-6
    assert value(folder, "megatron", "num-layers: 010") == 10
    assert value(folder, "slime", "rollout_stop_token_ids: [010, 7]") == [10, 7]
    assert value(folder, "megatron", "moe-layer-freq: [0, 1, 1]") == "[0, 1, 1]"
    assert value(folder, "megatron", "moe-layer-freq: 2") == 2
    assert value(folder, "megatron", "bf16: True") is True


def test_nothing_takes_an_option_back_and_quotes_make_text(folder):
    for nothing in ("", "~", "null"):
        assert value(folder, "slime", f"label_key: {nothing}") is UNSET
    assert value(folder, "slime", "label_key: 'null'") == "null" and value(folder, "slime", "label_key: ''") == ""
    assert value(folder, "slime", "rollout_stop: ['', null]") == ["", "null"]
    assert layer(folder, "slime:\nmegatron: ~\nphases: null\n") == {}


def test_json_of_a_profile_has_jsons_types(folder):
    entry = (
        "apply_chat_template_kwargs: {thinking: false, n: 3, x: 1e-6, day: 2026-11-30, at: 12:30, code: 010, mode: on, "
        "none: null, quoted: '3', many: [1, yes, True], on: {off: 1.5}}"
    )
    assert value(folder, "slime", entry) == {
        "thinking": False,
        "n": 3,
        "x": 1e-6,
        "day": "2026-11-30",
        "at": "12:30",
        "code": "010",
        "mode": "on",
        "none": None,
        "quoted": "3",
        "many": [1, "yes", True],
        "on": {"off": 1.5},
    }
    assert value(folder, "slime", "apply_chat_template_kwargs: '{\"n\": 3}'") == {"n": 3}


def test_names_of_phases_and_merged_maps(folder):
    path = folder / "phased.yaml"
    path.write_text("phases:\n- &a\n  name: 010\n  slime: {label_key: on}\n- <<: *a\n  name: 12:30\n- {}\n")
    phases = profiles.load(str(path)).phases
    assert [phase["name"] for phase in phases] == ["010", "12:30", "phase-3"] and phases[1]["slime"] == {
        "label_key": "on"
    }


WORD = st.from_regex(r"[A-Za-z0-9]([A-Za-z0-9_.:+-]*[A-Za-z0-9])?", fullmatch=True)


@settings(max_examples=40, deadline=None)
@given(WORD)
@example("12:30")
@example("1_000")
@example("nan")
@example("0o17")
def test_a_profile_and_the_command_line_read_a_word_alike(folder, word):
    if word in characters.NULLS:
        return
    for section, key in (
        ("slime", "label-key"),
        ("megatron", "lr"),
        ("megatron", "num-layers"),
        ("megatron", "moe-layer-freq"),
        ("slime", "rollout-stop"),
        ("slime", "apply-chat-template-kwargs"),
    ):
        results = []
        for read in (
            lambda: layer(folder, f"{section}: {{{key}: {word}}}"),
            lambda: from_argv([f"--{key}={word}"], "train")[0],
        ):
            try:
                results.append(repr(read()))
            except UsageError as error:
                results.append(error.message.partition(" takes ")[2])
        assert results[0] == results[1]


def test_a_roles_file_is_read_alike(folder):
    path = folder / "roles.yaml"
    path.write_text("megatron:\n- role: critic\n  lr: 1e-5\n  lr-warmup-iters: 010\n  te-precision-config-file: on\n")
    assert roles.read(str(path), "critic") == {"lr": 1e-5, "lr_warmup_iters": 10, "te_precision_config_file": "on"}
    path.write_text("megatron:\n- {role: critic, lr: 12:30}\n")
    with pytest.raises(UsageError, match=r"roles.yaml: critic: megatron.lr takes a number, got '12:30'"):
        roles.read(str(path), "critic")


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("hidden_size=12:30", "hidden_size takes a whole number, got '12:30'"),
        ("rope_theta=on", "takes a number"),
        ("tie_word_embeddings=yes", "takes true or false"),
        ("width=3", "unknown field width"),
        ("seed=a", "seed takes"),
    ],
)
def test_the_numbers_of_a_tiny_model_are_read_alike(query, said):
    with pytest.raises(UsageError, match=said):
        tiny.config(f"tiny:qwen3?{query}")
    assert tiny.config("tiny:qwen3?num_hidden_layers=010&seed=3")["num_hidden_layers"] == 10
