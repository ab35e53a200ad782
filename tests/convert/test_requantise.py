"""`slime convert hf-to-fp8`, `hf-to-int4` and back: whole checkpoints, stopped and resumed, and refused."""

import io
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from slime_cli import __main__ as cli
from slime_cli import manifests
from slime_cli.convert import number_formats, requantise
from slime_cli.models import quantise
from slime_cli.screen import Screen

INDEX = "model.safetensors.index.json"
EXPERTS = "model.layers.1.mlp.experts"
CONFIG = {
    "architectures": ["FooForCausalLM"],
    "hidden_size": 64,
    "torch_dtype": "bfloat16",
    "text_config": {"dtype": "bfloat16", "layers": 3},
}
OTHERS = {"tokenizer.json": '{"model": {}}', "chat_template.jinja": "{{ messages }}", "generation_config.json": "{}"}


def weights() -> dict[str, torch.Tensor]:
    """A dense layer, one of stacked experts and one of experts by themselves; odd sizes, a block and groups of
    zeros."""
    torch.manual_seed(3)
    shapes = {"model.embed_tokens": (40, 64), "lm_head": (40, 64), "model.norm": (64,)}
    for i in range(3):
        shapes |= {f"model.layers.{i}.self_attn.{name}_proj": (130, 64) for name in "qkv"} | {
            f"model.layers.{i}.input_layernorm": (64,)
        }
    shapes |= {f"model.layers.0.mlp.{name}_proj": (257, 64) for name in ("gate", "up")} | {
        "model.layers.0.mlp.down_proj": (64, 288)
    }
    shapes |= {
        "model.layers.1.mlp.gate": (3, 64),
        "model.layers.2.mlp.gate": (2, 64),
        "model.layers.2.linear_attn.conv1d": (32, 1, 4),
    }
    shapes |= {f"model.layers.2.mlp.experts.{e}.{name}_proj": (32, 64) for e in range(2) for name in ("gate", "up")}
    out = {f"{module}.weight": torch.randn(shape).to(torch.bfloat16) for module, shape in shapes.items()}
    out |= {f"{EXPERTS}.gate_up_proj": torch.randn(3, 160, 64).half(), f"{EXPERTS}.down_proj": torch.randn(3, 64, 96)}
    out |= {
        "model.layers.0.self_attn.q_proj.bias": torch.randn(130).to(torch.bfloat16),
        "model.layers.1.mlp.gate.e_bias": torch.randn(3),
    }
    out["model.layers.0.self_attn.q_proj.weight"].zero_()
    out["model.layers.0.mlp.down_proj.weight"][:, :128] = 0
    return out


def write(
    folder: pathlib.Path, tensors: dict[str, torch.Tensor], shards: int = 3, config: dict | None = None
) -> pathlib.Path:
    folder.mkdir()
    names = sorted(tensors)
    weight_map = {}
    for i in range(shards):
        shard = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        save_file({name: tensors[name] for name in names[i::shards]}, folder / shard, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names[i::shards], shard)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config or CONFIG))
    for name, text in OTHERS.items():
        (folder / name).write_text(text)
    return folder


def read(folder: pathlib.Path) -> dict[str, torch.Tensor]:
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    out = {name: tensor for shard in set(weight_map.values()) for name, tensor in load_file(folder / shard).items()}
    assert out.keys() == weight_map.keys()
    return out


@pytest.fixture
def source(tmp_path) -> pathlib.Path:
    folder = write(tmp_path / "source", weights())
    save_file(
        {"old": torch.zeros(2)}, folder / "consolidated.safetensors"
    )  # not in the index: no part of the checkpoint
    (folder / "pytorch_model.bin").write_bytes(b"as they were")
    return folder


def convert(command: str, source: pathlib.Path, save: pathlib.Path, *words: object, code: int = 0) -> None:
    assert cli.run(["convert", command, "--hf-checkpoint", str(source), "--save", str(save), *map(str, words)]) == code


