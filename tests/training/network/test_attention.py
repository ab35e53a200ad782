"""Packed attention and split-vocabulary log-probabilities against float64 references (cases in ``attention_cases.py``).

They run in ``layout_worker.py``'s process: importing Megatron redirects torch for the rest of a process's life.
"""

import pytest

import layout_launch
import rounding

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1600)]


@pytest.fixture(scope="module")
def cases():
    (rank,) = layout_launch.ranks("single")
    return rank["attention"]


@pytest.mark.parametrize("heads", ["mha", "gqa", "mqa"])
@pytest.mark.parametrize("lengths", ["one", "ones", "ragged", "powers", "long_and_short", "many"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("job", ["single", layout_launch.OTHER])
def test_packed_attention_is_attention_over_each_sequence_alone(job, lengths, heads, dtype):
    (rank,) = layout_launch.ranks(job)
    got = rank["attention"][f"{lengths}-{heads}-{dtype}"]
    assert got["out"] < rounding.bound(dtype) and got["gradient"] < rounding.bound(dtype)


@pytest.mark.parametrize("heads", ["mha", "gqa", "mqa"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("job", ["single", layout_launch.OTHER])
def test_a_sequence_that_continues_another_attends_to_it_first(job, heads, dtype):
    (rank,) = layout_launch.ranks(job)
    got = rank["attention"][f"continued-{heads}-{dtype}"]
    assert got["out"] < rounding.bound(dtype) and got["gradient"] < rounding.bound(dtype)
    assert got["positions"] == 0


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("lengths", ["one", "ragged", "long_and_short", "many"])
def test_context_parallel_parts_of_a_pack_add_up_to_attention_over_the_whole(cases, lengths, size):
    got = cases[f"zigzag-{lengths}-{size}"]
    assert got["out"] < 1e-12 and got["gradient"] < 1e-12
    assert got["not_once"] == 0 and got["uneven"] == 0


def test_attention_without_packing(cases):
    assert cases["unpacked"]["out"] < 1e-12


def test_rectangles_hold_every_token_once_and_at_most_double_them(cases):
    assert cases["places"]["wrong"] == 0
    assert cases["places"]["padding"] < 2


def test_sequences_of_a_pack_do_not_see_one_another(cases):
    assert cases["isolation"]["out"] == 0


@pytest.mark.parametrize("layout", ["single", "tp2", layout_launch.OTHER])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.5])
@pytest.mark.parametrize("what", ["log_probs", "cut", "entropy", "entropy_left"])
def test_log_probs_and_entropy_over_a_split_vocabulary(layout, temperature, what):
    for rank in layout_launch.ranks(layout):
        got = rank["log_probs"][f"{what}-{temperature}"]
        assert got["value"] < 1e-5 and got["gradient"] < 1e-5
        assert got["overwritten"] == 0
