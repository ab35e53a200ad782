"""Disks that are full, read-only or in the way: tried before a run, and named with their path where they are met in
one.

1. What the kernel says is genuine: a small tmpfs where one may be mounted, /dev/full, and a limit on file sizes
anywhere.
2. Nothing is skipped without a word: where no tmpfs may be mounted, the same writers run under the limit alone.
"""

import contextlib
import errno
import os
import pathlib
import resource
import signal
import subprocess

import pytest

from slime_cli import __main__ as cli
from slime_cli import app, disk, manifests
from slime_cli.buffer.journal import Journal
from slime_cli.errors import EngineError, UsageError
from slime_cli.loop import targets
from slime_cli.loop.attempts import append_line
from slime_cli.options.resolve import resolve
from slime_cli.tracing.spans import Tracer
from tests.buffer.test_journal import deal

FULL = "No space left on device"


@pytest.fixture
def small(tmp_path):
    """A disk of 4 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"no tmpfs may be mounted here ({done.stderr.strip()}): see the tests with a limit on file sizes")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: pathlib.Path) -> None:
    with contextlib.suppress(OSError), open(folder / "filling", "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


@contextlib.contextmanager
def file_size_limit(size: int):
    """What a disk quota does, without one: no file of this process may grow beyond it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_folder_on_a_full_disk_is_refused_with_its_option(small):
    disk.writable(small / "run", "--run-dir")
    assert list((small / "run").iterdir()) == []
    fill(small)
    with pytest.raises(UsageError, match=f"--run-dir {small / 'run'}: cannot write there: {FULL}") as error:
        disk.writable(small / "run", "--run-dir")
    assert "free some space" in error.value.fix


def test_a_limit_a_file_in_the_way_and_a_read_only_folder_are_refused(tmp_path):
    with file_size_limit(1000), pytest.raises(UsageError, match="--save .*: cannot write there: File too large"):
        disk.writable(tmp_path / "a", "--save")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write there: a file is there"):
        disk.writable(tmp_path / "file", "--save")
    with pytest.raises(UsageError, match="cannot write there: Not a directory"):
        disk.writable(tmp_path / "file" / "below", "--save")
    with pytest.raises(
        UsageError, match="--save /proc/x: cannot write there"
    ):  # the superuser may write nearly everywhere else
        disk.writable("/proc/x", "--save")


def test_a_read_only_disk_is_refused(small):
    subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
    with pytest.raises(UsageError, match="--save-hf .*: cannot write there: Read-only file system"):
        disk.writable(small, "--save-hf")


def write_a_manifest(folder: pathlib.Path) -> None:
    manifests.write_bytes(folder / "rollouts" / "samples.parquet", bytes(1 << 23))


def write_a_journal(folder: pathlib.Path) -> None:
    with Journal(folder / "journal.sqlite") as journal:
        for n in range(200_000):
            deal(journal, 20 * n, 20, 4, n)


def write_metrics(folder: pathlib.Path) -> None:
    for _ in range(2000):
        append_line(folder / "metrics.jsonl", {"text": "x" * 5000})


WRITERS = {"journal.sqlite": write_a_journal, "samples.parquet": write_a_manifest, "metrics.jsonl": write_metrics}


@pytest.mark.parametrize(("name", "write"), WRITERS.items())
def test_whatever_writes_names_its_file_when_the_disk_is_full(small, name, write):
    with pytest.raises(EngineError) as error:
        write(small)
    assert name in error.value.message and ("disk is full" if "journal" in name else FULL) in error.value.message


@pytest.mark.parametrize(("name", "write"), WRITERS.items())
def test_whatever_writes_names_its_file_when_a_limit_is_reached(tmp_path, name, write):
    with file_size_limit(1 << 20), pytest.raises(EngineError) as error:
        write(tmp_path)
    assert name in error.value.message and ("disk" in error.value.message or "File too large" in error.value.message)


def test_a_journal_goes_on_when_there_is_space_again(small):
    with pytest.raises(EngineError):
        write_a_journal(small)
    with Journal.open_readonly(small / "journal.sqlite") as reader:
        before = reader.ledger()
    assert before.balanced and before.dispatched > 0
    subprocess.run(["mount", "-o", "remount,size=16m", str(small)], check=True)
    with Journal(small / "journal.sqlite") as journal:
        assert journal.ledger() == before
        deal(journal, 10_000_000, 20, 4, 0)
        assert journal.ledger().dispatched == before.dispatched + 80


def test_spans_end_with_a_word_and_the_traced_code_goes_on(tmp_path, capsys):
    (tmp_path / "trace").mkdir()
    (tmp_path / "trace" / "conductor.jsonl").symlink_to("/dev/full")
    tracer = Tracer(tmp_path, "conductor")
    for _ in range(2):
        with tracer.span("step"):
            done = True
    tracer.close()
    said = capsys.readouterr().err
    assert done and said.count("no more spans of conductor") == 1 and FULL in said


@pytest.mark.parametrize("writer", ["torch.save", "safetensors"])
def test_weights_that_do_not_fit_are_named_by_their_folder(small, writer):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    save = {"torch.save": torch.save, "safetensors": save_file}[writer]
    with pytest.raises(EngineError, match=f"^{small}: .*{FULL}"), disk.naming(small):
        save({"a": torch.zeros(1 << 21)}, small / "weights")


def test_other_errors_are_left_as_they_are(tmp_path):
    for error in (RuntimeError("the loss is wrong"), KeyError("x"), KeyboardInterrupt(), UsageError("m")):
        with pytest.raises(type(error)) as found, disk.naming(tmp_path):
            raise error
        assert found.value is error
    assert disk.cause(ValueError("x")) == disk.cause(FileNotFoundError(errno.ENOENT, "No such file", "x")) == ""


