"""Where a conversion writes: one at a time, and nothing half-made stays. The ranks are scripted."""

import os
import pathlib
from typing import Any

import pytest

from slime_cli.convert import convert
from slime_cli.errors import UsageError
from tests import checkpoints


@pytest.fixture
def model(tmp_path: pathlib.Path) -> pathlib.Path:
    return checkpoints.write(tmp_path / "model")


def _write(job: dict[str, Any], say: convert.Say) -> None:
    (pathlib.Path(job["target"]) / "iter_0000000").mkdir()
    (pathlib.Path(job["target"]) / "latest_checkpointed_iteration.txt").write_text("0")


def test_a_second_conversion_to_the_same_folder_is_refused_while_the_first_one_writes(model, tmp_path):
    def meanwhile(job: dict[str, Any], say: convert.Say) -> None:
        with pytest.raises(UsageError, match="another conversion is writing it"):
            convert.hf_to_dist(model, tmp_path / "out", run=_write)
        convert.hf_to_dist(model, tmp_path / "out.other", run=_write)
        _write(job, say)

    assert convert.hf_to_dist(model, tmp_path / "out", run=meanwhile).is_dir()
    assert sorted(os.listdir(tmp_path)) == ["model", "out", "out.other"]


def test_the_next_conversion_removes_what_a_killed_one_left(model, tmp_path):
    (tmp_path / ".out.converting-abcdefgh").mkdir()
    (tmp_path / ".out.converting-abcdefgh" / "half").write_text("a checkpoint")
    (tmp_path / ".out.other.converting-abcdefgh").mkdir()
    convert.hf_to_dist(model, tmp_path / "out", run=_write)
    assert sorted(os.listdir(tmp_path)) == [".out.other.converting-abcdefgh", "model", "out"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_conversion_that_ends_early_leaves_nothing(error, model, tmp_path):
    def end(job: dict[str, Any], say: convert.Say) -> None:
        (pathlib.Path(job["target"]) / "half").write_text("a checkpoint")
        raise error

    with pytest.raises(error):
        convert.hf_to_dist(model, tmp_path / "out", run=end)
    assert os.listdir(tmp_path) == ["model"]
