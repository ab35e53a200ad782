"""Versions as what has changed: written by ranks, applied to a copy, proven in engines that read what lies there.

1. Engines hold what the trainer has, bit for bit, by every encoding and any number of ranks.
2. A delta applies to its base alone; what a chain needs stays; a full version begins another chain.
3. Whatever is damaged is an error or made anew, and is said; engines never get it.
4. Killed while it was applied, the copy is finished or made anew.
5. A rank writes a delta only against what it kept whole.
"""

import os
import shutil
import subprocess
import sys

import pytest
import torch

from slime_cli.errors import DataError, EngineError, UsageError
from slime_cli.manifests import layout
from slime_cli.weights import applying
from slime_cli.weights import encoding as encodings
from slime_cli.weights.transports.delta import Delta
from tests import checkpoints
from tests.ranks import Ranks
from tests.scripted_engine import ReadingEngine

ENCODINGS = ("xor", "overwrite")


def first_weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "model.embed_tokens.weight": torch.randn(64, 16).to(torch.bfloat16),
        "model.layers.0.self_attn.o_proj.weight": torch.randn(33, 17),
        "model.layers.0.mlp.gate.bias": torch.randn(5),
        "model.norm.weight": torch.ones(16),
    }


def stepped(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As after an optimizer step: some values of some tensors are others."""
    out = {name: tensor.clone() for name, tensor in weights.items()}
    for name, tensor in list(out.items())[:3]:
        places = torch.rand(tensor.shape) < 0.05
        out[name] = torch.where(places, tensor * 1.01, tensor)
    out["model.layers.0.self_attn.o_proj.weight"][0, 0] = float("nan")
    return out


class Run:
    def __init__(self, folder, encoding="xor", ranks=1, interval=9, **more):
        self.folder = folder
        self.said = []
        model = folder / "model" if (folder / "model").exists() else checkpoints.write(folder / "model", vocab_size=64)
        self.ranks = Ranks(model, first_weights(), ranks)
        self.engine = ReadingEngine()
        given = dict(encoding=encoding, full_interval=interval, say=self.said.append)
        self.transport = Delta(folder / "run", 2, **given | more)

    def write(self, step):
        if step:
            self.ranks.weights = stepped(self.ranks.weights)
        return self.transport.write(self.ranks, step)

    def send(self, version):
        self.transport.send(version, [self.engine.url], flush=True)
        return self.transport.verify(version, [self.engine.url])

    def through(self, steps):
        return [self.send(self.write(step)) and self.transport.kept(step) for step in range(steps)]

    def holds_the_trainers(self):
        held, wanted = self.engine.weights, self.ranks.weights
        bits = {2: torch.int16, 4: torch.int32}
        same = {
            n: bool((held[n].view(bits[t.element_size()]) == t.view(bits[t.element_size()])).all())
            for n, t in wanted.items()
        }
        return held.keys() == wanted.keys() and all(same.values())

    def steps(self):
        return [layout.step_of(path.name) for path in layout.versions(self.transport.folder)]

    def again(self, **more):
        """The next attempt: its ranks keep nothing, its transport knows nothing."""
        self.transport.copy.close()
        other = Run(self.folder, encoding=self.transport.encoding, **more)
        other.ranks.weights = self.ranks.weights
        return other


@pytest.fixture(params=ENCODINGS)
def run(request, tmp_path):
    found = Run(tmp_path, request.param)
    yield found
    found.transport.copy.close()


# -- 1 -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 3, 7])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_engines_hold_what_the_trainer_has_bit_for_bit(tmp_path, encoding, ranks):
    run = Run(tmp_path, encoding, ranks)
    for step in range(4):
        version = run.write(step)
        (proof,) = run.send(version)
        assert proof.kind == "checksum" and run.engine.version == layout.version_name(step)
        assert run.holds_the_trainers()
        assert (version.manifest.base is None) == (step == 0)
        assert "model.norm.weight" not in version.manifest.patches, "it never changes"
    body = next(body for path, body in reversed(run.engine.posted) if path == "/update_weights_from_disk")
    assert body["model_path"].endswith("weights/applied")
    assert run.said == []


def test_a_tensor_of_several_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(encodings, "CHUNK", 64)
    run = Run(tmp_path, buffer=128)
    run.through(3)
    assert run.holds_the_trainers()


def test_a_delta_has_no_files_of_a_model_that_somebody_would_load(run):
    run.through(2)
    names = {path.name for path in layout.version(run.transport.folder, 1).iterdir()}
    assert names == {"delta-00000.patch", "manifest.json"}


def test_nothing_changed_is_a_version_too(run):
    run.through(2)
    version = run.transport.write(run.ranks, 2)
    assert version.manifest.patches == {} and run.send(version)[0].kind == "checksum"


def test_the_proof_fails_for_engines_that_hold_something_else_and_the_next_version_restores_them(run):
    """Self-test: a tensor in the engine is changed by hand."""
    run.through(2)
    version = run.transport.kept(1)
    run.engine.weights["model.norm.weight"][3] += 1e-3
    run.engine.summed()
    with pytest.raises(EngineError, match="holds other weights than v000001 in 1 tensors, model.norm.weight first"):
        run.transport.verify(version, [run.engine.url])
    run.send(run.write(2))
    assert run.holds_the_trainers()


# -- 2 -----------------------------------------------------------------------------------------------------------------


def test_every_so_many_versions_a_full_one_begins_another_chain(tmp_path):
    run = Run(tmp_path, interval=3)
    bases = [run.write(step).manifest.base for step in range(7)]
    assert bases == [None, "v000000", "v000001", None, "v000003", "v000004", None]


def test_what_a_chain_needs_stays_and_the_rest_goes(tmp_path):
    run = Run(tmp_path, interval=3)
    run.through(6)
    run.transport.prune({"v000002"})
    assert run.steps() == [0, 1, 2, 3, 4, 5]
    run.transport.prune({"v000005"})
    assert run.steps() == [3, 4, 5]
    run.send(run.transport.kept(5))
    assert run.holds_the_trainers()


def test_a_resume_sends_a_version_again_by_its_chain_and_begins_with_a_full_one(run):
    run.through(3)
    other = run.again()
    version = other.transport.kept(2)
    other.send(version)
    assert other.holds_the_trainers()
    other.transport.restore(version, other.ranks)
    assert other.ranks.loaded == [str(other.transport.copy.path)]
    older = other.transport.kept(1)
    other.send(older)  # backwards: the copy is made anew from the chain
    assert other.engine.version == "v000001" and not other.holds_the_trainers()
    assert other.write(3).manifest.base is None
    other.transport.copy.close()


def test_a_version_whose_base_is_gone_or_another_is_not_kept(run):
    run.through(3)
    moved = run.folder / "elsewhere"
    layout.version(run.transport.folder, 1).rename(moved)
    assert run.transport.kept(2) is None
    version = applying.opened(layout.version(run.transport.folder, 2))
    with pytest.raises(DataError, match="v000002 applies to v000001, which is not there"):
        applying.chain(version)
    shutil.copytree(layout.version(run.transport.folder, 0), layout.version(run.transport.folder, 1))
    with pytest.raises(DataError, match="applies to v000001, and .* holds v000000"):
        applying.chain(version)


def test_another_version_of_the_bases_name_is_refused(run):
    run.through(3)
    for name in ("v000001", "v000000"):
        shutil.rmtree(run.transport.folder / "weights" / name)
    other = run.again()
    other.ranks.weights = stepped(other.ranks.weights)
    other.transport.write(other.ranks, 1)
    with pytest.raises(DataError, match="applies to v000001, and .*v000001 holds other weights of that name"):
        applying.chain(applying.opened(layout.version(run.transport.folder, 2)))
    assert other.transport.kept(2) is None


def test_deltas_are_applied_in_order_only(run, tmp_path):
    versions = run.through(3)
    copy = applying.Copy(tmp_path / "copy", run.said.append)
    with pytest.raises(DataError, match="v000002 applies to v000001, and .*copy holds v000000"):
        copy.bring([versions[0], versions[2]])
    assert copy.bring(versions).name == "v000002"
    copy.close()


# -- 3 -----------------------------------------------------------------------------------------------------------------


def damaged(path, how):
    data = bytearray(path.read_bytes())
    if how == "truncated":
        data = data[:-3]
    else:
        data[-3] ^= 4
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("how", ["truncated", "flipped"])
def test_a_damaged_patch_is_refused_before_the_copy_is_touched(run, how):
    run.through(2)
    version = run.write(2)
    damaged(version.path / "delta-00000.patch", how)
    for _ in range(2):
        with pytest.raises(DataError, match="delta-00000.patch"):
            run.send(version)
    assert run.engine.version == "v000001" and run.said == []
    assert run.send(run.transport.kept(1))[0].kind == "checksum"


@pytest.mark.parametrize("how", ["truncated", "flipped"])
def test_a_damaged_copy_is_made_anew_and_that_is_said(run, how):
    run.through(2)
    damaged(run.transport.copy.path / "model.safetensors", how)
    run.send(run.write(2))
    assert run.holds_the_trainers()
    assert len(run.said) == 1 and "made anew from v000000" in run.said[0]


@pytest.mark.parametrize("how", ["truncated", "flipped"])
def test_a_damaged_full_version_never_reaches_an_engine(run, how):
    version = run.write(0)
    damaged(version.path / "model.safetensors", how)
    with pytest.raises(DataError, match="what it makes is not v000000 in . tensors"):
        run.send(version)
    assert not [path for path, _ in run.engine.posted if "update" in path]


def test_an_engine_that_dies_in_the_middle_is_named_and_the_others_are_not(run):
    run.through(1)
    dead = ReadingEngine()
    dead.shutdown()
    dead.server_close()
    version = run.write(1)
    with pytest.raises(EngineError, match=dead.url):
        run.transport.send(version, [dead.url, run.engine.url], flush=True)
    assert run.holds_the_trainers()


# -- 4 -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_killed_while_patches_are_applied(tmp_path, encoding, monkeypatch):
    run = Run(tmp_path, encoding)
    run.through(2)
    version = run.write(2)
    done = applying._Files.apply
    names = []

    def killed(self, patch, name, *rest):
        if names:
            raise KeyboardInterrupt
        names.append(name)
        done(self, patch, name, *rest)

    monkeypatch.setattr(applying._Files, "apply", killed)
    with pytest.raises(KeyboardInterrupt):
        run.send(version)
    monkeypatch.undo()
    assert not (run.transport.copy.path / layout.MANIFEST).exists(), "half patched is not whole"
    other = run.again()
    other.send(other.transport.kept(2))
    assert other.holds_the_trainers()
    assert len(other.said) == (encoding == "xor"), other.said


def test_killed_while_a_version_was_written_the_next_one_is_full(run):
    run.through(2)
    run.ranks.weights = dict(run.ranks.weights) | {"model.norm.weight": torch.ones(4)}  # fails in the middle
    with pytest.raises(EngineError, match="model.norm.weight is of another type or shape than before"):
        run.transport.write(run.ranks, 2)
    assert run.transport.kept(2) is None
    run.ranks.weights["model.norm.weight"] = torch.ones(16)
    assert run.transport.write(run.ranks, 2).manifest.base is None
    run.send(run.transport.kept(2))
    assert run.holds_the_trainers()


def test_two_processes_do_not_keep_the_same_copy(run):
    run.through(1)
    path = run.transport.copy.path
    code = (
        "import pathlib, sys\nfrom slime_cli.weights.applying import Copy\n"
        f"try:\n    Copy(pathlib.Path({str(path)!r}), print).bring([])\n"
        "except Exception as e:\n    print(type(e).__name__, e)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ), timeout=60
    )
    assert found.stdout.startswith(f"{UsageError.__name__} {path} is kept by another process"), found.stderr


# -- 5 -----------------------------------------------------------------------------------------------------------------


def test_ranks_refuse_a_base_that_they_do_not_keep(run):
    run.through(2)
    run.ranks.bases[0].version = "v000007"
    with pytest.raises(EngineError, match="a delta against v000001, and this rank keeps v000007"):
        run.write(2)


def test_the_copy_may_lie_elsewhere(tmp_path):
    run = Run(tmp_path, local=tmp_path / "near")
    run.through(2)
    assert run.holds_the_trainers()
    assert (tmp_path / "near" / "applied" / "model.safetensors").exists()
    assert not (run.transport.folder / "weights" / "applied").exists()
