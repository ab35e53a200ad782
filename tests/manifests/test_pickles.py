"""What a torch_dist checkpoint of a stranger may hold: nothing that runs when Megatron or torch unpickles it."""

import argparse
import io
import os
import pathlib
import pickle
import zipfile

import numpy as np
import pytest
import torch
from torch.distributed import checkpoint as dcp

from slime_cli import __main__ as cli
from slime_cli import manifests
from slime_cli.errors import DataError
from slime_cli.loop import resuming
from slime_cli.manifests import layout, pickles
from slime_cli.options.resolve import resolve
from tests.checkpoints import write

KEY = "common_state/shard_0_1"


class Evil:
    """Unpickled, it makes a file."""

    def __init__(self, marker: pathlib.Path):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


@pytest.fixture
def marker(tmp_path) -> pathlib.Path:
    return tmp_path / "ran"


def common() -> list:
    """Objects of the kinds that Megatron writes: arguments, dtypes, random states."""
    numpy_state = ("MT19937", np.arange(4, dtype=np.uint32), 3)
    args = argparse.Namespace(lr=1e-6, params_dtype=torch.bfloat16, path=pathlib.Path("x"), shape=torch.Size([2]))
    return [{"args": args, "iteration": 3, "rng": (numpy_state, torch.get_rng_state()[:8], {"a", 1})}]


def made(folder: pathlib.Path, content: object = None, key: str = KEY) -> pathlib.Path:
    """A checkpoint as torch writes it, with an object and a tensor."""
    folder.mkdir(parents=True, exist_ok=True)
    writer = dcp.FileSystemWriter(folder)
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    state = {key: common() if content is None else content, "weight": torch.ones(3)}
    dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    return folder


