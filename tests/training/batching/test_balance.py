"""What a sample costs, and shares of even cost: nothing lost, counts equal, never worse than dealing back and forth."""

import itertools
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_cli.training.batching import balance

costs_of = st.lists(st.integers(0, 10_000).map(float), max_size=60)


def heaviest(costs, shares):
    return max(sum(costs[i] for i in part) for part in shares)


@given(costs_of, st.integers(1, 7))
def test_shares_hold_everything_in_equal_counts_and_are_no_worse_than_the_snake(costs, parts):
    costs = costs[: len(costs) // parts * parts]
    got = balance.partition(costs, parts)
    assert sorted(i for part in got for i in part) == list(range(len(costs)))
    assert [len(part) for part in got] == [len(costs) // parts] * parts
    assert all(costs[a] >= costs[b] for part in got for a, b in itertools.pairwise(part)), "heaviest first"
    assert heaviest(costs, got) <= heaviest(costs, balance.snake(costs, parts))
    assert got == balance.partition(costs, parts), "every rank finds the same"


@given(costs_of, st.integers(1, 70))
def test_without_equal_counts_nothing_is_lost_and_no_part_stays_empty_while_another_has_two(costs, parts):
    got = balance.karmarkar_karp(costs, parts, equal_counts=False)
    assert sorted(i for part in got for i in part) == list(range(len(costs))) and len(got) == parts
    assert sum(map(bool, got)) == min(parts, len(costs))


def test_the_largest_differencing_method_on_its_textbook_example():
    """8, 7, 6, 5, 4 in two: 8-7, then 6-5, 4-1 and 3-1 leave a difference of 2 (the best is 0, greedy finds 4)."""
    got = balance.karmarkar_karp([4.0, 5.0, 6.0, 7.0, 8.0], 2, equal_counts=False)
    assert sorted(sum([4.0, 5.0, 6.0, 7.0, 8.0][i] for i in part) for part in got) == [14.0, 16.0]


@given(st.lists(st.integers(1, 50).map(float), min_size=2, max_size=8))
def test_two_parts_are_within_the_bound_of_the_best(costs):
    """In two parts the largest differencing method's heavier part is at most 7/6 of the best one's."""
    best = min(
        max(sum(c for c, s in zip(costs, side) if s), sum(c for c, s in zip(costs, side) if not s))
        for side in itertools.product([False, True], repeat=len(costs))
    )
    assert heaviest(costs, balance.karmarkar_karp(costs, 2, equal_counts=False)) <= 7 / 6 * best + 1e-9


def test_equal_counts_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="5 items cannot be shared out to 2 parts"):
        balance.karmarkar_karp([1.0] * 5, 2, equal_counts=True)


def arguments(**more):
    dense = {
        "hidden_size": 8,
        "num_attention_heads": 4,
        "kv_channels": 3,
        "num_layers": 2,
        "num_query_groups": 2,
        "group_query_attention": True,
        "ffn_hidden_size": 10,
        "num_experts": None,
        "swiglu": True,
        "padded_vocab_size": 7,
    }
    return types.SimpleNamespace(**(dense | more))


def test_flops_of_a_sample_are_those_counted_product_by_product():
    h = 8
    a = 4
    d = 3
    g = 2
    f = 10
    layers = 2
    vocab = 7
    n = 5
    r = 4
    weights = [(h, a * d), (h, g * d), (h, g * d), (a * d, h), (h, f), (h, f), (f, h)]
    want = layers * sum(2 * n * rows * columns for rows, columns in weights)
    want += layers * a * 2 * (2 * n * n * d) / 2 + 2 * r * h * vocab
    assert balance.Flops.of(arguments())(n, r) == want
    everyone = balance.Flops.of(arguments(group_query_attention=False, swiglu=False))
    assert everyone.linear == 2 * 2 * (4 * h * a * d + 2 * h * f)
    sparse = balance.Flops.of(
        arguments(num_experts=6, moe_ffn_hidden_size=2, moe_router_topk=3, moe_shared_expert_intermediate_size=4)
    )
    assert sparse.linear == 2 * 2 * (2 * h * a * d + 2 * h * g * d + 3 * h * 10 + 6 * h)