def refused(capsys, code: int, *words) -> str:
    capsys.readouterr()
    convert(*words, code=code)
    return capsys.readouterr().err


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# -- there and back ----------------------------------------------------------------------------------------------------

KEPT = {"model.embed_tokens", "lm_head", "model.norm", "model.layers.1.mlp.gate", "model.layers.2.mlp.gate"}
KEPT |= {"model.layers.2.linear_attn.conv1d"} | {f"model.layers.{i}.input_layernorm" for i in range(3)}


def check_back(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor], converted: set[str], bound) -> None:
    """``bound(name)``: the error that each converted element may have, bfloat16's own rounding apart."""
    assert before.keys() == after.keys()
    for name, weight in before.items():
        if name in converted:
            assert after[name].dtype == torch.bfloat16 and after[name].shape == weight.shape
            wanted = weight.double()
            assert (
                (after[name].double() - wanted).abs() <= (bound(name) + wanted.abs()) * 2**-8 + bound(name)
            ).all(), name
            assert name != "model.layers.0.self_attn.q_proj.weight" or (after[name] == 0).all()
        else:
            assert after[name].dtype == weight.dtype and torch.equal(after[name], weight), name


@pytest.mark.parametrize(
    "words", [(), ("--scale-fmt", "ue8m0", "--block-size", 64, 32), ("--strategy", "channel"), ("--strategy", "tensor")]
)
def test_fp8_and_back(source, tmp_path, words):
    convert("hf-to-fp8", source, tmp_path / "fp8", *words)
    before = weights()
    stored = read(tmp_path / "fp8")
    converted = {name for name, tensor in stored.items() if tensor.dtype == torch.float8_e4m3fn}
    assert converted == {
        n for n in before if (n.endswith(".weight") or "experts." in n) and n.removesuffix(".weight") not in KEPT
    }
    suffix, strategy = ("_scale", words[1]) if "--strategy" in words else ("_scale_inv", "block")
    block, scale_fmt = ((64, 32), "ue8m0") if "ue8m0" in words else ((128, 128), None)
    assert stored.keys() == before.keys() | {name + suffix for name in converted}
    for name in converted:
        values, scale = quantise.quantise_fp8(before[name], strategy, block, scale_fmt)
        assert torch.equal(stored[name].float(), values.float()) and torch.equal(stored[name + suffix], scale)

    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    found = config.pop("quantization_config")
    assert config == CONFIG
    if strategy == "block":
        wanted = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(block),
        }
        assert found == wanted | {"modules_to_not_convert": sorted(KEPT)} | (
            {"scale_fmt": scale_fmt} if scale_fmt else {}
        )
    else:
        group = found["config_groups"]["group_0"]
        assert found["format"] == "float-quantized" and set(found["ignore"]) == KEPT
        assert group["weights"]["strategy"] == strategy
        assert group["input_activations"]["strategy"] == {"channel": "token", "tensor": "tensor"}[strategy]

    convert("fp8-to-bf16", tmp_path / "fp8", tmp_path / "back")
    check_back(before, read(tmp_path / "back"), converted, lambda name: 2**-4 * before[name].double().abs().max())
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == CONFIG