def archive(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def replaced(folder: pathlib.Path, data: bytes) -> None:
    """The object's bytes at the end of the file, and `.metadata` points there."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for index, info in metadata.storage_data.items():
        if index.fqn == KEY:
            file = folder / info.relative_path
            info.offset = file.stat().st_size
            info.length = len(data)
            file.write_bytes(file.read_bytes() + data)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_what_torch_and_megatron_write_passes(tmp_path):
    pickles.check(made(tmp_path))
    torch.save(common()[0], tmp_path / "common.pt")
    pickles.check(tmp_path)
    replaced(tmp_path, archive(common()))
    pickles.check(tmp_path)


def in_metadata(folder: pathlib.Path, evil: Evil) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = evil
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def beside_metadata(folder: pathlib.Path, evil: Evil) -> None:
    (folder / "__0.metadata").write_bytes(pickle.dumps(evil))  # read where .metadata cannot be


def in_an_object(folder: pathlib.Path, evil: Evil) -> None:
    made(folder, [argparse.Namespace(a=evil)])


def in_an_array(folder: pathlib.Path, evil: Evil) -> None:
    made(folder, [np.array([evil], dtype=object)])


def in_common(folder: pathlib.Path, evil: Evil) -> None:
    torch.save({"args": evil}, folder / "common.pt")


def in_an_old_common(folder: pathlib.Path, evil: Evil) -> None:
    torch.save({"args": evil}, folder / "common.pt", _use_new_zipfile_serialization=False)


def with_an_attribute_that_says_tensor(folder: pathlib.Path, evil: Evil) -> None:
    made(folder, [evil])
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.state_dict_metadata[KEY].__dict__["name"] = "torch.distributed.checkpoint.metadata.TensorStorageMetadata"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


PLACES = [
    in_metadata,
    beside_metadata,
    in_an_object,
    in_an_array,
    in_common,
    in_an_old_common,
    with_an_attribute_that_says_tensor,
]


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_a_pickle_that_runs_a_command_is_refused_and_not_run(place, tmp_path, marker):
    folder = made(tmp_path / "iter_0000003")
    place(folder, Evil(marker))
    with pytest.raises(DataError) as error:
        pickles.check(folder)
    assert str(folder) in error.value.message and not marker.exists()
    if place is not in_an_old_common:
        assert "posix.system" in error.value.message


def test_torch_would_run_it(tmp_path, marker):
    folder = made(tmp_path / "iter_0000003", [Evil(marker)])
    dcp.load({KEY: io.BytesIO()}, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    assert marker.exists()


def test_a_name_that_is_only_made_while_it_is_read_is_refused(tmp_path, marker):
    folder = made(tmp_path)
    system = b"c_codecs\nencode\n(Vflfgrz\nVrot13\ntR"  # "system"
    code = b"\x80\x04Vposix\n" + system + b"\x93(V" + f"touch {marker}".encode() + b"\ntR."
    (folder / ".metadata").write_bytes(code)
    with pytest.raises(DataError, match="cannot be read"):
        pickles.check(folder)
    assert not marker.exists()
    pickle.loads(code)
    assert marker.exists()


def with_two_pickles(data: bytes) -> bytes:
    file = io.BytesIO(data)
    with zipfile.ZipFile(file, "a") as both, pytest.warns(UserWarning):
        both.writestr(next(name for name in both.namelist() if name.endswith("data.pkl")), b"N.")
    return file.getvalue()


def with_another_member(data: bytes) -> bytes:
    file = io.BytesIO(data)
    with zipfile.ZipFile(file, "a") as more:
        more.writestr(more.namelist()[0].partition("/")[0] + "/constants.pkl", b"N.")
    return file.getvalue()


@pytest.mark.parametrize(
    "form",
    [
        with_two_pickles,
        with_another_member,
        lambda data: data + b"\0" * 5,
        lambda data: b"PK\x03\x04" + data,
        lambda data: data[:-2] + b"\x03\x00abc",
        lambda data: data[:-30],
        lambda data: b"",
        lambda data: pickle.dumps(1),
    ],
)
def test_an_archive_that_two_readers_could_read_in_two_ways_is_refused(form, tmp_path):
    replaced(made(tmp_path), form(archive(common())))
    with pytest.raises(DataError, match="archive"):
        pickles.check(tmp_path)


def test_a_piece_outside_the_checkpoint_is_refused(tmp_path):
    metadata = pickle.loads((made(tmp_path) / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../elsewhere"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(DataError, match="place in the files"):
        pickles.check(tmp_path)


def test_the_bytes_that_transformer_engine_unpickles_are_refused(tmp_path):
    pickles.check(made(tmp_path / "empty", [torch.empty(0, dtype=torch.uint8)], "layers.0._extra_state/shard_0_1"))
    with pytest.raises(DataError, match="FP8 state"):
        pickles.check(made(tmp_path / "full", [torch.ones(4, dtype=torch.uint8)], "layers.0._extra_state/shard_0_1"))
    pickles.check(tmp_path / "full", own=True)


def test_other_formats_are_refused(tmp_path):
    made(tmp_path)
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(DataError, match="no torch_dist checkpoint"):
        pickles.check(tmp_path)


# -- commands ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def stranger(tmp_path, marker) -> pathlib.Path:
    """A checkpoint whose `.metadata` runs a command, its size noted as it is."""
    hf = write(tmp_path / "hf")
    folder = made(tmp_path / "dist" / "iter_0000003")
    in_metadata(folder, Evil(marker))
    manifest = manifests.Checkpoint(
        format="torch_dist",
        source=str(hf),
        source_hashes={},
        architecture="Qwen3ForCausalLM",
        megatron_args={},
        tokenizer_hash="",
        chat_template_hash="",
        iteration=3,
        dtype="float32",
        layout={"tensor": 1},
        files={file.name: file.stat().st_size for file in folder.iterdir()},
    )
    manifests.write(folder / layout.CHECKPOINT, manifest)
    return folder.parent


def test_conversion_refuses_it_before_megatron_starts(stranger, tmp_path, marker, capsys):
    assert cli.run(["convert", "dist-to-hf", "--load", str(stranger), "--save", str(tmp_path / "out")]) == 3
    said = capsys.readouterr()
    assert (
        "its pickle would call posix.system" in said.err and "Megatron process" not in said.out and not marker.exists()
    )


@pytest.mark.parametrize(
    "option",
    [
        "--load {}",
        "--ref-load {}",
        "--load {good} --use-kl-loss --kl-loss-coef 0.1 --ref-load {}",
        "--use-opd --opd-teacher-load {}",
    ],
)
def test_training_refuses_it_before_anything_starts(option, stranger, tmp_path, marker):
    from tests.loop.test_checkpoint_folders import make

    make(tmp_path / "good", 2, weights=7)
    words = (
        "--hf-checkpoint m --prompt-data p --rm-type math --num-rollout 1 --rollout-batch-size 2"
        " --n-samples-per-prompt 2"
    )
    options = resolve([*words.split(), *option.format(stranger, good=tmp_path / "good").split()])
    with pytest.raises(DataError, match="posix.system"):
        resuming.check_starts([("train", options, tmp_path / "run")], tmp_path / "run")
    assert not marker.exists()
