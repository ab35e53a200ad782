"""``slime sync``: whom it refuses, what it sends, and what it says."""

import pytest
import torch

from slime_cli import manifests
from slime_cli.commands import sync as command
from slime_cli.errors import DataError, UsageError
from slime_cli.serving import claim
from slime_cli.weights import publish
from tests import checkpoints
from tests.scripted_engine import ScriptedEngine

WEIGHTS = {"model.norm.weight": torch.arange(16.0), "model.embed_tokens.weight": torch.ones(64, 16)}
SUMS = {name: publish.checksum(tensor) for name, tensor in WEIGHTS.items()}


@pytest.fixture
def published(tmp_path):
    model = checkpoints.write(tmp_path / "model", vocab_size=64)
    publish.write(iter(WEIGHTS.items()), tmp_path / "v000001", hf_checkpoint=str(model), version="v1", step=1, run="r")
    return tmp_path / "v000001"


def engine_with(folder, sums, device="cpu", ranks=1):
    engine = ScriptedEngine(folder, device=device)
    engine.answers["/model_info"]["weight_version"] = "v1"
    engine.answers["/weights_checker"] = {"ranks": [{"checksums": sums}] * ranks}
    return engine


def write_endpoint(tmp_path, engine):
    manifests.write(tmp_path / "serve" / "endpoint.json", engine.endpoint())
    return str(tmp_path / "serve" / "endpoint.json")


def test_slime_sync_is_refused_while_a_run_updates_the_endpoint(published, tmp_path):
    engine = engine_with(published, SUMS)
    path = write_endpoint(tmp_path, engine)
    held = claim.Claim(claim.beside(path), "slime train --run-dir /runs/a", print)
    words = ["--load", str(published), "--rollout-endpoint", path]
    with pytest.raises(UsageError, match="updated by slime train --run-dir /runs/a"):
        command.run(words)
    assert not engine.posted
    held.close()
    engine.answers["/update_weights_from_disk"] = {"success": True}
    engine.answers["/flush_cache?timeout=60"] = {}
    assert command.run(words) == 0 and [p for p, _ in engine.posted] == [
        "/update_weights_from_disk",
        "/flush_cache?timeout=60",
        "/weights_checker",
    ]
    assert claim.holder_of(claim.beside(path)) is None


def test_slime_sync_sends_nothing_of_another_shape(published, tmp_path):
    engine = engine_with(checkpoints.write(tmp_path / "other", vocab_size=64, hidden_size=8), SUMS)
    for source in (published, tmp_path / "model"):
        with pytest.raises(DataError, match="does not fit what"):
            command.run(["--load", str(source), "--rollout-endpoint", write_endpoint(tmp_path, engine)])
    assert not engine.posted and not (tmp_path / "serve" / "weights").exists()


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "/", "a/b", "hf", "ü v", "-x"])
def test_a_version_that_would_be_another_folder_is_refused(name, tmp_path):
    """The folder of a version is made anew: with these it would be somebody else's."""
    with pytest.raises(UsageError, match="cannot be a name"):
        command.run(["--load", str(tmp_path), "--rollout-endpoint", "nowhere.json", f"--weight-version={name}"])


def test_a_model_is_not_published_over_itself(published, tmp_path):
    model = tmp_path / "model"
    engine = engine_with(published, SUMS)
    words = ["--load", str(model), "--rollout-endpoint", write_endpoint(tmp_path, engine), "--publish", str(tmp_path)]
    before = sorted(model.iterdir())
    with pytest.raises(UsageError, match="holds the weights that are to be published"):
        command.run([*words, "--weight-version", "model"])
    assert sorted(model.iterdir()) == before and not engine.posted


def test_words_that_sync_does_not_read_are_an_error_like_any_other():
    with pytest.raises(UsageError, match="--load") as caught:
        command.run(["--rollout-endpoint", "x"])
    assert "slime sync --help" in caught.value.fix


def test_a_folder_in_the_place_of_an_endpoint_is_named(tmp_path):
    with pytest.raises(DataError, match="Is a directory"):
        command.run(["--load", str(tmp_path), "--rollout-endpoint", str(tmp_path)])
