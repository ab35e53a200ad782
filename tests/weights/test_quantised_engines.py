"""Engines of quantised weights, scripted: who is asked to load a version how, and what is refused before.

1. An engine with slime's loader gets the folder through it, and reports no version that it has a part of.
2. Another one is sent what SGLang's own loader can load a second time, FP8 in blocks; the rest is refused.
3. A model goes into engines of its own format alone; ``slime sync push`` makes it of floating-point weights.
4. A run that could not serve such a checkpoint here is refused before it starts anything.
"""

import base64
import json
import pathlib
import pickle

import pytest
import torch

from slime_cli import engine_api, manifests
from slime_cli.commands import sync, train
from slime_cli.convert import number_formats
from slime_cli.errors import DataError, EngineError, UsageError
from slime_cli.hardware import device as hardware
from slime_cli.models import tiny
from slime_cli.weights import matching
from slime_cli.weights.transports.disk import Disk
from tests.convert.test_requantise import read, weights, write
from tests.ranks import Ranks
from tests.scripted_engine import LoadingEngine
from tests.weights.test_quantised import FORMATS, alike, converted, stepped, tensors


class Reloading(LoadingEngine):
    """With slime's loader of quantised weights, which it may lack."""

    def __init__(self, model: pathlib.Path, *loaders: str, ranks: int = 1) -> None:
        super().__init__(model, custom_weight_loader=list(loaders), tp_size=ranks, device="cuda")
        self.answers["/update_weight_version"] = lambda body: self._named(body["new_version"])
        self.answers["/update_weights_from_tensor"] = lambda body: self._named(body["weight_version"])
        self.folders: list[str] = []

    def _named(self, version: str) -> dict[str, bool]:
        self.answers["/model_info"] = self.answers["/model_info"] | {"weight_version": version}
        return {"success": True}


@pytest.fixture
def served(tmp_path) -> pathlib.Path:
    return converted(write(tmp_path / "first", weights()), tmp_path / "served", FORMATS["int4"])


def sent(served: pathlib.Path, tmp_path: pathlib.Path, *engines: Reloading) -> pathlib.Path:
    transport = Disk(tmp_path / "run", newest=2)
    version = transport.write(Ranks(served, stepped()), 3)
    transport.send(version, [engine.url for engine in engines], flush=True)
    return version.path


def test_slimes_loader_gets_the_folder_on_every_rank(served, tmp_path):
    engine = Reloading(served, "another", engine_api.RELOADER, ranks=2)
    path = sent(served, tmp_path, engine)
    (first, name), (second, body), (third, _) = engine.posted
    assert (first, name["new_version"]) == ("/update_weight_version", "v000003-incomplete")
    assert (second, third) == ("/update_weights_from_tensor", "/flush_cache?timeout=0.2")
    assert (body["load_format"], body["weight_version"], body["flush_cache"]) == (
        engine_api.RELOADER,
        "v000003",
        False,
    )
    for text in body["serialized_named_tensors"]:
        [(described, tensor)] = pickle.loads(base64.b64decode(text))
        assert json.loads(described) == {"folder": str(path)} and isinstance(tensor, torch.Tensor)
    assert len(body["serialized_named_tensors"]) == 2 and engine.version == "v000003"


def test_an_engine_that_failed_meanwhile_reports_no_version(served, tmp_path):
    engine = Reloading(served, engine_api.RELOADER)
    del engine.answers["/update_weights_from_tensor"]
    with pytest.raises(EngineError, match="update_weights_from_tensor answered 404"):
        sent(served, tmp_path, engine)
    assert engine.version == "v000003-incomplete"


def test_another_engine_loads_by_itself(served, tmp_path):
    engine = Reloading(served)
    sent(served, tmp_path, engine)
    assert [path for path, _ in engine.posted] == ["/update_weights_from_disk", "/flush_cache?timeout=0.2"]


def require(folder: pathlib.Path, engine: Reloading, **more: bool) -> None:
    matching.require(str(folder), engine.endpoint(), [engine.url], None, print, **more)


