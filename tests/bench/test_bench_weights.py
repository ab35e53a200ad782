"""The benchmark of deltas: the bytes follow from the share of changed values, on every machine."""

import pytest

from bench import weights
from tests import checkpoints


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_a_delta_has_about_the_share_of_bytes_that_changed(tmp_path, encoding):
    model = checkpoints.write(tmp_path / "model")
    found = weights.deltas(tmp_path, str(model), encoding, size=4 << 20)
    bytes_of = {share: row["bytes"] for share, row in found["shares"].items()}
    assert bytes_of["0.1"] < 0.01 and bytes_of["1"] <= 0.03 and 0.05 < bytes_of["10"] < 0.15, bytes_of
    assert all(row["seconds"] > 0 for row in found["shares"].values())
