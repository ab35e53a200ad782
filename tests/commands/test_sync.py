"""``slime sync``: whom it refuses, what it sends, and what it says."""

import subprocess
import sys

import pytest
import torch

from slime_cli import manifests
from slime_cli.commands import sync as command
from slime_cli.errors import DataError, EngineError, UsageError
from slime_cli.serving import claim
from slime_cli.weights import publish
from tests import checkpoints
from tests.scripted_engine import ReadingEngine, ScriptedEngine

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
    engine = ReadingEngine(published)
    path = write_endpoint(tmp_path, engine)
    held = claim.Claim(claim.beside(path), "slime train --run-dir /runs/a", print)
    words = ["--load", str(published), "--rollout-endpoint", path]
    with pytest.raises(UsageError, match="updated by slime train --run-dir /runs/a"):
        command.run(words)
    assert not engine.posted
    held.close()
    assert command.run(words) == 0 and [p for p, _ in engine.posted] == [
        "/update_weights_from_disk",
        "/flush_cache?timeout=0.2",
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


def test_published_pushed_verified_listed_and_taken_back(published, tmp_path, capsys):
    engine = ReadingEngine(tmp_path / "model", device="cpu")
    path = write_endpoint(tmp_path, engine)
    root = tmp_path / "serve" / "weights"
    assert command.run(["publish", "--load", str(tmp_path / "model"), "--publish", str(root)]) == 0
    assert engine.posted == [] and (root / "v000000" / "manifest.json").exists()
    assert sorted(p.name for p in root.iterdir()) == [".lock", "v000000"]
    (root / "v000009").mkdir()
    command.run(["push", "--load", str(root / "v000000"), "--rollout-endpoint", path])
    command.run(["push", "--load", str(published), "--rollout-endpoint", path, "--weight-version", "by-hand"])
    assert engine.version == "by-hand"
    capsys.readouterr()
    command.run(["verify", "--rollout-endpoint", path])
    assert "verified at by-hand: 2 tensors, every tensor's checksum" in capsys.readouterr().out
    command.run(["rollback", "--rollout-endpoint", path])
    assert "verified at v000000" in capsys.readouterr().out and engine.version == "v000000"
    command.run(["list", "--rollout-endpoint", path])
    said = capsys.readouterr().out
    assert "v000000: step 0, 0." in said and "v000009: not whole" in said and f"{engine.url} holds v000000" in said
    engine.weights["model.norm.weight"][0] += 1
    engine.summed()
    with pytest.raises(EngineError, match="holds other weights than v000000"):
        command.run(["verify", "--rollout-endpoint", path])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("publish --load x", "slime sync publish needs --publish"),
        ("push --load x", "slime sync push needs --rollout-endpoint"),
        ("rollback --rollout-endpoint e --load x", "slime sync rollback does not read --load"),
        ("list", "slime sync list needs --rollout-endpoint"),
        ("pull", "invalid choice: 'pull'"),
    ],
)
def test_each_verb_says_what_it_needs_and_what_it_does_not_read(words, said):
    with pytest.raises(UsageError, match=said):
        command.run(words.split())


def test_engines_that_are_not_there_are_said_before_anything_is_published(tmp_path):
    engine = ScriptedEngine(checkpoints.write(tmp_path / "model"))
    path = write_endpoint(tmp_path, engine)
    engine.shutdown()
    engine.server_close()
    with pytest.raises(EngineError, match="does not answer"):
        command.run(["--load", str(tmp_path / "model"), "--rollout-endpoint", path])
    assert not (tmp_path / "serve" / "weights").exists()


def test_two_of_them_do_not_write_into_one_folder(tmp_path):
    root = tmp_path / "weights"
    root.mkdir()
    model = checkpoints.write(tmp_path / "model")
    code = f"from slime_cli import locks; locks.take({str(root / '.lock')!r}); print('held', flush=True); input()"
    command_line = [sys.executable, "-c", code]
    with subprocess.Popen(command_line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(UsageError, match="another slime sync writes into"):
            command.run(["publish", "--load", str(model), "--publish", str(root)])
        other.stdin.write("\n")
    command.run(["publish", "--load", str(model), "--publish", str(root)])
