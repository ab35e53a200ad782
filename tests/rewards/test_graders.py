"""Built-in reward types against answers whose right reward is known."""

import pathlib

import pytest

from slime_cli.buffer.sources.open import open_source
from slime_cli.errors import UsageError
from slime_cli.rewards.graders import GraderError, check_rm_type, grade, last_boxed
from tests.rewards.judged_pairs import PAIRS, right, verdict


@pytest.mark.parametrize(("rm_type", "kind"), sorted({(pair["rm_type"], pair["kind"]) for pair in PAIRS}))
def test_every_judged_pair_of_a_kind_is_graded_as_judged(rm_type, kind):
    wrong = [
        f"{pair['response']!r} against {pair['label']!r} {pair['metadata'] or ''}: {got}, not {pair['verdict']}"
        for pair in PAIRS
        if (pair["rm_type"], pair["kind"]) == (rm_type, kind) and not right(pair, got := verdict(pair))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("rm_type", "response", "label", "reward"),
    [
        ("exact", " 42 \n", "42", 1),
        ("exact", "42.", "42", 0),
        ("boxed_exact", r"so \boxed{1} or \boxed{42}", "42", 1),
        ("boxed_exact", "42", "42", 0),
        ("f1", "The cat sat!", "a cat sat", 1),
        ("f1", "cat dog", "cat bird", 0.5),
        ("f1", "x x x", "x", 0.5),
        ("f1", "", "x", 0),
        ("math", r"we get $x=3$ so \boxed{\frac{1}{2}}", "0.5", 1),
        ("math", "First 3 apples, so the answer is 7", "7", 1),
        ("math", r"\boxed{7} no wait, \boxed{8}", "7", 0),
        ("math", r"<think>\boxed{5}</think> It is \boxed{6}.", "6", 1),
        ("math", "no idea", "7", 0),
        ("math", r"\boxed{x^2+2x+1}", "(x+1)^2", 1),
        ("boxed_math", r"1 then \boxed{2}", "2", 1),
        ("boxed_math", "2", "2", 0),
        ("deepscaler", r"thinking</think> \boxed{4}", "4", 1),
        ("deepscaler", r"\boxed{4}", "4", 0),
        ("gpqa", "The answer is (C).", "C", 1),
        ("gpqa", r"A is tempting. \boxed{\text{B}}", "B", 1),
        ("gpqa", "**Answer: D**", "D", 1),
        ("gpqa", "I think the answer: a", "B", 0),
        ("gpqa", "Between A and B, B", "B", 1),
        ("gpqa", "nothing", "A", 0),
    ],
)
def test_known_rewards(rm_type, response, label, reward):
    assert grade(rm_type, response, label, {}) == pytest.approx(reward)


def test_dapo_scores_plus_and_minus_one():
    assert grade("dapo", "steps\nAnswer: $\\frac{6}{2}$", "3", {}) == {
        "score": 1.0,
        "acc": True,
        "pred": "$\\frac{6}{2}$",
    }
    assert grade("dapo", "3", "3", {}) == {"score": -1.0, "acc": False, "pred": "[INVALID]"}


def test_gpqa_takes_an_options_text_as_label():
    choices = {"choices": ["red", "green"]}
    assert grade("gpqa", "answer is B", "green", choices) == 1
    with pytest.raises(GraderError, match="neither one of AB"):
        grade("gpqa", "answer is B", "blue", choices)


def test_random_depends_on_the_index_alone():
    rewards = [grade("random", "x", None, {}, index) for index in range(200)]
    assert rewards == [grade("random", "other", "l", {}, index) for index in range(200)]
    assert 60 < sum(rewards) < 140


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"\boxed{a{b}c}", "a{b}c"),
        (r"\boxed{\{1\}}", r"\{1\}"),
        (r"\boxed{1} \boxed{2", "1"),
        (r"\fbox{9} \fboxed{3}", "3"),
        (r"\boxed{2} \fbox{9}", "9"),
        (r"\boxed 78 and more", "78"),
        (r"the \boxed command", None),
        (r"\boxed{1} {\boxed{2}} } \boxed{{3}", "2"),
        ("boxed{1}", None),
    ],
)
def test_last_boxed_balances_braces(text, inside):
    assert last_boxed(text) == inside


def test_missing_labels_and_unknown_types_are_named():
    for rm_type in ("exact", "math", "math_ordered", "math_boxes", "f1", "f1_hotpotqa", "gpqa", "dapo", "deepscaler"):
        with pytest.raises(GraderError, match="needs a label"):
            grade(rm_type, "Answer: 1", None, {})
        with pytest.raises(GraderError, match="is empty"):
            grade(rm_type, "Answer: 1", " ", {})
    with pytest.raises(UsageError, match="did you mean 'math'"):
        check_rm_type("maths")
    check_rm_type("boxed_remote_rm")


@pytest.mark.parametrize("task", ["basic_arithmetic", "arc_1d", "rearc", "decimal_arithmetic", "word_ladder"])
def test_reasoning_gym_pays_its_own_answers_after_a_trip_through_json(task):
    import json

    row = open_source(f"reasoning-gym:{task}?size=2")[1]
    metadata = json.loads(json.dumps(row.metadata))
    assert grade("reasoning-gym", f"  {row.label}\n", row.label, metadata) == 1.0
    assert grade("reasoning-gym", "surely not", row.label, metadata) < 0.5
    assert grade("reasoning-gym", " ", row.label, metadata) == 0.0


def test_reasoning_gym_scores_with_the_sources_arguments():
    """decimal_arithmetic rounds to its configured places, so a scorer with default arguments pays otherwise."""
    row = open_source(
        "reasoning-gym:decimal_arithmetic?size=1&min_num_decimal_places=1&max_num_decimal_places=1&precision=6"
    )[0]
    near = str(float(row.label) + 0.01)
    gym = row.metadata["reasoning_gym"]
    default = {**row.metadata, "reasoning_gym": {**gym, "arguments": {}}}
    assert grade("reasoning-gym", near, row.label, row.metadata) > grade("reasoning-gym", near, row.label, default)


def test_a_verifier_that_raises_is_a_grader_error():
    row = open_source("reasoning-gym:prime_factorization?size=1")[0]
    with pytest.raises(GraderError, match="prime_factorization cannot score 'not numbers'"):
        grade("reasoning-gym", "not numbers", row.label, row.metadata)
    with pytest.raises(GraderError, match="missing"):
        grade("reasoning-gym", "x", "x", {})


@pytest.mark.parametrize(
    "hostile",
    [
        r"\boxed{__import__('os').system('touch PATH')}",
        "$__import__('pathlib').Path('PATH').touch()$",
        "answer is open('PATH','w')",
        r"\boxed{\text{eval(open('PATH','w'))}}",
    ],
)
def test_hostile_answers_are_inert(tmp_path, hostile):
    target = pathlib.Path(tmp_path / "owned")
    assert grade("math", hostile.replace("PATH", str(target)), "7", {}) == 0
    assert not target.exists()
