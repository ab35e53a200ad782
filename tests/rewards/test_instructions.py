"""Instructions about an answer's form. What each accepts and refuses is in judged/ifbench.jsonl.

1. Every instruction is judged in both directions.
2. What is no fault of the answer is named: an unknown instruction, a missing or unknown argument, one of a wrong kind.
3. Every check takes time in proportion to the text.
"""

import time

import pytest

from slime_cli.rewards.graders import GraderError, grade
from slime_cli.rewards.graders.instruction_checks import CHECKS, sentences
from tests.rewards.judged_pairs import PAIRS

JUDGED = [pair for pair in PAIRS if pair["rm_type"] == "ifbench" and pair["kind"] != "unusable"]


def test_every_instruction_is_judged_in_both_directions():
    seen = {(pair["metadata"]["instruction_id_list"][0], pair["verdict"]) for pair in JUDGED}
    assert {(name, verdict) for name in CHECKS for verdict in (0, 1)} <= seen


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"instruction_id_list": []}, "names no instruction"),
        ({"instruction_id_list": ["punctuation:no_commas"]}, "did you mean 'punctuation:no_comma'"),
        ({"instruction_id_list": ["count:numbers"]}, "needs N in metadata"),
        ({"instruction_id_list": ["count:numbers"], "kwargs": [{"N": 1, "M": 2}]}, "takes no M"),
        ({"instruction_id_list": ["count:numbers"], "kwargs": [{"N": "many"}]}, "cannot take"),
        ({"instruction_id_list": ["count:numbers"], "kwargs": ["N"]}, "not an object"),
        ({"instruction_id_list": ["count:numbers"], "kwargs": [{}, {}]}, "a list of 1"),
        (
            {
                "instruction_id_list": ["length_constraints:number_words"],
                "kwargs": [{"num_words": 1, "relation": "about"}],
            },
            "the relation 'about'",
        ),
    ],
)
def test_what_is_no_fault_of_the_answer_is_named(metadata, words):
    with pytest.raises(GraderError, match=words):
        grade("ifbench", "x", None, metadata)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("One. Two? Three!", 3),
        ("Mr. Smith, e.g. J. Doe, paid 3.50.", 1),
        ('He said "Go." Then he left.', 2),
        ("No end", 1),
        ("...", 0),
        ("Wait... what?!", 2),
        ("", 0),
    ],
)
def test_sentences(text, count):
    assert len(sentences(text)) == count


@pytest.mark.parametrize("piece", ["a. ", "*", "** ", "[", "<<", "P.", "🎉", "- ", "\n", "```json\n", "7,", " ", "“"])
def test_a_long_answer_takes_time_in_proportion(piece):
    text = "x" + piece * (60_000 // len(piece)) + "x"
    arguments = {
        pair["metadata"]["instruction_id_list"][0]: (pair["metadata"].get("kwargs") or [{}])[0] for pair in JUDGED
    }
    arguments["language:response_language"] = {"language": "en"}
    begin = time.process_time()
    for name in CHECKS:
        grade("ifbench", text, None, {"instruction_id_list": [name], "kwargs": [arguments[name]]})
    assert time.process_time() - begin < 10