@pytest.mark.parametrize(
    "words", [(), ("--asymmetric",), ("--group-size", 16, "--ignore", "self_attn", "--ignore", "model.layers.0")]
)
def test_int4_and_back(source, tmp_path, words):
    convert("hf-to-int4", source, tmp_path / "int4", *words)
    before = weights()
    stored = read(tmp_path / "int4")
    converted = {name.removesuffix("_packed") for name in stored if name.endswith("_packed")}
    left = KEPT | (
        {n.removesuffix(".weight") for n in before if "self_attn" in n or "layers.0." in n}
        if "--ignore" in words
        else set()
    )
    assert converted == {
        n for n in before if (n.endswith(".weight") or "experts." in n) and n.removesuffix(".weight") not in left
    }
    suffixes = ["_packed", "_scale", "_shape"] + (["_zero_point"] if "--asymmetric" in words else [])
    assert stored.keys() == before.keys() - converted | {name + suffix for name in converted for suffix in suffixes}
    found = json.loads((tmp_path / "int4" / "config.json").read_text())["quantization_config"]
    args = found["config_groups"]["group_0"]["weights"]
    assert (found["format"], args["num_bits"], args["symmetric"]) == ("pack-quantized", 4, "--asymmetric" not in words)
    assert args["group_size"] == (16 if "--ignore" in words else 32)
    unconverted = {n.removesuffix(".weight") for n in before if n.endswith(".weight") and n not in converted}
    assert set(found["ignore"]) == unconverted

    def bound(name: str) -> torch.Tensor:
        return stored[name + "_scale"].double().repeat_interleave(args["group_size"], -1) / 2

    convert("int4-to-bf16", tmp_path / "int4", tmp_path / "back")
    check_back(before, read(tmp_path / "back"), converted, bound)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == CONFIG


def test_the_other_files_index_and_manifest(source, tmp_path):
    manifests.write(
        source / "checkpoint.json",
        manifests.Checkpoint(
            format="hf",
            source="there",
            source_hashes={},
            architecture="FooForCausalLM",
            megatron_args={"num_layers": 3},
            tokenizer_hash="",
            chat_template_hash="",
            iteration=7,
            dtype="bfloat16",
            layout={"tensor": 1},
        ),
    )
    shards = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    for command, dtype, origin in (
        ("hf-to-fp8", "float8_e4m3fn", source),
        ("fp8-to-bf16", "bfloat16", tmp_path / "hf-to-fp8"),
    ):
        save = tmp_path / command
        convert(command, origin, save)
        assert set(contents(save)) == {*shards, *OTHERS, INDEX, "config.json", "checkpoint.json"}
        assert all((save / name).read_text() == text for name, text in OTHERS.items())
        size = sum(tensor.nbytes for tensor in read(save).values())
        assert json.loads((save / INDEX).read_text())["metadata"]["total_size"] == size
        found = manifests.read(save / "checkpoint.json", manifests.Checkpoint)
        assert (found.format, found.dtype, found.iteration, found.megatron_args) == ("hf", dtype, 7, {"num_layers": 3})
        assert (
            found.source == str(origin)
            and set(found.source_hashes) == {"config.json", *shards}
            and found.tokenizer_hash
        )
        assert all(path.stat().st_mode & 0o777 == 0o644 for path in save.iterdir())


def test_one_file_of_float32_becomes_a_model_to_compute_in_bfloat16(tmp_path):
    tensors = {"model.layers.0.mlp.up_proj.weight": torch.randn(64, 64), "model.norm.weight": torch.ones(64)}
    source = write(tmp_path / "source", tensors, shards=1, config={"architectures": ["Foo"], "dtype": "float32"})
    os.rename(source / "model-00001-of-00001.safetensors", source / "model.safetensors")
    (source / INDEX).unlink()
    convert("hf-to-int4", source, tmp_path / "int4")
    assert set(json.loads((tmp_path / "int4" / INDEX).read_text())["weight_map"].values()) == {"model.safetensors"}
    assert json.loads((tmp_path / "int4" / "config.json").read_text())["dtype"] == "bfloat16"
    assert load_file(tmp_path / "int4" / "model.safetensors")["model.norm.weight"].dtype == torch.float32


