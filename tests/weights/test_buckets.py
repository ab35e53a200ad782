"""Tensors in buckets: every byte once, in order, within the limit, in two buffers that are used again."""

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from slime_cli.weights import buckets

DTYPES = (torch.float32, torch.bfloat16, torch.int8)


class Buffer:
    def __init__(self, size):
        self.flat = torch.zeros(size, dtype=torch.uint8)

    def written(self):
        pass


def named(shapes):
    torch.manual_seed(0)
    return [(f"t{i}", torch.randint(-9, 9, shape).to(dtype)) for i, (shape, dtype) in enumerate(shapes)]


def whole(tensors):
    return [(name, [tensor]) for name, tensor in tensors]


SHAPES = st.lists(st.tuples(st.lists(st.integers(1, 5), max_size=3), st.sampled_from(DTYPES)), max_size=12)


@hypothesis.given(SHAPES, st.integers(1, 200), st.booleans())
def test_every_tensor_comes_once_whole_and_in_order(shapes, limit, mixed):
    tensors = named(shapes)
    made = buckets.Buffers(Buffer)
    found = []
    for bucket in buckets.packed(whole(tensors), made, limit=limit, most=10_000, mixed=mixed):
        assert bucket.size == bucket.places[-1].end
        assert bucket.size <= limit or len(bucket.places) == 1
        assert mixed or len({place.dtype for place in bucket.places}) == 1
        gaps = zip(bucket.places, bucket.places[1:], strict=False)
        assert mixed or all(before.end == after.begin for before, after in gaps)
        for place in bucket.places:
            view = bucket.memory.flat[place.begin : place.end].view(place.dtype)  # raises where it is not aligned
            found.append((place.name, view.reshape(place.shape).clone()))
    assert [name for name, _ in found] == [name for name, _ in tensors]
    assert all(torch.equal(one, other) for (_, one), (_, other) in zip(found, tensors, strict=True))


def test_two_buffers_in_turn_whatever_the_number_of_buckets_and_a_larger_one_for_a_larger_tensor():
    sizes = []

    class Counted(Buffer):
        def __init__(self, size):
            super().__init__(size)
            sizes.append(size)

    made = buckets.Buffers(Counted)
    tensors = [(str(i), torch.zeros(n, dtype=torch.int8)) for i, n in enumerate((60, 60, 60, 300, 60))]
    for _ in range(2):
        memories = [b.memory for b in buckets.packed(whole(tensors), made, limit=100, most=540, mixed=True)]
        assert len(memories) == 5 and memories[0] is memories[2] is memories[4] and memories[3] is not memories[2]
    assert sizes == [112, 112, 304], "the larger one is kept"
    made.free()
    next(buckets.packed(whole(tensors), made, limit=100, most=540, mixed=True))
    assert sizes == [112, 112, 304, 112]


def test_a_small_model_takes_a_small_buffer():
    sizes = []
    made = buckets.Buffers(lambda size: sizes.append(size) or Buffer(size))
    list(buckets.packed(whole([("a", torch.zeros(8))]), made, limit=1 << 30, most=64, mixed=True))
    assert sizes == [64]


def test_a_bucket_stays_until_the_one_behind_the_next_is_asked_for():
    made = buckets.Buffers(Buffer)
    tensors = [(str(i), torch.full((4,), i, dtype=torch.int8)) for i in range(4)]
    found = buckets.packed(whole(tensors), made, limit=4, most=16, mixed=True)
    first = next(found)
    next(found)
    assert first.memory.flat[:4].tolist() == [0] * 4
    next(found)
    assert first.memory.flat[:4].tolist() == [2] * 4


@hypothesis.given(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), max_size=8), st.integers(1, 500))
def test_pieces_lie_one_under_the_other(rows, limit):
    torch.manual_seed(0)
    tensors = [(f"t{i}", [torch.randn(count, 3) for count in counts]) for i, counts in enumerate(rows)]
    found = {}
    for bucket in buckets.packed(tensors, buckets.Buffers(Buffer), limit=limit, most=10_000, mixed=True):
        for place in bucket.places:
            view = bucket.memory.flat[place.begin : place.end].view(place.dtype)
            found[place.name] = view.reshape(place.shape).clone()
    assert found.keys() == dict(tensors).keys()
    assert all(torch.equal(found[name], torch.cat(pieces)) for name, pieces in tensors)


def test_nothing_gives_no_bucket():
    with pytest.raises(StopIteration):
        next(buckets.packed([], buckets.Buffers(Buffer), limit=4, most=4, mixed=True))