def wrapped():
    try:
        raise OSError(errno.ENOSPC, FULL, "/data/x")
    except OSError as error:
        raise RuntimeError("the writer failed") from error


def test_a_disk_s_words_are_found_in_what_libraries_make_of_them():
    with pytest.raises(RuntimeError) as found:
        wrapped()
    assert disk.cause(found.value) == f"{FULL}: /data/x"
    assert (
        disk.cause(RuntimeError(f"ray::save()\n  OSError: [Errno 28] {FULL}: '/data/x'\nmore"))
        == f"OSError: [Errno 28] {FULL}: '/data/x'"
    )


def test_a_command_that_meets_a_full_disk_ends_with_4_and_the_path(monkeypatch, capsys):
    class Module:
        run = staticmethod(lambda words: wrapped())

    monkeypatch.setattr(app, "module_of", lambda name: Module)
    assert cli.run(["train"]) == 4
    assert capsys.readouterr().err == f"error: {FULL}: /data/x\nfix: {disk.FIX}\n"


@pytest.mark.parametrize("option", ["--run-dir", "--save", "--save-hf"])
@pytest.mark.parametrize("place", ["full", "file"])
def test_train_tries_every_folder_before_anything_starts(small, tmp_path, capsys, option, place):
    (tmp_path / "data.jsonl").write_text('{"input": "1", "label": "1"}\n')
    target = small / "x" if place == "full" else tmp_path / "file"
    fill(small) if place == "full" else target.write_text("")
    folders = {"--run-dir": tmp_path / "run"} | {option: target / "{rollout_id}" if option == "--save-hf" else target}
    words = (
        f"train --hf-checkpoint tiny:qwen3 --prompt-data {tmp_path / 'data.jsonl'} --num-rollout 1 --rollout-batch-size"
        " 2 --n-samples-per-prompt 2 --rm-type math"
    )
    assert cli.run([*words.split(), *(str(w) for pair in folders.items() for w in pair)]) == 2
    said = capsys.readouterr()
    assert f"error: {option} {target}: cannot write there: " in said.err and said.out == ""
    assert not (tmp_path / "run" / "run.json").exists()


def test_an_export_is_in_the_folder_before_its_rollout(tmp_path):
    words = "--hf-checkpoint h --prompt-data p --num-rollout 4 --rollout-batch-size 2 --rm-type math --save-hf"
    for name, stays in (("a/b-{rollout_id}/c", "a"), ("a/b", "a/b")):
        s = resolve([*words.split(), str(tmp_path / name)]).slime
        targets.check_folders(s, tmp_path, tmp_path)
        assert targets.exports(s) == tmp_path / stays


def test_little_room_is_said_with_what_it_is_for(small, tmp_path):
    needs = [
        (small / "checkpoints", "3 checkpoints", 2 << 20),
        (small / "weights", "3 published versions", 1 << 20),
        (tmp_path, "else", 1),
    ]
    assert disk.short_of_room(needs) == []
    (small / "other").write_bytes(bytes(2 << 20))
    (said,) = disk.short_of_room(needs)
    assert (
        "2.1 MB are free, and 3.1 MB are still to be written there" in said
        and "3 checkpoints in" in said
        and "else" not in said
    )
    (small / "checkpoints").mkdir()
    (small / "other").rename(small / "checkpoints" / "iter")
    assert disk.short_of_room(needs) == [], "what lies there already counts"


CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "dtype": "float32",
}


def test_the_room_of_a_run_follows_from_the_model(tmp_path):
    words = "--hf-checkpoint h --prompt-data p --num-rollout 4 --rollout-batch-size 2 --rm-type math --save-interval 2"
    options = resolve([*words.split(), "--save-hf", str(tmp_path / "hf" / "{rollout_id}")])
    needs = {what: size for _, what, size in targets.room("train", options, tmp_path, tmp_path, CONFIG)}
    parameters = needs["2 exports"] / 2 / 4
    assert 90_000 < parameters < 110_000
    assert needs == {
        "2 + 1 checkpoints": 3 * parameters * 12,
        "2 + 1 published versions": 3 * parameters * 4,
        "2 exports": 2 * parameters * 4,
    }
    near = str(tmp_path / "near")
    delta = resolve([*words.split(), "--update-weight-mode", "delta", "--update-weight-local-checkpoint-dir", near])
    needs = {what: (str(where), size) for where, what, size in targets.room("train", delta, tmp_path, tmp_path, CONFIG)}
    assert needs["2 copies of the newest version"] == (near, 2 * parameters * 4)


def test_an_export_of_spans_into_no_folder_is_refused(tmp_path, capsys):
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "file").write_text("")
    assert cli.run(["trace", "export", str(tmp_path), "-o", str(tmp_path / "file" / "trace.json")]) == 2
    assert "--out" in capsys.readouterr().err
    assert cli.run(["trace", "export", str(tmp_path / "absent")]) == 3 and not (tmp_path / "absent").exists()


def test_what_is_in_the_way_of_a_folder_is_seen_without_writing(tmp_path):
    (tmp_path / "file").write_text("x")
    for folder, reason in ((tmp_path / "file", "a file is there"), (tmp_path / "file" / "run", "Not a directory")):
        with pytest.raises(UsageError, match=f"--save {folder}: cannot write there: {reason}"):
            disk.nothing_in_the_way(folder, "--save")
    disk.nothing_in_the_way(tmp_path / "new" / "run", "--save")
    assert os.listdir(tmp_path) == ["file"]
