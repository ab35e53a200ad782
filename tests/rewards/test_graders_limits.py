r"""No response makes a grader hang or fail; tests/rewards/test_rewards.py sees that workers outlive them.

1. Responses made to be slow get a verdict in bounded CPU time: 0, or 1 where they hold the right answer.
2. Whatever LaTeX, words and signs are strung together, the reward is a number.
"""

import threading
import time

import hypothesis
import pytest
from hypothesis import strategies

from slime_cli.rewards.graders import equality, grade, limits, mathematics

CHOICES = {"choices": ["Oslo", "12", "x", "Rome"]}
MATRIX = r"\begin{pmatrix}" + r"\\".join("&".join("1" * 200) for _ in range(200)) + r"\end{pmatrix}"
BOXED = {
    "a tower of powers": "10^{10^{10}}",
    "a small power of a tower": "2^{-10^{10}}",
    "a huge factorial": "(10^{10})!",
    "a factorial of factorials": "((10!)!)!",
    "a long factorial": "1000000!",
    "an infinite sum": r"\sum_{n=1}^{\infty} \frac{1}{n^n}",
    "a long sum": r"\sum_{n=1}^{10000000000} \frac{1}{n^n}",
    "an integral without a closed form": r"\int_0^{\infty} e^{-x^5} \sin(x^3) \ln(x+1) dx",
    "a large power of a sum": "(x+y+z+w)^{100}",
    "a large binomial": r"\binom{1000000000}{500000000}",
    "a remainder of a tower": r"10^{10^{10}} \bmod 7",
    "nested parentheses": "(" * 3000 + "7" + ")" * 3000,
    "some nested parentheses": "(" * 50 + "x" + ")" * 50,
    "nested fractions": r"\frac{1}{" * 50 + "2" + "}" * 50,
    "more digits than Python reads": "9" * 5000,
    "a hundred thousand digits": "9" * 100_000,
    "a huge exponent": "1e999999999",
    "a huger exponent": "1e" + "9" * 50,
    "a huge matrix": MATRIX,
    "a long list": ",".join(map(str, range(1000))),
    "twenty signs": r"1 \pm " * 20 + "2",
    "a long repeating decimal": "0." + "3" * 1500 + r"\ldots",
    "letters": "abcdefgh" * 200,
    "units": "5 " + "cm " * 600,
    "blanks": "is" + " " * 1900 + "is",
    "dollars": "$" * 1900 + "7",
}
BARE = {
    "boxes that nobody closes": r"\boxed{" * 5000,
    "a box command and blanks": (r"\boxed" + " " * 1000) * 100,
    "blanks after the word answer": "answer" + " " * 100_000 + "x",
    "stars after the word answer": "answer" + "*" * 100_000,
    "many statements": "the answer is " * 20_000,
    "many refused options": "option A is wrong " * 5000,
    "open braces": "{" * 200_000,
    "fences that nobody closes": "```python\n" * 20_000,
    "backslashes": "\\" * 200_000,
    "dollars": "$" * 200_000,
    "numbers": "1," * 100_000,
    "words": "the " * 100_000,
}
RESPONSES = {**BARE, **{name: f"\\boxed{{{inside}}}" for name, inside in BOXED.items()}}


@pytest.fixture
def little_time(monkeypatch):
    monkeypatch.setattr(mathematics, "SECONDS", 0.1)
    equality.load_math_verify()


@pytest.mark.parametrize("name", RESPONSES)
def test_a_slow_response_is_wrong_in_bounded_time(little_time, name):
    assert grade("code", RESPONSES[name], None, {"tests": ["assert 0"], "time_limit": 0.2}) == 0
    for rm_type in ("math", "gpqa", "dapo", "deepscaler", "f1", "exact", "boxed_math", "boxed_gpqa"):
        response = {"dapo": "Answer: %s", "deepscaler": "</think>%s"}.get(rm_type, "%s") % RESPONSES[name]
        begin = time.process_time()
        reward = grade(rm_type, response, "Oslo" if "gpqa" in rm_type else r"\frac{x}{2}", CHOICES)
        assert reward == 0 or rm_type == "dapo" and reward["score"] == -1, rm_type
        assert time.process_time() - begin < 5, rm_type


def test_a_right_answer_among_slow_text_is_right(little_time):
    assert grade("math", r"\boxed{7} " + r"\boxed{" * 5000, "7", {}) == 1
    assert grade("math", r"\boxed{" + "{" * 30 + "7" + "}" * 31, "7", {}) == 1
    assert grade("math", r"\boxed{%s}" % ("9" * 5000), "9" * 5000, {}) == 1
    assert grade("math", r"\boxed{10^{10^{10}}}", "10^{10^{10}}", {}) == 1
    assert grade("gpqa", "option A is wrong " * 5000 + "so B", "B", {}) == 1


def test_the_limit_ends_loops_that_swallow_exceptions_and_leaves_no_timer():
    def stubborn() -> None:
        for _ in range(3):
            try:
                while True:
                    pass
            except BaseException:
                continue
        while True:
            pass

    with pytest.raises(limits.OverTime):
        limits.within(0.05, stubborn)
    begin = time.process_time()
    while time.process_time() - begin < 0.2:  # a timer left behind would raise here
        pass
    assert limits.within(0.05, lambda: 7) == 7
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(limits.within(0.05, lambda: 8)))
    thread.start()
    thread.join()
    assert seen == [8]


FRAGMENTS = strategies.sampled_from(
    [
        *"0123456789xyi+-*/^_=<>()[]{}.,;:!%$°½²√π ",
        *("\\frac", "\\sqrt", "\\{", "\\}", "\\text{", "\\pm", "\\infty", "\\le ", "\\cup ", "\\in ", "\\overline{"),
        *("\\begin{pmatrix}", "\\end{pmatrix}", "&", "\\\\", "\\boxed{", "\\approx ", "\\log_", "\\circ", "1,234"),
        *("cm", " apples", " and ", " or ", "the answer is ", "Answer: ", "(B)", "Oslo"),
    ]
)
TEXTS = strategies.lists(FRAGMENTS, max_size=12).map("".join)
LABELS = TEXTS.filter(lambda text: "boxed" not in text).map("{}0".format)


@hypothesis.settings(max_examples=150, deadline=None, database=None, derandomize=True)
@hypothesis.given(TEXTS, LABELS)
def test_any_response_gets_a_number(response, label):
    assert grade("math", response, label, {}) in (0, 1)
    assert grade("math", f"\\boxed{{{response}}}", label, {}) in (0, 1)
    assert grade("gpqa", response, "Oslo", CHOICES) in (0, 1)
    assert grade("dapo", f"Answer: {response}", "7", {})["score"] in (-1, 1)
