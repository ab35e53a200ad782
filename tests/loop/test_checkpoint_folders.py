"""Which checkpoint of a folder counts: the newest that is whole, and what is said of others."""

import pytest

from slime_cli import manifests
from slime_cli.errors import DataError
from slime_cli.manifests import checkpoints, layout
from tests.checkpoints import write_dist


def make(root, iteration: int, **files: int):
    folder = layout.checkpoint(root, iteration)
    folder.mkdir(parents=True)
    write_dist(folder)
    for name, size in files.items():
        (folder / name).write_bytes(bytes(size))
    manifest = manifests.Checkpoint(
        format="torch_dist",
        source="s",
        source_hashes={},
        architecture="a",
        megatron_args={},
        tokenizer_hash="",
        chat_template_hash="",
        iteration=iteration,
        dtype="float32",
        layout={},
        files=files,
    )
    manifests.write(folder / layout.CHECKPOINT, manifest)
    (root / checkpoints.TRACKER).write_text(str(iteration))
    return folder


def cut(folder):
    (folder / "weights").write_bytes(bytes(3))


def lose(folder):
    (folder / "weights").unlink()


def unfinished(folder):
    (folder / layout.CHECKPOINT).unlink()


def garble(folder):
    (folder / layout.CHECKPOINT).write_text("{")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (cut, "weights has 3 bytes of 7"),
        (lose, "weights is missing"),
        (unfinished, "never written to its end"),
        (garble, "not a JSON object"),
    ],
)
def test_a_damaged_newest_checkpoint_is_passed_over_with_a_word(tmp_path, spoil, said):
    make(tmp_path, 2, weights=7)
    whole = make(tmp_path, 10, weights=7)
    newest = make(tmp_path, 12, weights=7)
    told = []
    assert checkpoints.complete(tmp_path, told.append) == newest and told == []
    spoil(newest)
    assert checkpoints.complete(tmp_path, told.append) == whole
    assert len(told) == 1 and said in told[0] and "iter_0000012" in told[0] and f"taking {whole}" in told[0]


def test_the_folder_that_was_named_is_taken_or_refused_but_never_another(tmp_path):
    make(tmp_path, 2, weights=7)
    newest = make(tmp_path, 3, weights=7)
    assert checkpoints.complete(newest) == newest
    cut(newest)
    with pytest.raises(DataError, match="weights has 3 bytes of 7"):
        checkpoints.complete(newest)


def test_no_checkpoint_at_all(tmp_path):
    with pytest.raises(DataError, match="no complete checkpoint there"):
        checkpoints.complete(tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read"),
        ("", "is empty"),
        ("\x00\xff4", "says '"),
        ("2.5", "says '2.5'"),
        ("2", "says '2'; --ckpt-step 2 takes that one"),
    ],
)
def test_a_tracker_file_that_is_broken_or_names_another_is_told_and_the_newest_whole_one_taken(tmp_path, text, said):
    make(tmp_path, 2, weights=7)
    newest = make(tmp_path, 4, weights=7)
    tracker = tmp_path / checkpoints.TRACKER
    told = []
    tracker.unlink() if text is None else tracker.write_text(text, encoding="latin-1")
    assert checkpoints.complete(tmp_path, told.append) == newest
    assert (
        len(told) == 1 and f"{tracker} {said}" in told[0] and f"taking the newest whole checkpoint, {newest}" in told[0]
    )


def test_the_tracker_file_of_a_converted_model_says_release(tmp_path):
    start = make(tmp_path, 0, weights=7)
    (tmp_path / checkpoints.TRACKER).write_text("release\n")
    told = []
    assert checkpoints.complete(tmp_path, told.append) == start and not told


def test_a_step_that_is_asked_for_is_taken_whatever_is_newer(tmp_path):
    first = make(tmp_path, 2, weights=7)
    second = make(tmp_path, 4, weights=7)
    told = []
    assert checkpoints.complete(tmp_path, told.append, 2) == first and not told
    assert checkpoints.complete(second, told.append, 4) == second and not told


def test_a_step_that_is_not_there_or_not_whole_is_refused_with_those_that_are(tmp_path):
    make(tmp_path, 2, weights=7)
    make(tmp_path, 4, weights=7)
    cut(make(tmp_path, 6, weights=7))
    for step, said in ((3, "there is no such checkpoint"), (6, "weights has 3 bytes of 7")):
        with pytest.raises(DataError, match=f"--ckpt-step {step}: .*iter_000000{step}: {said}") as error:
            checkpoints.complete(tmp_path, step=step)
        assert error.value.fix == "whole ones are there of step 2, 4"
    with pytest.raises(DataError, match="is the checkpoint of another step"):
        checkpoints.complete(layout.checkpoint(tmp_path, 4), step=2)
    with pytest.raises(DataError) as error:
        checkpoints.complete(tmp_path / "none", step=2)
    assert error.value.fix == "no whole checkpoint is there"
