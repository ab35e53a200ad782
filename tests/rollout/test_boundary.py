"""What may pass into and out of generation, and the text of an answer, over the tiny model's tokenizer and template."""

import json
import shutil
import types

import pytest
from tokenizers import AddedToken

from slime_cli.buffer.types import PromptRow, RowError, Sample
from slime_cli.models import tiny
from slime_cli.models.tokens import load
from slime_cli.rollout.boundary import Boundary, turn_ends
from slime_cli.rollout.chat import Rendered

PLAIN = ["</think>", "<tool_call>", "</tool_call>"]
"""Added tokens that are part of an answer, as Qwen3 has them."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.make("tiny:qwen3?num_hidden_layers=1", tmp_path_factory.mktemp("boundary") / "model")


@pytest.fixture
def tokenizer(model):
    found = load(str(model))
    found.add_tokens([AddedToken(text, special=False) for text in PLAIN])
    return found


def ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def boundary(tokenizer, model, *, skip=False, stop=None, stop_ids=None):
    args = types.SimpleNamespace(rollout_stop_token_ids=stop_ids, rollout_stop=stop, rollout_skip_special_tokens=skip)
    return Boundary.of(tokenizer, str(model), 323, args)


def stripped(tokenizer, model, answer, *, skip=False, **options):
    """What a grader reads of an answer whose text was decoded as the options say; its tokens stay."""
    tokens = ids(tokenizer, answer)
    sample = Sample(
        0,
        0,
        tokens=[9, *tokens],
        response_length=len(tokens),
        response=tokenizer.decode(tokens, skip_special_tokens=skip),
    )
    boundary(tokenizer, model, skip=skip, **options).strip(sample)
    assert sample.tokens == [9, *tokens]
    return sample.response


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("Oslo<|end|>", "Oslo"),
        ("Oslo", "Oslo"),
        ("Oslo <|end|><|pad|><|pad|>", "Oslo "),
        ("Oslo<|end|>\n", "Oslo"),
        ("Oslo\n", "Oslo\n"),
        ("<|end|>", ""),
        ("2</think><|end|>", "2</think>"),
        ("<tool_call>{}</tool_call><|end|>", "<tool_call>{}</tool_call>"),
    ],
)
def test_what_ends_a_turn_is_no_part_of_the_answer_whatever_the_options(tokenizer, model, answer, text, skip):
    assert stripped(tokenizer, model, answer, skip=skip) == text


def test_a_turn_that_ended_earlier_stays_in_a_text_of_several_turns(tokenizer, model):
    assert (
        stripped(tokenizer, model, "1<|end|><|user|>more<|end|><|assistant|>2<|end|>")
        == "1<|end|><|user|>more<|end|><|assistant|>2"
    )


def test_special_tokens_that_the_user_named_end_a_turn_and_plain_ones_stay_for_format_rewards(tokenizer, model):
    user = ids(tokenizer, "<|user|>")[0]
    call = ids(tokenizer, "</tool_call>")[0]
    assert stripped(tokenizer, model, "2<|user|>") == "2<|user|>"
    assert stripped(tokenizer, model, "2<|user|>", stop_ids=[user]) == "2"
    assert stripped(tokenizer, model, "x</tool_call>", stop_ids=[call]) == "x</tool_call>"
    assert boundary(tokenizer, model, stop=["</answer>"], stop_ids=[call, user]).stops == ("</answer>", "</tool_call>")
    assert boundary(tokenizer, model, stop="###").stops == ("###",)


def test_what_ends_a_turn_is_found_in_configs_tokenizer_and_template(tokenizer, model, tmp_path):
    folder = shutil.copytree(model, tmp_path / "model")
    end, pad, user, tool = (ids(tokenizer, text)[0] for text in ("<|end|>", "<|pad|>", "<|user|>", "<|tool|>"))
    assert turn_ends(tokenizer, str(folder)) == {end, pad}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, user]}))
    assert turn_ends(tokenizer, str(folder)) == {end, pad, user}
    tokenizer.eos_token = "<|tool|>"
    tokenizer.pad_token = None
    for name in ("generation_config.json", "config.json"):
        (folder / name).write_text(json.dumps({"eos_token_id": tool}))
    assert turn_ends(tokenizer, str(folder)) == {tool, end}, "the template ends its turns with <|end|>"
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    assert turn_ends(tokenizer, str(folder)) == {tool}


@pytest.mark.parametrize(
    ("tokens", "said"),
    [([1, 400], "token 400"), ([-1], "token -1"), ([], "no token"), ([323], "323 .None.*embedding has 323 rows")],
)
def test_a_prompt_that_no_engine_may_be_sent_is_refused_by_file_and_row(tokenizer, model, tokens, said):
    with pytest.raises(RowError, match=f"d.jsonl:4: .*{said}"):
        boundary(tokenizer, model).prompt(PromptRow("x", None, {}, "d.jsonl", 4), tokens)
    render = boundary(tokenizer, model).checked(lambda row: Rendered("", tokens[:1], answer=tokens[1:]))
    with pytest.raises(RowError, match=said):
        render(PromptRow("x", None, {}, "d.jsonl", 4))


def test_a_prompt_of_the_models_last_row_passes(tokenizer, model):
    boundary(tokenizer, model).prompt(PromptRow("x", None, {}, "d.jsonl", 4), [0, 322])
