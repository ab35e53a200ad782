"""What fails is shown once a kind, counted, and ends a loop that gets nowhere."""

import collections

import pytest

from slime_cli.errors import DataError
from slime_cli.rollout.failures import Failure, Failures


def test_the_first_failure_of_each_reason_and_of_each_line_is_shown_with_its_traceback():
    said = []
    failures = Failures(9, said.append)
    for detail in ("KeyError: 'a' at f.py:3", "KeyError: 'b' at f.py:3", "ValueError: x at f.py:9"):
        failures.show(Failure("reward_error", detail, f"Traceback of {detail}"))
    for index in range(3):
        failures.show(Failure("generation_empty", f"sample {index}"))
    assert [text.splitlines()[0].split(" (the first")[0] for text in said] == [
        "reward_error: KeyError: 'a' at f.py:3",
        "reward_error: ValueError: x at f.py:9",
        "generation_empty: sample 0",
    ]
    assert said[0].endswith("\nTraceback of KeyError: 'a' at f.py:3") and "\n" not in said[2]


def test_a_streak_ends_with_the_counts_by_reason_and_an_accepted_group_begins_it_anew():
    failures = Failures(3, lambda text: None)
    failures.show(Failure("reward_error", "KeyError: 'a' at f.py:3", "t"))
    streak = failures.streak("groups")
    lost = collections.Counter(reward_error=4)
    for accepted in (False, False, True, False, False):
        streak.settle(accepted, lost)
    with pytest.raises(DataError) as caught:
        streak.settle(False, collections.Counter(filter_rejected=5))
    assert (
        caught.value.message
        == "not one of 3 groups in a row was of use; lost by reason: reward_error 8 (KeyError: 'a' at f.py:3),"
        " filter_rejected 5"
    )
    assert "--max-groups-without-progress 3" in caught.value.fix and caught.value.exit_code == 3
