"""Which checkpoint of a folder counts: the newest that is whole, and what is said of others."""

import pytest

from slime_cli import manifests
from slime_cli.errors import DataError
from slime_cli.manifests import checkpoints


def make(root, iteration: int, **files: int):
    folder = checkpoints.folder(root, iteration)
    folder.mkdir(parents=True)
    for name, size in files.items():
        (folder / name).write_bytes(bytes(size))
    manifest = manifests.Checkpoint(
        format="torch_dist", source="s", source_hashes={}, architecture="a", megatron_args={}, tokenizer_hash="", chat_template_hash="",
        iteration=iteration, dtype="float32", layout={}, files=files,
    )  # fmt: skip
    manifests.write(folder / checkpoints.MANIFEST, manifest)
    return folder


def cut(folder):
    (folder / "weights").write_bytes(bytes(3))


def lose(folder):
    (folder / "weights").unlink()


def unfinished(folder):
    (folder / checkpoints.MANIFEST).unlink()


def garble(folder):
    (folder / checkpoints.MANIFEST).write_text("{")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [(cut, "weights has 3 bytes of 7"), (lose, "weights is missing"), (unfinished, "never written to its end"), (garble, "not a JSON object")],
)
def test_a_damaged_newest_checkpoint_is_passed_over_with_a_word(tmp_path, spoil, said):
    make(tmp_path, 2, weights=7)
    whole, newest = make(tmp_path, 10, weights=7), make(tmp_path, 12, weights=7)
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