def test_an_engine_that_could_not_load_a_second_time_is_refused(served, tmp_path):
    with pytest.raises(UsageError, match="serves INT4 in groups of 32, which it cannot load a second time"):
        require(served, Reloading(served))
    require(served, Reloading(served, engine_api.RELOADER))
    blocks = converted(tmp_path / "first", tmp_path / "blocks", FORMATS["block"])
    require(blocks, Reloading(blocks))


def test_weights_of_another_format_are_refused(served, tmp_path):
    engine = Reloading(served, engine_api.RELOADER)
    with pytest.raises(DataError, match="its weights are not quantised, not INT4 in groups of 32"):
        require(tmp_path / "first", engine)
    require(tmp_path / "first", engine, quantises=True)
    blocks = converted(tmp_path / "first", tmp_path / "blocks", FORMATS["block"])
    with pytest.raises(DataError, match="FP8, a scale a block of 128 x 128, not INT4"):
        require(blocks, engine, quantises=True)


@pytest.mark.parametrize("form", ["int4", "channel"])
def test_a_push_of_floating_point_weights_is_in_the_engines_format(tmp_path, form, capsys):
    plain = pathlib.Path(tiny.make("tiny:qwen3?num_hidden_layers=2", tmp_path / "plain"))
    served = converted(plain, tmp_path / "served", FORMATS[form])
    other = pathlib.Path(tiny.make("tiny:qwen3?num_hidden_layers=2&seed=5", tmp_path / "other"))
    engine = Reloading(served, engine_api.RELOADER)
    manifests.write(tmp_path / "serve/endpoint.json", engine.endpoint())
    words = ["push", "--load", str(other), "--rollout-endpoint", str(tmp_path / "serve/endpoint.json")]
    assert sync.run([*words, "--weight-version", "new"]) == 0 and engine.version == "new"
    wanted = converted(other, tmp_path / "wanted", FORMATS[form])
    alike(tensors(tmp_path / "serve/weights/new"), read(wanted))
    config = json.loads((tmp_path / "serve/weights/new/config.json").read_text())
    assert config == json.loads((served / "config.json").read_text())
    assert sync.run([*words[:2], str(wanted), *words[3:], "--weight-version", "made"]) == 0  # `slime convert`'s folder
    alike(tensors(tmp_path / "serve/weights/made"), read(wanted))


@pytest.fixture
def words(tmp_path, monkeypatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"input": "1+1=", "label": "2"}) + "\n")
    plain = pathlib.Path(tiny.make("tiny:qwen3?num_hidden_layers=2", tmp_path / "plain"))
    model = converted(plain, tmp_path / "served", number_formats.ToFp8(strategy="tensor"))
    return (
        f"--hf-checkpoint {model} --prompt-data rows.jsonl --label-key label --num-rollout 1 --run-dir out"
        " --rollout-batch-size 1 --n-samples-per-prompt 2 --rm-type exact --rollout-max-response-len 8"
    ).split()


def test_a_run_with_engines_on_a_cpu_is_refused(words, monkeypatch, capsys):
    monkeypatch.setattr(hardware, "find", lambda: hardware.Device("cpu", 2, "cpu"))
    with pytest.raises(UsageError, match="no kernels for quantised weights on a CPU"):
        train.run(words)
    assert train.run([*words, "--dry-run"]) == 0  # it may be meant for another machine
    assert "no kernels for quantised weights" in capsys.readouterr().out


@pytest.mark.parametrize("way", ["ipc", "nccl"])
def test_weights_from_memory_are_refused(words, monkeypatch, way):
    with pytest.raises(UsageError, match=f"transport {way}: the weights of .* are quantised .FP8, a scale a matrix"):
        train.run([*words, "--update-weight-transport", way, "--dry-run"])


def test_a_format_that_cannot_be_trained_is_refused(words, tmp_path):
    path = tmp_path / "served/config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq", "bits": 4}}))
    with pytest.raises(DataError, match="quantised by awq"):
        train.run([*words, "--dry-run"])
