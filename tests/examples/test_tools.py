"""The tools of examples/, without engines: what is computed, what is found, what counts as right."""

import importlib.util
import json
import pathlib
import re
import shlex
import types

import pytest

from slime_cli.commands import doctor_function, train

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


def example(name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


calculator, retrieval, agents = map(example, ("calculator", "retrieval", "solver_and_critic"))


COMMANDS = re.findall(r"^slime (train .*?)\n```", (EXAMPLES / "README.md").read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS, ids=["calculator", "retrieval", "solver_and_critic"])
def test_a_command_of_the_page_is_a_run(command, capsys, monkeypatch):
    """Planned in full: options, data, functions; with a model that is made in the place of the one that is named."""
    monkeypatch.chdir(EXAMPLES.parent)
    words = shlex.split(command.replace("\\\n", " ").replace("Qwen3-0.6B", "tiny:qwen3?max_position_embeddings=4096"))
    assert train.run([*words[1:], "--dry-run"]) == 0
    said = capsys.readouterr()
    assert "warning" not in said.out + said.err


@pytest.mark.parametrize(("name", "tokens"), [("calculator", 20), ("retrieval", 16), ("solver_and_critic", 4)])
def test_the_contract_of_a_generate_function_holds_with_tool_calls(name, tokens, tmp_path):
    """A scripted engine answers ``2+3``; the mark ends a call at its last character."""
    (tmp_path / "marks.yaml").write_text('calculator_open: [""]\ncalculator_close: ["3"]\nretrieval_close: ["3"]\n')
    words = ["--custom-config-path", str(tmp_path / "marks.yaml"), "--rollout-max-response-len", "200"]
    found = list(doctor_function.check("generate", f"{EXAMPLES / name}.py:generate", words))
    assert [finding.status for finding in found] == ["ok"] * len(found), found
    said = " ".join(finding.detail for finding in found)
    assert f"{tokens} of them trained" in said and "it says ABORTED" in said


def sample(response: str, label: str) -> types.SimpleNamespace:
    return types.SimpleNamespace(response=response, label=label)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("so <<12*(3+4)>>", "12*(3+4)"),
        ("<<1>> and then <<2>>\n", "1"),
        ("<<1 <<2+2>>", "2+2"),
        ("no call", None),
        ("only an end >>", None),
    ],
)
def test_the_call_of_a_turn(text, found):
    assert calculator.called(text) == found


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12*(3+4)", "84"),
        ("1/4", "0.25"),
        ("-3 - -2", "-1"),
        ("2+", "error"),
        ("1/0", "error"),
        ("2**99999999", "error"),
        ("__import__('os').getcwd()", "error"),
        ("True+1", "error"),
        ("9" * 200, "error"),
        ("1e308*10", "inf"),
        ("(" * 90, "error"),
        ("\x00", "error"),
        ("", "error"),
    ],
)
def test_the_calculator_computes_numbers_and_nothing_else(expression, value):
    assert calculator.value(expression) == value


def test_the_search_finds_the_passage_of_each_question():
    index = retrieval.index(str(retrieval.CORPUS))
    for line in (EXAMPLES / "data" / "questions.jsonl").read_text().splitlines():
        row = json.loads(line)
        best = index.search(row["question"], retrieval.PASSAGES)
        assert any(row["answer"] in f"{p['title']} {p['text']}" for p in best), row
    assert index.search("zzz", 2) == []


def test_the_scores_are_okapi_bm25_s():
    """By hand: two passages of 2 and 3 words; 'a' is in both, 'b' in the first."""
    index = retrieval.Index([{"title": "a", "text": "b"}, {"title": "a", "text": "a c"}])
    assert [p["text"] for p in index.search("b", 2)] == ["b"]
    assert [p["text"] for p in index.search("a", 2)] == ["a c", "b"], "twice in one that is little longer"
    assert [p["text"] for p in index.search("a b", 2)] == ["b", "a c"], "the rare word weighs more"


@pytest.mark.parametrize(
    ("module", "response", "label", "reward"),
    [
        (calculator, "<<2+3>> = 5\n 5", "5", 1.0),
        (calculator, "<<2+3>> = 5\n 6", "5", 0.0),
        (calculator, "none", "5", 0.0),
        (retrieval, "<answer>the black sea</answer>", "Black Sea", 0.0),
        (retrieval, "<answer>x</answer><answer> black sea. </answer>", "Black Sea", 1.0),
        (retrieval, "Black Sea", "Black Sea", 0.0),
    ],
)
def test_rewards(module, response, label, reward):
    assert module.reward(None, sample(response, label)) == reward


@pytest.mark.parametrize(
    ("text", "said"), [("Yes, it is", "yes"), ("No: yes would be wrong", "no"), ("I know nothing", None)]
)
def test_the_critic_s_verdict(text, said):
    assert agents.verdict(sample(text, "")) == said