@pytest.mark.parametrize("there,back", [("hf-to-fp8", "fp8-to-bf16"), ("hf-to-int4", "int4-to-bf16")])
def test_scales_may_lie_in_another_shard_than_their_weights(source, tmp_path, there, back):
    convert(there, source, tmp_path / "there")
    stored = read(tmp_path / "there")
    moved = write(tmp_path / "moved", {}, shards=0, config=json.loads((tmp_path / "there" / "config.json").read_text()))
    apart = {
        name: "b.safetensors" if re.search("_(scale|scale_inv|shape)$", name) else "a.safetensors" for name in stored
    }
    for shard in ("a.safetensors", "b.safetensors"):
        save_file({name: tensor for name, tensor in stored.items() if apart[name] == shard}, moved / shard)
    (moved / INDEX).write_text(json.dumps({"weight_map": apart}))
    convert(back, tmp_path / "there", tmp_path / "one")
    convert(back, moved, tmp_path / "other")
    one = read(tmp_path / "one")
    other = read(tmp_path / "other")
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert not (tmp_path / "other" / "b.safetensors").exists()  # nothing is left of a shard of scales


# -- stopped and resumed -----------------------------------------------------------------------------------------------


def stop_at(monkeypatch, shard: int) -> None:
    """Writing the ``shard``-th shard leaves half a file under the temporary name and dies."""
    calls = []
    genuine = requantise._write_shard

    def write_shard(path, tensors):
        calls.append(path)
        if len(calls) == shard:
            path.with_name(f".{path.name}.part").write_bytes(b"half")
            raise KeyboardInterrupt
        genuine(path, tensors)

    monkeypatch.setattr(requantise, "_write_shard", write_shard)


@pytest.mark.parametrize("there,back", [("hf-to-fp8", "fp8-to-bf16"), ("hf-to-int4", "int4-to-bf16")])
def test_a_stopped_conversion_goes_on_and_gives_the_same_bytes(source, tmp_path, monkeypatch, capsys, there, back):
    convert(there, source, tmp_path / "there")
    for command, origin in ((there, source), (back, tmp_path / "there")):
        whole = tmp_path / f"{command}-whole"
        save = tmp_path / f"{command}-stopped"
        convert(command, origin, whole)
        with monkeypatch.context() as patch:
            stop_at(patch, 2)
            convert(command, origin, save, code=5)
        assert not (save / "checkpoint.json").exists() and not (save / "config.json").exists()
        first = save / "model-00001-of-00003.safetensors"
        inode = first.stat().st_ino
        assert "has not ended" in refused(capsys, 3, command, save, tmp_path / "from-half")
        if command == there:  # whatever other options would give does not belong beside what is there
            assert "other options" in refused(capsys, 2, command, origin, save, "--ignore", "self_attn")
        convert(command, origin, save)
        assert "1 of 3 shards are written already" in capsys.readouterr().out
        assert first.stat().st_ino == inode and contents(save) == contents(whole)


