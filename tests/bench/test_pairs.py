"""Times taken in turns: every kind takes every place, and what one round suffered is left out of the ratio."""

import collections

from bench import pairs


def test_every_kind_runs_once_a_round_and_takes_every_place_equally_often():
    seen = []
    times = pairs.interleaved({name: lambda name=name: seen.append(name) for name in "abc"}, rounds=6)
    rounds = [seen[i : i + 3] for i in range(0, len(seen), 3)]
    assert len(rounds) == pairs.WARM_UP + 6 and all(sorted(one) == ["a", "b", "c"] for one in rounds)
    counted = collections.Counter((place, name) for one in rounds[pairs.WARM_UP :] for place, name in enumerate(one))
    assert set(counted.values()) == {2} and len(counted) == 9
    assert {name: len(values) for name, values in times.items()} == {"a": 6, "b": 6, "c": 6}


def test_a_machine_that_slows_down_cancels_out():
    on = [1.02, 1.02, 10.2, 10.2, 1.02]
    off = [1.0, 1.0, 10.0, 10.0, 5.0]
    assert abs(pairs.ratio(on, off) - 1.02) < 1e-9
