"""Versions in the format of the quantised checkpoint that engines serve, and such checkpoints as weights to begin with.

1. A version is what ``slime convert`` makes of the same weights: names, dtypes, shapes, bytes and ``config.json``; by
   any number of ranks, and as a delta.
2. Weights that are not numbers are named, and no rank is left waiting.
3. The trainer begins with the weights that the checkpoint stands for, and its genuine ranks publish the format.
4. What is not known is refused in words.
5. FP8 in blocks is proven by the sums of what it stands for; an engine that rescaled it, and other formats, are not.
"""

import contextlib
import json
import pathlib
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from slime_cli.convert import number_formats, requantise
from slime_cli.errors import DataError, EngineError
from slime_cli.manifests import layout
from slime_cli.models import architecture, quantise, schemes, tiny
from slime_cli.weights import applying, folder, quantised, sums, verification
from slime_cli.weights.folder import Folder, opened
from slime_cli.weights.held import FUSED
from slime_cli.weights.transports.delta import Delta
from tests.convert.test_requantise import read, weights, write
from tests.ranks import Ranks
from tests.scripted_engine import ScriptedEngine

WORKER = pathlib.Path(__file__).with_name("publishing_rank.py")
FORMATS: dict[str, number_formats.Format] = {
    "block": number_formats.ToFp8(),
    "powers of two": number_formats.ToFp8(block=(64, 32), scale_fmt="ue8m0"),
    "channel": number_formats.ToFp8(strategy="channel"),
    "tensor": number_formats.ToFp8(strategy="tensor", ignore=("self_attn",)),
    "int4": number_formats.ToInt4(),
    "int4 with zeros": number_formats.ToInt4(symmetric=False, ignore=("layers.0",)),
}


class Quiet:
    def say(self, text: str) -> None:
        pass

    def progress(self, label, total, start=0):
        return contextlib.nullcontext(lambda count, note: None)


def converted(source: pathlib.Path, target: pathlib.Path, form: number_formats.Format) -> pathlib.Path:
    requantise.convert(source, target, form, screen=Quiet())
    return target


def stepped() -> dict[str, torch.Tensor]:
    """Other weights of the same model."""
    torch.manual_seed(9)
    return {
        n: t if t.dtype == torch.int64 else (t.float() + torch.randn(t.shape)).to(t.dtype) for n, t in weights().items()
    }