def test_stopped_after_the_last_shard(source, tmp_path, monkeypatch):
    convert("hf-to-fp8", source, tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(requantise, "_manifest", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            convert("hf-to-fp8", source, tmp_path / "save")
    with monkeypatch.context() as patch:
        stop_at(patch, 1)  # not one is written again
        convert("hf-to-fp8", source, tmp_path / "save")
    assert contents(tmp_path / "save") == contents(tmp_path / "whole")


def test_another_source_or_a_changed_one_does_not_continue(source, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        stop_at(patch, 2)
        convert("hf-to-fp8", source, tmp_path / "save", code=5)
    shutil.copytree(source, tmp_path / "copy")
    assert "another source" in refused(capsys, 2, "hf-to-fp8", tmp_path / "copy", tmp_path / "save")
    os.utime(source / "model-00003-of-00003.safetensors", (1, 1))
    assert "another source" in refused(capsys, 2, "hf-to-fp8", source, tmp_path / "save")
    convert("hf-to-fp8", source, tmp_path / "save", "--force")
    convert("hf-to-fp8", source, tmp_path / "whole")
    assert contents(tmp_path / "save") == contents(tmp_path / "whole")


def test_what_save_holds_is_kept_without_force_and_replaced_with_it(source, tmp_path, capsys):
    save = tmp_path / "save"
    convert("hf-to-int4", source, save)
    before = contents(save)
    assert "--force" in refused(capsys, 2, "hf-to-int4", source, save) and contents(save) == before
    (save / "mine.txt").write_text("kept")
    (save / "stale.safetensors").write_text("of an older checkpoint")
    convert("hf-to-fp8", source, save, "--force")
    assert contents(save).keys() == before.keys() | {"mine.txt"}
    assert manifests.read(save / "checkpoint.json", manifests.Checkpoint).dtype == "float8_e4m3fn"
    assert "is a file" in refused(capsys, 2, "hf-to-fp8", source, save / "mine.txt")
    assert "folder that is read" in refused(capsys, 2, "hf-to-fp8", source, source, "--force")


# -- refused -----------------------------------------------------------------------------------------------------------


def test_weights_that_are_not_finite_are_named(tmp_path, capsys):
    tensors = weights()
    tensors[f"{EXPERTS}.down_proj"][2, 63, 95] = torch.inf
    source = write(tmp_path / "source", tensors)
    for command in ("hf-to-fp8", "hf-to-int4"):
        assert f"{EXPERTS}.down_proj holds NaN or infinity" in refused(capsys, 3, command, source, tmp_path / command)
        assert not (tmp_path / command / "checkpoint.json").exists()
    tensors = {
        "a.weight": torch.ones(4, 4).to(torch.float8_e4m3fn),
        "a.weight_scale_inv": torch.full((1, 1), torch.nan),
    }
    assert "a.weight holds NaN" in refused(
        capsys, 3, "fp8-to-bf16", write(tmp_path / "fp8", tensors, 1), tmp_path / "back"
    )


def test_a_group_that_does_not_divide_is_refused_before_anything_is_written(source, tmp_path, capsys):
    said = refused(capsys, 3, "hf-to-int4", source, tmp_path / "save", "--group-size", 64, "--ignore", "mlp.down_proj")
    assert (
        f"{EXPERTS}.down_proj has rows of 96, which groups of 64 do not divide" in said
        and f"--ignore {EXPERTS}" in said
    )
    assert not (tmp_path / "save").exists()


def test_options_that_do_not_fit_are_refused_before_anything_is_written(source, tmp_path, capsys):
    def said(*words: object, command: str = "hf-to-fp8") -> str:
        return refused(capsys, 2, command, source, tmp_path / "save", *words)

    assert "no weight matrix has such a name" in said("--ignore", "mlp.gat")
    assert "part of model.layers.0.self_attn.qkv_proj" in said("--ignore", "layers.0.self_attn.k_proj")
    assert "part of model.layers.2.mlp.experts" in said("--ignore", "experts.1", command="hf-to-int4")
    assert "--block-size is for --strategy block" in said("--strategy", "tensor", "--block-size", 64, 64)
    assert "--scale-fmt is for --strategy block" in said("--strategy", "channel", "--scale-fmt", "ue8m0")
    assert "at least 1" in said("--block-size", 0, 128)
    assert not (tmp_path / "save").exists()


def test_sources_that_cannot_be_converted_are_refused(source, tmp_path, capsys):
    save = tmp_path / "save"
    assert "nothing to convert" in refused(capsys, 3, "fp8-to-bf16", source, save)
    assert "nothing to convert" in refused(capsys, 3, "int4-to-bf16", source, save)
    convert("hf-to-fp8", source, tmp_path / "fp8")
    assert "is quantised" in refused(capsys, 3, "hf-to-int4", tmp_path / "fp8", save)
    index = json.loads((source / INDEX).read_text())
    index["weight_map"]["lost.weight"] = "model-00002-of-00003.safetensors"
    (source / INDEX).write_text(json.dumps(index))
    assert "lacks lost.weight" in refused(capsys, 3, "hf-to-fp8", source, save)
    (source / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors" in refused(capsys, 3, "hf-to-fp8", source, save)
    (source / "model-00002-of-00003.safetensors").write_bytes(b"x" * 100)
    assert "cut off" in refused(capsys, 3, "hf-to-fp8", source, save)
    (source / INDEX).write_text('{"weight_map": {"a": "../a.safetensors"}}')
    assert "not a file beside it" in refused(capsys, 3, "hf-to-fp8", source, save)
    assert "no such folder" in refused(capsys, 3, "hf-to-fp8", tmp_path / "nowhere", save)
    assert not save.exists()


def test_quantised_tensors_without_their_scales_are_refused(source, tmp_path, capsys):
    for there, back, part in (("hf-to-fp8", "fp8-to-bf16", "_scale_inv"), ("hf-to-int4", "int4-to-bf16", "_shape")):
        convert(there, source, tmp_path / there)
        stored = read(tmp_path / there)
        del stored[f"model.layers.0.mlp.up_proj.weight{part}"]
        said = refused(capsys, 3, back, write(tmp_path / f"{there}-less", stored), tmp_path / "save")
        assert "model.layers.0.mlp.up_proj.weight" in said and part in said
    tensors = {"a.weight": torch.ones(300, 4).to(torch.float8_e4m3fn), "a.weight_scale": torch.ones(2, 1)}
    said = refused(capsys, 3, "fp8-to-bf16", write(tmp_path / "fp8", tensors, 1), tmp_path / "save")
    assert "a.weight has shape [300, 4] and scales of shape [2, 1]" in said


def test_a_full_disk_leaves_no_half_shard(source, tmp_path, monkeypatch, capsys):
    def save_half(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(requantise, "save_file", save_half)
        assert "No space left" in refused(capsys, 3, "hf-to-fp8", source, tmp_path / "save")
    assert set(contents(tmp_path / "save")) == {"conversion.json"}
    convert("hf-to-fp8", source, tmp_path / "save")


# -- names, screen, other readers --------------------------------------------------------------------------------------


def test_a_pattern_is_whole_parts_of_a_name():
    assert number_formats._matches("model.layers.1.mlp.gate.weight", ("mlp.gate",))
    assert not number_formats._matches("model.layers.1.mlp.gate_proj.weight", ("mlp.gate",))
    assert number_formats._matches("model.layers.1.mlp.gate_proj.weight", ("mlp.gate*",))
    assert number_formats._matches("model.layers.1.mlp.experts.gate_up_proj", ("experts",))
    assert not number_formats._matches("model.layers.11.mlp.up_proj.weight", ("layers.1",))


def test_an_ignored_name_inside_a_longer_one_is_written_as_a_regex(tmp_path):
    """SGLang finds compressed-tensors' plain names anywhere in a module's."""
    tensors = {f"model.layers.0.mlp.{name}.weight": torch.randn(64, 64) for name in ("gate", "gate_proj", "up_proj")}
    convert("hf-to-int4", write(tmp_path / "source", tensors, 1), tmp_path / "int4")
    found = json.loads((tmp_path / "int4" / "config.json").read_text())["quantization_config"]
    assert found["ignore"] == [r"re:model\.layers\.0\.mlp\.gate$"]


def test_what_a_terminal_and_a_pipe_see(source, tmp_path):
    for terminal in (True, False):
        screen = Screen(Console(file=io.StringIO(), force_terminal=terminal, width=200))
        requantise.convert(source, tmp_path / str(terminal), number_formats.ToFp8(strategy="channel"), screen=screen)
        said = screen.console.file.getvalue()
        assert "converting tensors" in said and "stack of experts" in said and "hashing" in said
        assert ("━" in said) == terminal and ("of" in said.split("converting tensors")[1][:10]) != terminal


def test_help_imports_no_torch():
    code = (
        "import sys; from slime_cli.__main__ import run; run(['convert', 'hf-to-fp8', '--help']); print('torch' in"
        " sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.endswith("False\n") and "--scale-fmt" in done.stdout
