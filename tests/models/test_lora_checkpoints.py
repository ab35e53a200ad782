"""Which checkpoints fit a LoRA training: of the same adapter, over a base with the same bytes."""

import msgspec
import pytest

from slime_cli import manifests
from slime_cli.errors import DataError
from slime_cli.models import lora, tiny
from slime_cli.models.describe import checkpoint_manifest

ADAPTER = manifests.Adapter(rank=4, alpha=8, dropout=0.1, modules=["linear_qkv"])


@pytest.fixture
def base(tmp_path):
    return tiny.make("tiny:qwen3?num_hidden_layers=1&hidden_size=32&intermediate_size=64", tmp_path / "base")


@pytest.fixture
def checkpoint(base, tmp_path):
    """A function: the folder of a checkpoint with this adapter over the base."""

    manifest = checkpoint_manifest(base, iteration=3, dtype="float32", layout={})

    def made(adapter):
        folder = tmp_path / "iter_0000003"
        folder.mkdir(exist_ok=True)
        manifests.write(folder / "checkpoint.json", msgspec.structs.replace(manifest, adapter=adapter))
        return folder

    return made


def refusal(*given) -> str:
    with pytest.raises(DataError) as refused:
        lora.require(*given)
    return f"{refused.value.message} | {refused.value.fix}"


def test_the_same_adapter_over_the_same_base_fits_wherever_the_base_lies(checkpoint, base, tmp_path):
    path = checkpoint(ADAPTER)
    lora.require(path, ADAPTER, base)
    moved = base.rename(tmp_path / "elsewhere")
    lora.require(path, msgspec.structs.replace(ADAPTER, dropout=0.0), moved)
    lora.require(checkpoint(None), None, moved)


def test_another_base_is_refused(checkpoint, base):
    path = checkpoint(ADAPTER)
    weights = base / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    said = refusal(path, ADAPTER, base)
    assert "is not that base: model.safetensors is another" in said
    assert "give the base that it was trained over" in said


def test_another_adapter_is_refused_with_both(checkpoint, base):
    path = checkpoint(ADAPTER)
    said = refusal(path, msgspec.structs.replace(ADAPTER, rank=8), base)
    assert "rank 4, alpha 8 and layers linear_qkv" in said and "rank 8" in said


def test_whole_weights_and_adapters_do_not_take_each_others_place(checkpoint, base):
    assert "trains an adapter over those of --hf-checkpoint | slime convert" in refusal(checkpoint(None), ADAPTER, base)
    assert "give --lora-rank 4" in refusal(checkpoint(ADAPTER), None, base)