def alike(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert (tensor.dtype, tensor.shape) == (other[name].dtype, other[name].shape), name
        flat, wanted = (t.contiguous().reshape(-1).view(torch.uint8) for t in (tensor, other[name]))
        assert torch.equal(flat, wanted), name


def tensors(folder: pathlib.Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", FORMATS)
def test_a_version_is_what_convert_makes_of_the_same_weights(tmp_path, name, ranks):
    served = converted(write(tmp_path / "first", weights()), tmp_path / "served", FORMATS[name])
    wanted = converted(write(tmp_path / "second", stepped()), tmp_path / "wanted", FORMATS[name])
    Ranks(served, stepped(), ranks).publish(str(tmp_path / "v000001"), "v000001")
    alike(tensors(tmp_path / "v000001"), read(wanted))
    assert json.loads((tmp_path / "v000001/config.json").read_text()) == json.loads(
        (wanted / "config.json").read_text()
    )
    manifest = opened(tmp_path / "v000001").manifest
    assert {n: t.shape for n, t in manifest.tensors.items()} == {n: list(t.shape) for n, t in read(wanted).items()}


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("name", ["block", "int4"])
def test_a_delta_gives_the_same_bytes(tmp_path, name, encoding):
    served = converted(write(tmp_path / "first", weights()), tmp_path / "served", FORMATS[name])
    wanted = converted(write(tmp_path / "second", stepped()), tmp_path / "wanted", FORMATS[name])
    ranks = Ranks(served, weights(), 2)
    transport = Delta(tmp_path / "run", 2, encoding=encoding, full_interval=9, say=print)
    transport.write(ranks, 0)
    ranks.weights = stepped()
    version = transport.write(ranks, 1)
    assert version.manifest.base == layout.version_name(0)
    copy = transport.copy.bring(applying.chain(version))
    alike(tensors(copy.path), read(wanted))
    assert schemes.of_config(architecture.read_config(str(copy.path))) is not None
    transport.close()


def test_weights_that_are_not_numbers_are_named_once_all_are_taken(tmp_path):
    served = converted(write(tmp_path / "first", weights()), tmp_path / "served", FORMATS["block"])
    bad = stepped()
    name = "model.layers.0.mlp.down_proj.weight"
    bad[name][3, 5] = float("nan")
    taken = []

    def exported():
        for entry in bad.items():
            taken.append(entry[0])
            yield entry

    form = quantised.publishing(served)
    assert form is not None
    with pytest.raises(DataError, match=f"{name} holds NaN"):
        list(form.through(exported()))
    assert taken == list(bad)


@pytest.mark.parametrize("name", FORMATS)
def test_what_a_checkpoint_stands_for_is_read_as_convert_reads_it(tmp_path, name):
    served = converted(write(tmp_path / "first", weights()), tmp_path / "served", FORMATS[name])
    back = number_formats.FromInt4() if "int4" in name else number_formats.FromFp8()
    wanted = read(converted(served, tmp_path / "back", back))
    scheme = schemes.of_config(architecture.read_config(str(served)))
    assert scheme is not None
    restored = quantised.Restored(served, scheme)
    alike({n: restored.read(n) for n in restored.names()}, wanted)


def test_parts_that_do_not_fit_are_named(tmp_path):
    served = converted(write(tmp_path / "first", weights()), tmp_path / "served", FORMATS["block"])
    restored = quantised.Restored(served, schemes.Fp8("block", (16, 16)))
    with pytest.raises(DataError, match="mlp.down_proj.weight has shape .* neither one a block of 16x16"):
        restored.read("model.layers.0.mlp.down_proj.weight")


@pytest.mark.engine
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind, form", [("qwen3_moe", "block"), ("qwen3", "int4"), ("qwen3", "channel")])
def test_genuine_ranks_begin_with_a_quantised_checkpoint_and_publish_its_format(tmp_path, kind, form):
    plain = tiny.make(f"tiny:{kind}", tmp_path / "plain")
    served = converted(pathlib.Path(plain), tmp_path / "served", FORMATS[form])
    done = subprocess.run([sys.executable, WORKER, served, plain, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    back = number_formats.FromInt4() if "int4" in form else number_formats.FromFp8()
    begun = tensors(converted(served, tmp_path / "back", back))
    exported = tensors(tmp_path / "begun")
    assert exported.keys() == begun.keys()
    assert all(torch.equal(exported[name].float(), begun[name].float()) for name in begun)
    wanted = tensors(converted(tmp_path / "trained", tmp_path / "wanted", FORMATS[form]))
    alike(tensors(tmp_path / "v000001"), wanted)
    config = architecture.read_config(str(tmp_path / "v000001"))
    assert schemes.settings(config) == schemes.settings(architecture.read_config(str(served)))


REFUSED = {
    "gptq": dict(quant_method="gptq", bits=4),
    "awq": dict(quant_method="awq", bits=4),
    "mxfp4": dict(quant_method="mxfp4"),
    "static activations": dict(quant_method="fp8", activation_scheme="static", weight_block_size=[128, 128]),
    "fp8 without blocks": dict(quant_method="fp8", activation_scheme="dynamic"),
    "other scales": dict(quant_method="fp8", weight_block_size=[1, 32], scale_fmt="e5m2"),
    "8 bits": dict(
        quant_method="compressed-tensors",
        format="int-quantized",
        config_groups={"group_0": {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}},
    ),
    "an order of columns": dict(
        quant_method="compressed-tensors",
        format="pack-quantized",
        config_groups={
            "group_0": {
                "weights": dict(num_bits=4, type="int", strategy="group", group_size=32, actorder="group"),
            }
        },
    ),
    "two groups": dict(quant_method="compressed-tensors", format="mixed", config_groups={"a": {}, "b": {}}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_made_of_new_weights_is_refused(name):
    with pytest.raises(DataError, match="the weights are quantised (by|with)") as caught:
        schemes.of_config({"quantization_config": REFUSED[name]})
    assert "slime convert hf-to-fp8" in caught.value.fix


def test_weights_that_are_not_as_the_config_says_are_refused(tmp_path):
    folder = write(tmp_path / "plain", weights())
    with pytest.raises(DataError, match="FP8, a scale a block of 128 x 128, and any such tensor is missing"):
        schemes.converted(folder, schemes.Fp8("block"))


@pytest.mark.parametrize("form", [number_formats.ToFp8(), number_formats.ToFp8(block=(32, 64))])
def test_blocks_that_an_engine_cannot_sum_up_are_refused(tmp_path, form):
    served = converted(write(tmp_path / "first", weights()), tmp_path / "served", form)
    scheme = schemes.of_config(architecture.read_config(str(served)))
    assert scheme is not None
    with pytest.raises(DataError, match=f"blocks of {form.block[0]} x {form.block[1]}, which SGLang cannot sum up"):
        schemes.check_served(served, scheme)


def test_every_format_of_convert_is_known_by_its_config(tmp_path):
    source = write(tmp_path / "source", weights())
    for name, form in FORMATS.items():
        config = architecture.read_config(str(converted(source, tmp_path / name, form)))
        scheme = schemes.of_config(config)
        wanted = (
            schemes.Int4(form.group, form.symmetric)
            if isinstance(form, number_formats.ToInt4)
            else schemes.Fp8(
                form.strategy,
                form.block if form.strategy == "block" else quantise.BLOCK,
                form.scale_fmt,
                "_scale_inv" if form.strategy == "block" else "_scale",
            )
        )
        assert scheme == wanted


SHAPE = "num_hidden_layers=2&hidden_size=128&num_attention_heads=4&num_key_value_heads=2&head_dim=64"


def sums_of(version: pathlib.Path, function: type[sums.Sum]) -> dict[str, str]:
    """What an engine reports of FP8 in blocks, written from SGLang's ``block_quant_dequant``."""
    stored = tensors(version)
    plain = {}
    for name, tensor in stored.items():
        if (scale := stored.get(f"{name}_scale_inv")) is not None:
            spread = scale.repeat_interleave(128, -2).repeat_interleave(128, -1)
            plain[name] = (tensor.to(torch.float32) * spread).to(torch.bfloat16)
        elif not name.endswith("_scale_inv"):
            plain[name] = tensor
    held_by_engine = {}
    for name in plain:
        for fused, parts in FUSED.items():
            if f".{parts[0]}." in name:
                held_by_engine[name.replace(parts[0], fused)] = torch.cat(
                    [plain[name.replace(parts[0], part)] for part in parts]
                )
        if not any(f".{part}." in name for parts in FUSED.values() for part in parts):
            held_by_engine[name] = plain[name]
    out = {}
    for name, tensor in held_by_engine.items():
        total = function()
        total.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        out[name] = total.text()
    return out


@pytest.fixture
def blocks(tmp_path) -> Folder:
    plain = pathlib.Path(tiny.make(f"tiny:qwen3?{SHAPE}", tmp_path / "plain"))
    served = converted(plain, tmp_path / "served", FORMATS["block"])
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in tensors(plain).items()}
    Ranks(served, weights, 2).publish(str(tmp_path / "v000001"), "v000001")
    return opened(tmp_path / "v000001")


def reporting(version: Folder, found: dict[str, str], device: str) -> ScriptedEngine:
    engine = ScriptedEngine(version.path, device=device, version="0.5.16", dtype="auto")
    engine.answers["/model_info"]["weight_version"] = version.name
    engine.answers["/weights_checker"] = {"ranks": [{"checksums": found}]}
    return engine


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_blocks_are_proven_by_the_sums_of_what_they_stand_for(blocks, device, monkeypatch):
    monkeypatch.setattr(folder, "CHUNK", 3 * 128 * 128 + 64)  # a chunk ends within a block
    found = sums_of(blocks.path, sums.Sha if device == "cpu" else sums.Tiles)
    assert len(found) == 2 * 8 + 2
    [proof] = verification.verify(blocks, [reporting(blocks, found, device).url])
    assert (proof.kind, proof.tensors) == ("checksum", len(found))
    for name in ("model.layers.1.self_attn.qkv_proj.weight", "model.norm.weight"):
        with pytest.raises(EngineError, match=f"holds other weights than v000001 in 1 tensors, {name} first"):
            verification.verify(blocks, [reporting(blocks, found | {name: "00"}, device).url])


def test_an_engine_that_rescales_all_blocks_shows_nothing(blocks):
    found = sums_of(blocks.path, sums.Tiles)
    other = {name: "00" if "_proj." in name else value for name, value in found.items()}
    assert [p.kind for p in verification.verify(blocks, [reporting(blocks, other, "cuda").url])] == ["version"]
    with pytest.raises(EngineError, match="in 9 tensors"):
        verification.verify(blocks, [reporting(blocks, other | {"model.norm.weight": "00"}, "cuda").url])


def test_blocks_whose_bytes_have_changed_are_found(blocks):
    found = sums_of(blocks.path, sums.Tiles)
    file = next(blocks.path.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(DataError, match="its bytes have changed since"):
        verification.verify(blocks, [reporting(blocks, found, "cuda").url])


@pytest.mark.parametrize("form", ["channel", "int4", "powers of two"])
def test_other_formats_do_not_count_as_verified(tmp_path, form):
    served = converted(write(tmp_path / "first", weights()), tmp_path / "served", FORMATS[form])
    Ranks(served, weights()).publish(str(tmp_path / "v000001"), "v000001")
    version = opened(tmp_path / "v000001")
    assert [p.kind for p in verification.verify(version, [reporting(version, {"x": "00"}, "cuda").url])] == ["version"]
