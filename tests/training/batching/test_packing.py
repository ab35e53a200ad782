"""Invariants of the micro-batch schedule, for any lengths, cap and layout."""

import collections

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_cli.errors import DataError
from slime_cli.training.batching import balance, packing

CASES = dict(
    lengths=st.lists(st.integers(1, 60), max_size=60),
    dp=st.integers(1, 5),
    multiple=st.integers(1, 4),
    max_tokens=st.integers(1, 120),
)


def check(plan: packing.Schedule, positions, dp: int, multiple: int) -> list[list[int]]:
    """What holds of every schedule; returns its bins."""
    bins = [b for rank in plan.per_rank for b in rank]
    assert collections.Counter([i for b in bins for i in b] + plan.dropped) == collections.Counter(positions)
    assert len(plan.per_rank) == dp
    assert len({len(rank) for rank in plan.per_rank}) == 1, "every rank has the same number of micro-batches"
    assert len(plan.per_rank[0]) % multiple == 0
    assert all(b == sorted(b) for b in bins)
    return bins


@given(**CASES, oversize=st.sampled_from(["isolate", "drop"]))
def test_dynamic_schedules(lengths, dp, multiple, max_tokens, oversize):
    positions = list(range(len(lengths)))
    plan = packing.schedule(
        positions, lengths, dp, max_tokens=max_tokens, micro_batch_size=1, oversize=oversize, multiple=multiple
    )
    bins = check(plan, positions, dp, multiple)
    over = {i for i in positions if lengths[i] > max_tokens}
    for b in bins:
        assert sum(lengths[i] for i in b) <= max_tokens or (len(b) == 1 and b[0] in over)
    assert set(plan.dropped) == (over if oversize == "drop" else set())
    again = packing.schedule(
        positions, lengths, dp, max_tokens=max_tokens, micro_batch_size=1, oversize=oversize, multiple=multiple
    )
    assert again == plan, "every rank computes the same schedule by itself"


@given(lengths=CASES["lengths"], dp=CASES["dp"], multiple=CASES["multiple"], size=st.integers(1, 7))
def test_static_schedules(lengths, dp, multiple, size):
    positions = list(range(len(lengths)))
    plan = packing.schedule(positions, lengths, dp, max_tokens=None, micro_batch_size=size, multiple=multiple)
    assert all(len(b) <= size for b in check(plan, positions, dp, multiple)) and not plan.dropped


@given(**CASES)
def test_fail_raises_exactly_when_a_sample_is_over_the_cap(lengths, dp, multiple, max_tokens):
    def plan():
        return packing.schedule(
            range(len(lengths)),
            lengths,
            dp,
            max_tokens=max_tokens,
            micro_batch_size=1,
            oversize="fail",
            multiple=multiple,
        )

    if max(lengths, default=0) > max_tokens:
        with pytest.raises(DataError, match=f"does not fit --max-tokens-per-gpu {max_tokens}"):
            plan()
    else:
        assert not plan().dropped


def loads(per_rank, costs):
    return [sum(costs[i] for b in rank for i in b) for rank in per_rank]


def squares(lengths):
    return [n + n * n / 20 for n in lengths]


@given(**CASES, dynamic=st.booleans())
def test_dealing_by_cost_keeps_packs_and_is_never_worse(lengths, dp, multiple, max_tokens, dynamic):
    positions = list(range(len(lengths)))
    costs = squares(lengths)
    given = {"max_tokens": max_tokens if dynamic else None, "micro_batch_size": 2, "multiple": multiple}
    plain = packing.schedule(positions, lengths, dp, **given)
    plan = packing.schedule(positions, lengths, dp, **given, deal_by=costs)
    assert sorted(check(plan, positions, dp, multiple)) == sorted(check(plain, positions, dp, multiple))
    by_cost = balance.snake([sum(costs[i] for i in b) for rank in plain.per_rank for b in rank], dp)
    packs = [b for rank in plain.per_rank for b in rank]
    assert max(loads(plan.per_rank, costs)) <= max(loads([[packs[n] for n in part] for part in by_cost], costs)) + 1e-9


@given(**CASES, oversize=st.sampled_from(["isolate", "drop"]))
def test_packs_by_cost_never_exceed_the_cap(lengths, dp, multiple, max_tokens, oversize):
    positions = list(range(len(lengths)))
    costs = squares(lengths)
    given = {"max_tokens": max_tokens, "micro_batch_size": 1, "oversize": oversize, "multiple": multiple}
    plan = packing.schedule(positions, lengths, dp, **given, pack_by=costs, deal_by=costs)
    over = {i for i in positions if lengths[i] > max_tokens}
    for b in check(plan, positions, dp, multiple):
        assert sum(lengths[i] for i in b) <= max_tokens or (len(b) == 1 and b[0] in over)
    assert set(plan.dropped) == (over if oversize == "drop" else set())


