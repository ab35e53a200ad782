r"""Answers that graders of this kind were seen to judge wrong: each stays right.

1. Every case that was reported of ours, and slow ones within bounded CPU time.
2. What ends a turn is no part of an answer, for any type; it is one where the label has it too.
"""

import time

import pytest

from slime_cli.rewards.graders import GraderError, equality, grade

CITIES = {"choices": ["Rome", "Oslo"]}
CASES = [
    ("math", r"\boxed{50\%}", "50", {}, 1),
    ("math", r"\boxed{0.5}", r"50\%", {}, 1),
    ("math", r"\boxed{90°}", "90", {}, 1),
    ("math", r"\boxed{5.}", "5", {}, 1),
    ("math", r"\boxed{12}", r"\$12", {}, 1),
    ("math", r"\boxed{1\,234}", "1234", {}, 1),
    ("math", r"\boxed{–5}", "-5", {}, 1),
    ("math", r"\boxed{0.\overline{3}}", "1/3", {}, 1),
    ("math", r"\boxed{1e3}", "1000", {}, 1),
    ("math", r"\boxed{½}", "1/2", {}, 1),
    ("math", r"\boxed{3 1/2}", "7/2", {}, 1),
    ("math", r"\boxed{x>5}", r"(5,\infty)", {}, 1),
    ("math", r"\boxed{act}", "cat", {}, 0),
    ("math", r"\boxed{\text{The answer is } 42}", "42", {}, 1),
    ("math", r"\fbox{7}", "7", {}, 1),
    ("gpqa", "Answer: C", "2", {"choices": ["p", "q", "r", "s"]}, 1),
    ("gpqa", "Answer: B", "any", {"correct_letter": "B"}, 1),
    ("gpqa", "The answer is Oslo", "Oslo", CITIES, 1),
    ("gpqa", "the answer is OSLO", "oslo", CITIES, 1),
    ("gpqa", r"\boxed{\textbf{(B)}}", "B", {}, 1),
    ("gpqa", r"\boxed{B. 12}", "B", {}, 1),
    ("gpqa", "Answer: J", "J", {}, 1),
    ("dapo", "Answer: 42.", "42", {}, 1),
]
SLOW = [
    ("math", r"\boxed{" * 5000, "7"),
    ("math", r"\boxed{10^{10^{10}}}", "5"),
    ("math", r"\boxed{\sum_{n=1}^{\infty} \frac{1}{n^n}}", "5"),
    ("math", r"\boxed{" + "(" * 3000 + "7" + ")" * 3000 + "}", "5"),
    ("gpqa", "answer" + " " * 300 + "x", "B"),
]
ENDS = ("<|im_end|>", "<|im_end|>\n", "<|eot_id|>", "<｜end▁of▁sentence｜>", "</s>", "<end_of_turn>\n<eos>")


def score(rm_type: str, response: str, label: str, metadata: dict[str, object]) -> float:
    found = grade(rm_type, response, label, metadata)
    return (found["score"] + 1) / 2 if isinstance(found, dict) else found


@pytest.mark.parametrize(("rm_type", "response", "label", "metadata", "reward"), CASES)
def test_a_case_that_was_judged_wrong_is_right(rm_type, response, label, metadata, reward):
    assert score(rm_type, response, label, metadata) == reward


@pytest.mark.parametrize(("rm_type", "response", "label"), SLOW, ids=[case[1][:20] for case in SLOW])
def test_a_slow_case_is_wrong_within_two_seconds(rm_type, response, label):
    equality.load_math_verify()
    begin = time.process_time()
    assert score(rm_type, response, label, {}) == 0
    assert time.process_time() - begin < 2.0


def test_an_empty_label_is_no_answer():
    with pytest.raises(GraderError, match="is empty"):
        grade("math", "", "", {})


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize(
    ("rm_type", "response", "label"),
    [
        ("exact", "Oslo", "Oslo"),
        ("f1", "Oslo", "Oslo"),
        ("f1_hotpotqa", "yes", "yes"),
        ("boxed_exact", r"\boxed{Oslo}", "Oslo"),
        ("math", "the answer is 7", "7"),
        ("math", r"\boxed{7}", "7"),
        ("dapo", "Answer: 42", "42"),
        ("gpqa", "B", "B"),
        ("deepscaler", r"</think>\boxed{7}", "7"),
    ],
)
def test_what_ends_a_turn_is_no_part_of_an_answer(rm_type, response, label, end):
    assert score(rm_type, response + end, label, {}) == 1


def test_a_label_that_ends_so_wants_the_end():
    assert grade("exact", "<s>gone</s>", "<s>gone</s>", {}) == 1
    assert grade("exact", "<s>gone", "<s>gone</s>", {}) == 0
