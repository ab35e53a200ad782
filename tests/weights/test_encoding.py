"""Records of what changed: every bit comes back, whatever it is of; damage is an error."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_cli.errors import DataError
from slime_cli.weights import encoding
from slime_cli.weights.encoding import Kind

ENCODINGS = ("xor", "overwrite")


def applied(patch: bytes, base: np.ndarray) -> np.ndarray:
    out = base.copy()
    ((kind, body),) = encoding.records(memoryview(patch), "here")
    encoding.apply(kind, body, out, "here")
    return out


@settings(max_examples=60, deadline=None)
@given(
    size=st.sampled_from([1, 2, 4, 8]),
    count=st.integers(0, 3000),
    share=st.sampled_from([0, 0.001, 0.01, 0.5, 1]),
    seed=st.integers(0, 2**32 - 1),
    way=st.sampled_from(ENCODINGS),
)
def test_what_was_changed_is_what_is_made(size, count, share, seed, way):
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 256, count * size, np.uint8).view(encoding.unsigned(size))
    new = np.where(rng.random(count) < share, rng.integers(0, 256, count * size, np.uint8).view(old.dtype), old)
    patch = encoding.record(old, new, way)
    assert (applied(patch, old) == new).all()
    assert len(patch) <= new.nbytes + 5
    if way == "overwrite":
        assert (applied(patch, applied(patch, old)) == new).all(), "it can be applied twice"


@pytest.mark.parametrize("way", ENCODINGS)
def test_what_did_not_change_has_five_bytes_and_a_nan_is_equal_to_itself(way):
    old = np.full(1000, np.nan, np.float32).view(np.uint32)
    assert encoding.record(old, old.copy(), way) == b"\0" * 5


@pytest.mark.parametrize("way", ENCODINGS)
def test_a_hundredth_of_a_bf16_model_is_at_most_three_hundredths_of_its_bytes(way):
    """DESIGN.md's budget: values move by a few units in the last place, at places that nobody knows before."""
    rng = np.random.default_rng(0)
    bits = (rng.standard_normal(1 << 20).astype(np.float32) * 0.02).view(np.uint32) >> 16
    old = bits.astype(np.uint16)
    new = old.copy()
    places = rng.random(len(old)) < 0.01
    new[places] += rng.integers(1, 5, places.sum()).astype(np.uint16)
    assert len(encoding.record(old, new, way)) <= 0.03 * old.nbytes


@pytest.mark.parametrize("way", ENCODINGS)
def test_where_everything_changes_a_chunk_is_stored_whole(way):
    rng = np.random.default_rng(0)
    old, new = (rng.integers(0, 2**16, 4096).astype(np.uint16) for _ in range(2))
    patch = encoding.record(old, new, way)
    ((kind, body),) = encoding.records(memoryview(patch), "here")
    assert kind is Kind.WHOLE and len(body) == new.nbytes


@pytest.mark.parametrize("way", ENCODINGS)
def test_damage_is_an_error_and_never_a_crash(way):
    rng = np.random.default_rng(1)
    old = rng.integers(0, 2**16, 4096).astype(np.uint16)
    new = np.where(rng.random(4096) < 0.1, old ^ 3, old)
    patch = encoding.record(old, new, way)
    for bad in (patch[:3], patch[:-1], b"\x09" + patch[1:]):
        with pytest.raises(DataError, match="here: not a patch"):
            applied(bad, old)
    for at in range(5, len(patch)):  # whatever it makes is found by its sum
        flipped = bytearray(patch)
        flipped[at] ^= 0x41
        try:
            applied(bytes(flipped), old)
        except DataError:
            continue
    with pytest.raises(DataError):
        applied(patch, old[:100])
