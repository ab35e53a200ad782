"""What an endpoint serves is compared with the model whose weights it is to take, before anything is sent."""

import json
import shutil

import pytest

from slime_cli.errors import DataError, EngineError
from slime_cli.weights import matching
from tests import checkpoints
from tests.scripted_engine import ScriptedEngine


def compare(ours, engine, dtype="float32", **fields):
    said = []
    matching.require(str(ours), engine.endpoint(**fields), [engine.url], dtype, said.append)
    return said


def test_the_same_model_passes_without_a_word_wherever_its_folder_is(tmp_path):
    served = checkpoints.write(tmp_path / "served")
    shutil.copytree(served, tmp_path / "copy")
    assert compare(tmp_path / "copy", ScriptedEngine(served)) == []


OTHERS = {
    "a vocabulary of 64, not 32": {"vocab_size": 64},
    "model.embed_tokens.weight is 32 x 8, not 32 x 16": {"hidden_size": 8},
    "model.layers.2.input_layernorm.weight is 16, not missing": {"num_hidden_layers": 3},
    "model.layers.1.input_layernorm.weight is missing, not 16": {"num_hidden_layers": 1},
    "LlamaForCausalLM, not Qwen3ForCausalLM": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "rotary_base is 10000, not 1000000": {"rope_theta": 1e4},  # equal shapes from here on
    "norm_epsilon is 1e-05, not 1e-06": {"rms_norm_eps": 1e-5},
}


@pytest.mark.parametrize(("said", "fields"), OTHERS.items(), ids=list(OTHERS))
def test_another_model_is_refused_with_both_named_and_nothing_is_sent(tmp_path, said, fields):
    engine = ScriptedEngine(checkpoints.write(tmp_path / "served"))
    ours = checkpoints.write(tmp_path / "ours", **fields)
    with pytest.raises(DataError) as raised:
        compare(ours, engine)
    message = raised.value.message
    assert said in message and str(ours) in message and str(tmp_path / "served") in message and engine.url in message
    assert "serve-rollout" in raised.value.fix and not engine.posted


def test_of_an_endpoint_on_another_machine_the_manifest_is_believed(tmp_path):
    served = checkpoints.write(tmp_path / "served")
    ours = checkpoints.write(tmp_path / "ours", num_hidden_layers=3)
    recorded = matching.identity(served)
    engine = ScriptedEngine(ours)  # a folder of the same name is here as well, and is another model
    engine.answers["/model_info"]["model_path"] = str(ours)
    with pytest.raises(DataError, match=r"layers\.2"):
        compare(ours, engine, host="elsewhere", **recorded)
    assert compare(served, engine, host="elsewhere", **recorded) == []


def test_a_stale_manifest_is_not_believed_where_the_engine_says_otherwise(tmp_path):
    served = checkpoints.write(tmp_path / "served", num_hidden_layers=3)
    before = checkpoints.write(tmp_path / "before")
    engine = ScriptedEngine(served)
    stale = {"model": str(before), **matching.identity(before)}
    with pytest.raises(DataError, match=r"layers\.2"):
        compare(before, engine, **stale)
    assert compare(served, engine, **stale) == []
    engine.answers["/model_info"] |= {"model_path": "/gone", "architectures": ["LlamaForCausalLM"]}
    with pytest.raises(DataError, match="Qwen3ForCausalLM, not LlamaForCausalLM"):
        compare(before, engine, **stale)


def test_where_nobody_can_read_the_model_the_architecture_is_compared_and_that_is_said(tmp_path):
    engine = ScriptedEngine(checkpoints.write(tmp_path / "served"))
    said = compare(checkpoints.write(tmp_path / "ours", num_hidden_layers=3), engine, host="elsewhere")
    assert len(said) == 1 and "architecture alone" in said[0]
    with pytest.raises(DataError, match="LlamaForCausalLM, not Qwen3ForCausalLM"):
        compare(checkpoints.write(tmp_path / "llama", architectures=["LlamaForCausalLM"]), engine, host="elsewhere")


def test_a_config_that_the_engine_overrides_counts_as_overridden(tmp_path):
    served = checkpoints.write(tmp_path / "served")
    engine = ScriptedEngine(served, json_model_override_args='{"rope_theta": 10000.0}')
    with pytest.raises(DataError, match="rotary_base is 1000000, not 10000"):
        compare(served, engine)


@pytest.mark.parametrize(
    ("theirs", "warned"), [("float16", True), ("half", True), ("bfloat16", False), ("auto", False)]
)
def test_engines_that_compute_in_another_type_are_warned_about(tmp_path, theirs, warned):
    served = checkpoints.write(tmp_path / "served")
    said = compare(served, ScriptedEngine(served, dtype=theirs), dtype="bfloat16")
    assert bool(said) == warned and all("--sglang-dtype bfloat16" in line for line in said)


def test_an_engine_that_does_not_answer_is_named(tmp_path):
    served = checkpoints.write(tmp_path / "served")
    engine = ScriptedEngine(served)
    engine.answers.pop("/server_info")
    with pytest.raises(EngineError, match=f"{engine.url}/server_info"):
        compare(served, engine)


def test_a_tokenizer_with_other_entries_is_another_one_however_its_file_is_written(tmp_path):
    served = checkpoints.write(tmp_path / "served")
    ours = checkpoints.write(tmp_path / "ours")
    engine = ScriptedEngine(served)
    one = {
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": ["a b"]},
        "added_tokens": [{"id": 2, "content": "<e>", "special": True}],
    }
    same = {
        "added_tokens": [{"content": "<e>", "id": 2}],
        "model": {"merges": [["a", "b"]], "vocab": {"b": 1, "a": 0}, "type": "BPE"},
        "version": "1.0",
    }
    (served / "tokenizer.json").write_text(json.dumps(one))
    (ours / "tokenizer.json").write_text(json.dumps(same, indent=4))
    assert compare(ours, engine) == []
    for change in (
        {"model": same["model"] | {"vocab": {"b": 0, "a": 1}}},
        {"model": same["model"] | {"merges": []}},
        {"added_tokens": []},
    ):
        (ours / "tokenizer.json").write_text(json.dumps(same | change))
        with pytest.raises(DataError, match="tokenizer has other entries"):
            compare(ours, engine)
    (ours / "tokenizer.json").write_text("[]")
    with pytest.raises(DataError, match="not a tokenizer"):
        compare(ours, engine)


def test_an_engine_that_drafts_with_another_model_is_refused(tmp_path):
    served = checkpoints.write(tmp_path / "served")
    engine = ScriptedEngine(served)
    engine.answers["/server_info"]["speculative_draft_model_path"] = str(served)
    assert compare(served, engine) == []
    engine.answers["/server_info"]["speculative_draft_model_path"] = "another"
    with pytest.raises(DataError, match="drafts with another"):
        compare(served, engine)