def test_packs_and_ranks_by_cost_are_more_even():
    lengths = [(7 * i) % 61 + 1 for i in range(600)]
    costs = squares(lengths)
    given = {"max_tokens": 128, "micro_batch_size": 1}
    plain, dealt, packed = (
        packing.schedule(range(600), lengths, 4, **given, **by) for by in ({}, {"deal_by": costs}, {"pack_by": costs})
    )

    def spread(values):
        return max(values) / min(values)

    assert spread(loads(dealt.per_rank, costs)) < 1.001 < spread(loads(plain.per_rank, costs))
    packs = [[sum(costs[i] for i in b) for rank in plan.per_rank for b in rank] for plan in (plain, packed)]
    assert spread(packs[1]) < 1.05 < 1.2 < spread(packs[0])


def test_oversize_samples_are_isolated_dropped_or_refused():
    lengths = [5, 100, 5, 7]

    def plan(oversize):
        return packing.schedule(range(4), lengths, 1, max_tokens=20, micro_batch_size=1, oversize=oversize)

    assert plan("isolate").per_rank == [[[1], [0, 2, 3]]] and plan("isolate").dropped == []
    assert plan("drop").per_rank == [[[0, 2, 3]]] and plan("drop").dropped == [1]
    with pytest.raises(DataError, match="a sample of 100 tokens"):
        plan("fail")


def test_bins_are_split_before_fillers_are_added():
    plan = packing.schedule(range(4), [5] * 4, 2, max_tokens=20, micro_batch_size=1)
    assert sorted(b for rank in plan.per_rank for b in rank) == [[0, 1], [2, 3]]


def test_a_bin_is_split_between_neighbours_into_about_as_many_tokens():
    lengths = [3, 9, 4, 8, 30, 2, 7, 5]
    plan = packing.schedule(range(8), lengths, 2, max_tokens=100, micro_batch_size=1)
    assert sorted(b for rank in plan.per_rank for b in rank) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert packing.halves([0, 4, 5], lengths) == [[0], [4, 5]]


def test_fillers_keep_ranks_in_step_when_there_are_too_few_samples():
    plan = packing.schedule(range(3), [5, 5, 5], 4, max_tokens=5, micro_batch_size=1)
    assert sorted(len(b) for rank in plan.per_rank for b in rank) == [0, 1, 1, 1]
    everything_dropped = packing.schedule(range(2), [9, 9], 2, max_tokens=5, micro_batch_size=1, oversize="drop")
    assert everything_dropped.dropped == [0, 1]


def test_positions_need_not_start_at_zero():
    lengths = [60, 3, 4, 5, 60, 6]
    plan = packing.schedule(range(2, 6), lengths, 2, max_tokens=12, micro_batch_size=1)
    check(plan, [2, 3, 4, 5], 2, 1)


def test_load_is_even_and_bins_are_full():
    lengths = [(7 * i) % 61 + 1 for i in range(600)]
    plan = packing.schedule(range(600), lengths, 4, max_tokens=128, micro_batch_size=1)
    loads = [sum(lengths[i] for b in rank for i in b) for rank in plan.per_rank]
    assert max(loads) <= 1.05 * min(loads)
    assert sum(lengths) / (128 * sum(len(rank) for rank in plan.per_rank)) > 0.9


@given(st.integers(0, 100), st.integers(1, 9))
def test_steps_split_the_batch_in_order_and_evenly(count, steps):
    parts = packing.split_steps(range(count), steps)
    assert [i for part in parts for i in part] == list(range(count)) and len(parts) == steps
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(st.lists(st.integers(0, 20), max_size=60), st.integers(1, 9))
def test_siblings_are_in_one_step_wherever_they_are_in_the_batch(trajectories, steps):
    parts = packing.split_steps(trajectories, steps)
    assert sorted(i for part in parts for i in part) == list(range(len(trajectories))) and len(parts) == steps
    held = [{trajectories[i] for i in part} for part in parts]
    assert sum(map(len, held)) == len(set(trajectories)), "no trajectory is in two steps"
    assert max(map(len, held)) - min(map(len, held)) <= 1
