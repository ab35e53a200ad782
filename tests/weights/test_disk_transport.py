"""Versions in a folder: written by a learner, whole or not there, loaded by engines, and taken away."""

import pathlib
import types

import pytest
import torch

from slime_cli.errors import DataError, EngineError
from slime_cli.manifests import layout
from slime_cli.weights import folder as folders
from slime_cli.weights import publish
from slime_cli.weights.transports.disk import Disk
from tests import checkpoints
from tests.scripted_engine import LoadingEngine


class Learner:
    """Writes weights that tell their step."""

    def __init__(self, model):
        self.model = model
        self.loaded = []

    def publish(self, folder, version, how=None):
        weights = {"model.norm.weight": torch.full((8,), float(layout.step_of(version)))}
        path = pathlib.Path(folder)
        publish.write(iter(weights.items()), path, hf_checkpoint=str(self.model), version=version, step=0, run="r")
        return 32

    def load_published(self, folder):
        self.loaded.append(folder)


@pytest.fixture
def learner(tmp_path):
    return Learner(checkpoints.write(tmp_path / "model"))


@pytest.fixture
def transport(tmp_path):
    return Disk(tmp_path / "run", newest=2)


def names(transport):
    return [path.name for path in layout.versions(transport.folder)]


def test_a_version_is_a_name_a_manifest_and_its_bytes(transport, learner):
    version = transport.write(learner, 3)
    assert version.name == "v000003" and list(version.manifest.tensors) == ["model.norm.weight"]
    data = b"".join(version.chunks("model.norm.weight"))
    assert torch.frombuffer(bytearray(data), dtype=torch.float32).tolist() == [3.0] * 8


def test_a_tensor_longer_than_a_chunk_comes_whole(transport, learner, monkeypatch):
    monkeypatch.setattr(folders, "CHUNK", 12)
    chunks = list(transport.write(learner, 3).chunks("model.norm.weight"))
    assert [len(chunk) for chunk in chunks] == [12, 12, 8] and b"".join(chunks) == b"\0\0\x40\x40" * 8


def test_a_version_is_kept_when_its_manifest_is_there(transport, learner):
    assert transport.kept(3) is None
    transport.write(learner, 3)
    assert transport.kept(3).name == "v000003"
    (layout.version(transport.folder, 3) / layout.MANIFEST).unlink()
    assert transport.kept(3) is None


def test_going_back_is_loading_the_folder(transport, learner):
    version = transport.write(learner, 3)
    transport.restore(version, learner)
    assert learner.loaded == [str(layout.version(transport.folder, 3))]


@pytest.mark.parametrize("flush", [True, False])
def test_engines_load_the_folder_under_the_versions_name(transport, learner, flush):
    engines = [LoadingEngine(), LoadingEngine()]
    version = transport.write(learner, 3)
    transport.send(version, [e.url for e in engines], flush=flush)
    for engine in engines:
        (path, body), *then = engine.posted
        assert path == "/update_weights_from_disk"
        assert body["flush_cache"] is False, "within the update it would end an engine that has anything in it"
        assert [path for path, _ in then] == ["/flush_cache?timeout=0.2"] * flush
        assert (body["model_path"], body["weight_version"]) == (str(version.path), "v000003")
    assert {p.kind for p in transport.verify(version, [e.url for e in engines])} == {"checksum"}


def test_every_engine_that_failed_is_named_and_the_others_have_loaded(transport, learner):
    good, refusing, dead = LoadingEngine(), LoadingEngine(), LoadingEngine()
    refusing.answers["/update_weights_from_disk"] = {"success": False, "message": "out of memory"}
    dead.shutdown()
    dead.server_close()
    version = transport.write(learner, 3)
    with pytest.raises(EngineError) as caught:
        transport.send(version, [refusing.url, dead.url, good.url], flush=True)
    assert "out of memory" in caught.value.message
    assert all(engine.url in caught.value.message for engine in (refusing, dead)) and good.url not in str(caught.value)
    assert good.answers["/model_info"]["weight_version"] == "v000003"


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        (set(), [4, 5]),
        ({"v000001"}, [1, 4, 5]),
        ({"v000005", "v000009"}, [4, 5]),
        ({"v000002", "v000003"}, [2, 3, 4, 5]),
    ],
)
def test_the_newest_stay_and_what_is_needed(transport, learner, keep, left):
    for step in (1, 2, 3, 4, 5):
        transport.write(learner, step)
    (transport.folder / layout.WEIGHTS / "by-hand").mkdir()
    transport.prune(keep)
    assert names(transport) == [layout.version_name(step) for step in left]
    assert (transport.folder / layout.WEIGHTS / "by-hand").exists()


def test_a_version_never_looks_whole_while_it_is_taken_away_or_written_anew(transport, learner, monkeypatch):
    transport.write(learner, 3)

    def killed(path):
        assert transport.kept(3) is None, "its manifest goes first"
        raise KeyboardInterrupt

    monkeypatch.setattr(folders, "shutil", types.SimpleNamespace(rmtree=killed))
    with pytest.raises(KeyboardInterrupt):
        transport.write(learner, 3)
    assert transport.kept(3) is None


def test_a_version_may_be_sent_under_another_name_and_a_folder_without_one_is_refused(transport, learner):
    path = transport.write(learner, 3).path
    assert folders.opened(path, "by-hand").name == "by-hand"
    with pytest.raises(DataError, match="manifest.json: no such file"):
        folders.opened(learner.model)
