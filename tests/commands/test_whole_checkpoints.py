"""What is wrong with an HF checkpoint is named by every command that reads one, before any process is started."""

import json
import pathlib
import subprocess

import pytest

from slime_cli import __main__ as cli
from tests import checkpoints

LAYER = "model.layers.1."
LOST = f"{LAYER}self_attn.q_proj.weight"


def _shard_with_its_lines(folder: pathlib.Path) -> None:
    checkpoints.unlist(folder, LAYER)
    (folder / checkpoints.SHARDS[1]).unlink()


def _line_of_the_index(folder: pathlib.Path) -> None:
    checkpoints.unlist(folder, LOST)


def _end_of_a_file(folder: pathlib.Path) -> None:
    path = folder / checkpoints.SHARDS[1]
    path.write_bytes(path.read_bytes()[:-100])


def _rows_of_the_embedding(folder: pathlib.Path) -> None:
    path = folder / "tokenizer.json"
    found = json.loads(path.read_text())
    path.write_text(json.dumps(found | {"added_tokens": [{"id": 95, "content": "<|far|>"}]}))


DAMAGES = {
    "a shard and its lines in the index": (_shard_with_its_lines, "input_layernorm.weight is missing"),
    "a line of the index": (_line_of_the_index, f"{LOST} is in {checkpoints.SHARDS[1]} and not in {checkpoints.INDEX}"),
    "the end of a file": (_end_of_a_file, f"{checkpoints.SHARDS[1]} has "),
    "rows for the tokenizer's ids": (_rows_of_the_embedding, "'<|far|>' has id 95, and the embedding has 32 rows"),
}
COMMANDS = {
    "doctor": (["doctor", "--quick", "--json", "--hf-checkpoint", "MODEL"], 2),
    "hf-to-dist": (["convert", "hf-to-dist", "--hf-checkpoint", "MODEL", "--save", "OUT"], 3),
    "hf-to-fp8": (["convert", "hf-to-fp8", "--hf-checkpoint", "MODEL", "--save", "OUT"], 3),
    "serve-rollout": (["serve-rollout", "--hf-checkpoint", "MODEL", "--run-dir", "OUT"], 3),
    "train": (
        "train --hf-checkpoint MODEL --prompt-data reasoning-gym:basic_arithmetic --num-rollout 1 --rollout-batch-size"
        " 2 --n-samples-per-prompt 2 --rollout-max-response-len 8 --run-dir OUT".split(),
        3,
    ),
}


class Started(Exception):
    """A process was about to be started."""


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """``(name of a command) -> exit code, all that it said``; the exit code is "started" where it would have started
    a process.
    """

    def refuse(*args, **more):
        raise Started

    def call(name: str) -> tuple[int | str, str]:
        words = [
            {"MODEL": str(tmp_path / "model"), "OUT": str(tmp_path / "out")}.get(word, word)
            for word in COMMANDS[name][0]
        ]
        with monkeypatch.context() as patch:
            patch.setattr(subprocess.Popen, "__init__", refuse)
            try:
                code = cli.run(words)
            except Started:
                code = "started"
        said = capfd.readouterr()
        return code, " ".join((said.out + said.err).split())

    return call


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_checkpoint_without(damage, command, run, tmp_path):
    spoil, words = DAMAGES[damage]
    spoil(checkpoints.write(tmp_path / "model"))
    wanted = COMMANDS[command][1]
    if spoil is _rows_of_the_embedding and command == "hf-to-fp8":  # weights alone: it warns and goes on
        wanted = 0
    code, said = run(command)
    assert words in said and code == wanted, said
    assert code in (0, "started") or not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("command", "code"), [("hf-to-dist", "started"), ("hf-to-fp8", 0), ("serve-rollout", "started")]
)
def test_a_whole_checkpoint_is_not_warned_of(command, code, run, tmp_path):
    checkpoints.write(tmp_path / "model")
    found, said = run(command)
    assert found == code and "warning" not in said


def test_weights_are_not_looked_at_where_the_engine_reads_others(run, tmp_path, monkeypatch):
    _end_of_a_file(checkpoints.write(tmp_path / "model"))
    monkeypatch.setitem(COMMANDS, "dummy", (COMMANDS["serve-rollout"][0] + ["--sglang-load-format", "dummy"], 0))
    assert run("dummy")[0] == "started"
