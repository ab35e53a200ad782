"""How much is shown of an engine's weights, and that the result says no more than that."""

import io
import types

import pytest
import torch
from rich.console import Console

from slime_cli import manifests
from slime_cli.commands import sync as command
from slime_cli.errors import DataError, EngineError, UsageError
from slime_cli.manifests import proof
from slime_cli.serving import claim
from slime_cli.tracing import report
from slime_cli.weights import publish, sync
from tests import checkpoints
from tests.scripted_engine import ScriptedEngine

WEIGHTS = {"model.norm.weight": torch.arange(16.0), "model.embed_tokens.weight": torch.ones(64, 16)}


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


SUMS = {name: publish.checksum(tensor) for name, tensor in WEIGHTS.items()}
OPAQUE = dict.fromkeys(SUMS, "0123456789abcdef")


@pytest.mark.parametrize(
    ("engines", "kinds", "verdict"),
    [
        ([dict(sums=SUMS)], ["checksum"], True),
        ([dict(sums=SUMS), dict(sums=SUMS)], ["checksum", "checksum"], True),
        ([dict(sums=OPAQUE, device="cuda")], ["version"], None),
        ([dict(sums=OPAQUE, device="cuda")] * 2, ["agreement", "agreement"], "agreement"),
        ([dict(sums=SUMS, ranks=2)], ["version"], None),
        (
            [dict(sums=SUMS | {"rotary.cache": "00"})],
            ["version"],
            None,
        ),  # a tensor that nothing published is compared with
    ],
)
def test_engines_count_as_verified_only_where_every_tensor_was_compared(published, engines, kinds, verdict):
    made = [engine_with(published, **given) for given in engines]
    proofs = sync.verify([e.url for e in made], published, "v1")
    assert [p.kind for p in proofs] == kinds and proof.verified(proofs) == verdict


def test_no_engine_is_no_proof():
    assert proof.verified([]) is None


@pytest.mark.parametrize(
    ("engines", "said"),
    [
        ([dict(sums=SUMS | {"model.norm.weight": "00"})], "holds other weights than"),
        (
            [dict(sums=OPAQUE, device="cuda"), dict(sums=OPAQUE | {"model.norm.weight": "00"}, device="cuda")],
            "hold different weights",
        ),
    ],
)
def test_other_weights_are_an_error(published, engines, said):
    with pytest.raises(EngineError, match=said):
        sync.verify([engine_with(published, **given).url for given in engines], published, "v1")


def test_an_engine_that_somebody_else_has_updated_meanwhile_is_noticed(published):
    engine = engine_with(published, SUMS)
    sync.unchanged([engine.url], "v1")
    with pytest.raises(
        EngineError, match="'v1', which this run did not send .its last were 'v000002'.: another process"
    ):
        sync.unchanged([engine.url], "v000002")


@pytest.mark.parametrize(("kind", "verdict"), [("checksum", True), ("agreement", "agreement"), ("version", None)])
def test_the_screen_says_what_was_shown_of_each_engine(tmp_path, monkeypatch, kind, verdict):
    monkeypatch.setattr(report, "metric_lines", lambda run_dir: [])
    monkeypatch.setattr(
        report,
        "ledgers",
        types.SimpleNamespace(ledgers=lambda d: {}, total=lambda d: 0, sentence=lambda *a: "", balanced=lambda d: True),
    )
    out = io.StringIO()
    summary = {
        "engines_verified": verdict,
        "verification": [{"engine": "http://e:1", "version": "v1", "kind": kind, "tensors": 2}],
    }
    report.show(Console(file=out, width=200), tmp_path, summary)
    assert proof.SHOWN[kind] in out.getvalue() and "http://e:1" in out.getvalue()


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
    assert command.run(words) == 0 and [p for p, _ in engine.posted] == [
        "/update_weights_from_disk",
        "/weights_checker",
    ]
    assert claim.holder_of(claim.beside(path)) is None


def test_slime_sync_sends_nothing_of_another_shape(published, tmp_path):
    engine = engine_with(checkpoints.write(tmp_path / "other", vocab_size=64, hidden_size=8), SUMS)
    for source in (published, tmp_path / "model"):
        with pytest.raises(DataError, match="does not fit what"):
            command.run(["--load", str(source), "--rollout-endpoint", write_endpoint(tmp_path, engine)])
    assert not engine.posted and not (tmp_path / "serve" / "weights").exists()


def test_a_published_version_holds_no_other_weights_and_everybody_may_read_it(tmp_path):
    model = checkpoints.write(tmp_path / "model")
    for name in ("consolidated.safetensors", "adapter.bin", "model.gguf"):
        (model / name).write_text("old weights in another form")
    (model / "config.json").chmod(0o400)
    publish.write(iter(WEIGHTS.items()), tmp_path / "v1", hf_checkpoint=str(model), version="v1", step=1, run="r")
    files = {path.name: path.stat().st_mode & 0o044 for path in (tmp_path / "v1").iterdir()}
    assert files.keys() == {
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "model.safetensors",
        "manifest.json",
    }
    assert set(files.values()) == {0o044}


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
