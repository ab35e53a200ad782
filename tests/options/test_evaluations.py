"""``--eval-config``: 1. a set's value wins over the defaults', theirs over the options; 2. whatever is no such file, an
unknown key or a value that the option would not take is named with its place; 3. what would have no effect is an error.
"""

import json
import pathlib

import pytest

from slime_cli.errors import UsageError
from slime_cli.options.checks import check
from slime_cli.options.evaluations import KEYS, evaluation_sets
from tests.options.test_checks import resolved

FILE = """
eval:
  defaults:
    n_samples_per_eval_prompt: 4
    temperature: 0.6
    metadata_overrides: {source: 7, deep: {a: true}}
  datasets:
    - name: aime
      path: aime.jsonl
      rm_type: deepscaler
      max_response_len: 40
      label_key: answer
    - {name: gpqa, path: "gpqa.jsonl@[:5]", n_samples_per_eval_prompt: 1, top_k: -1, custom_rm_path: my.score}
"""


def written(tmp_path: pathlib.Path, text: str) -> str:
    path = tmp_path / "eval.yaml"
    path.write_text(text)
    return str(path)


def test_a_set_wins_over_the_defaults_and_these_over_the_options(tmp_path):
    words = f"--eval-config {written(tmp_path, FILE)} --eval-interval 2 --eval-top-p 0.5 --label-key target"
    found = resolved(words)
    assert check(found) == []
    aime, gpqa = evaluation_sets(found.slime)
    assert (aime.name, aime.path) == ("aime", "aime.jsonl") and gpqa.path == "gpqa.jsonl@[:5]"
    assert aime.settings() == {
        "apply_chat_template": False,
        "apply_chat_template_kwargs": {},
        "custom_generate_function_path": None,
        "max_context_len": None,
        "max_prompt_len": None,
        "stop": None,
        "stop_token_ids": None,
        "n_samples_per_eval_prompt": 4,
        "temperature": 0.6,
        "top_p": 0.5,
        "top_k": -1,
        "max_response_len": 40,
        "min_new_tokens": 0,
    }
    assert gpqa.settings() | {"n_samples_per_eval_prompt": 4, "max_response_len": 40} == aime.settings()
    assert gpqa.options.n_samples_per_eval_prompt == 1
    assert (aime.options.eval_label_key, gpqa.options.eval_label_key) == ("answer", "target")
    assert aime.metadata == {"source": 7, "deep": {"a": True}, "rm_type": "deepscaler"}
    assert gpqa.metadata["custom_rm_path"] == "my.score" and "rm_type" not in gpqa.metadata


def test_every_key_is_an_option_that_the_set_overrides(tmp_path):
    values = dict.fromkeys(KEYS, 9) | {key: "k" for key in KEYS if key.endswith(("_key", "_path"))}
    values |= {"temperature": 0.5, "top_p": 0.5, "stop": ["a", "b c"], "stop_token_ids": [3]}
    values |= {"apply_chat_template": True, "apply_chat_template_kwargs": {"thinking": False}}
    one = [f"    {key}: {json.dumps(value)}" for key, value in values.items()]
    text = "\n".join(["datasets:", "  - name: a", "    path: b.jsonl", *one])
    (found,) = evaluation_sets(resolved(f"--eval-config {written(tmp_path, text)}").slime)
    for key, dest in KEYS.items():
        assert getattr(found.options, dest) == values[key]


def test_a_flag_is_taken_back_for_one_set_and_a_prompt_leaves_room_in_each(tmp_path):
    text = """
    defaults: {max_context_len: 20}
    datasets:
      - {name: a, path: a.jsonl, apply_chat_template: false}
      - {name: b, path: b.jsonl, max_prompt_len: 5}
    """
    words = f"--eval-config {written(tmp_path, text)} --apply-chat-template"
    plain, chat = evaluation_sets(resolved(words).slime)
    assert (plain.options.apply_chat_template, chat.options.apply_chat_template) == (False, True)
    assert (plain.options.eval_max_prompt_len, chat.options.eval_max_prompt_len) == (19, 5)
    narrow, _ = evaluation_sets(resolved(f"{words} --eval-max-prompt-len 7").slime)
    assert narrow.options.eval_max_prompt_len == 7


ONE = "{name: a, path: b.jsonl"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "`datasets` must be a list of sets"),
        ("eval: {datasets: []}", "`datasets` must be a list of sets"),
        ("datasets: {a: b}", "`datasets` must be a list of sets"),
        ("[1]", "must be a map"),
        ("eval: {datasets: [x]}", "set 1: must be a map"),
        ("eval: 3", "eval: must be a map"),
        (f"eval: {{datasets: [{ONE}}}]}}\nother: 1", "unknown key `other`"),
        (f"datasets: [{ONE}, temperatur: 1}}]", "set 1: unknown key `temperatur` (did you mean 'temperature'?)"),
        (f"defaults: {{name: x}}\ndatasets: [{ONE}}}]", "defaults: unknown key `name`"),
        (f"datasets: [{ONE}, apply_chat_template: 3}}]", "apply_chat_template is a flag"),
        (f"datasets: [{ONE}, stop_token_ids: [-1]}}]", "stop_token_ids is -1"),
        ("datasets: [{path: b}]", "set 1 has no name"),
        ("datasets: [{name: b, path: }]", "set 1 has no path"),
        (f"datasets: [{ONE}}}, {ONE}}}]", "two sets are called 'a'"),
        (f"datasets: [{ONE}, top_p: 1.5}}]", "set 1: top_p is 1.5"),
        (f"datasets: [{ONE}, n_samples_per_eval_prompt: 0}}]", "n_samples_per_eval_prompt is 0"),
        (f"datasets: [{ONE}, temperature: hot}}]", "temperature"),
        (f"datasets: [{ONE}, metadata_overrides: 3}}]", "metadata_overrides: must be a map"),
        ("a: [", "not readable as YAML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, text, words):
    with pytest.raises(UsageError) as caught:
        check(resolved(f"--eval-config {written(tmp_path, text)}"))
    assert words in caught.value.message + caught.value.fix


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("--eval-prompt-data a b", "the sets come from one of them"),
        ("--custom-rm-path m.f", "aime has an rm_type, and --custom-rm-path rewards every sample"),
    ],
)
def test_what_would_have_no_effect_is_an_error(tmp_path, more, words):
    with pytest.raises(UsageError, match=words):
        check(resolved(f"--eval-config {written(tmp_path, FILE)} {more}"))


def test_a_file_that_is_not_there_is_named(tmp_path):
    found = resolved(f"--eval-config {tmp_path}/none.yaml")
    assert check(found) == []  # the plan of a run elsewhere
    with pytest.raises(UsageError, match="none.yaml: cannot be read"):
        evaluation_sets(found.slime)
