"""A launch script as a command of ours: what is left out, put otherwise or added, each with its reason.

1. What changes nothing in the result is left out, and said; anything else stays, and is refused where it is read.
2. The command that is printed gives the same options when a shell reads it.
"""

import pathlib
import shlex

import pytest

from bench.scripts import SCRIPTS
from slime_cli.commands import train
from slime_cli.errors import UsageError
from slime_cli.options import layers
from slime_cli.options.derive import FULLY_ASYNC
from slime_cli.options.not_yet import NOT_YET
from slime_cli.options.resolve import resolve
from slime_cli.options.scripts.move import LEFT_OUT, Moved, move

DEVICES = "--actor-num-gpus-per-node 8"


def moved(tmp_path: pathlib.Path, options: str, program: str = "train.py", head: str = "") -> Moved:
    path = tmp_path / "run.sh"
    path.write_text(f"{head}\npython3 {program} {options}\n")
    return move(str(path))


@pytest.mark.parametrize(
    ("options", "program", "argv", "said"),
    [
        ("--lr 1", "train.py", f"--lr 1 {DEVICES}", f"{DEVICES} is added: slime's default, which is 1 here"),
        (f"--lr 1 {DEVICES}", "train.py", f"--lr 1 {DEVICES}", ""),
        (
            f"--lr 1 {DEVICES} --bf16 --lr 2",
            "train.py",
            f"--lr 2 {DEVICES} --bf16",
            "--lr is given more than once: the last one holds, 2",
        ),
        (DEVICES, "train_async.py", f"{DEVICES} --schedule one-step-off", "it is what train_async.py does"),
        (
            f"{DEVICES} --rollout-function-path {FULLY_ASYNC}",
            "train_async.py",
            f"{DEVICES} --schedule async",
            "--rollout-function-path is left out: slime's fully asynchronous rollouts are --schedule async",
        ),
        (
            f"{DEVICES} --rollout-function-path slime.rollout.sglang_rollout.generate_rollout",
            "train.py",
            DEVICES,
            "it is what is done anyway",
        ),
        (
            f"{DEVICES} --loss-type sft_loss --debug-train-only --disable-compute-advantages-and-returns"
            " --loss-mask-type qwen --rollout-function-path slime.rollout.sft_rollout.generate_rollout",
            "train_async.py",
            f"{DEVICES} --loss-type sft_loss",
            "--debug-train-only is left out: with --loss-type sft_loss no engine is started anyway",
        ),
        (f"{DEVICES} --debug-train-only", "train.py", f"{DEVICES} --debug-train-only", ""),
        (
            f"{DEVICES} --rollout-function-path slime.rollout.sft_rollout.generate_rollout",
            "train.py",
            f"{DEVICES} --rollout-function-path slime.rollout.sft_rollout.generate_rollout",
            "",
        ),
        (f"{DEVICES} --train-backend megatron", "train.py", DEVICES, "Megatron is the only trainer"),
        (f"{DEVICES} --train-backend fsdp", "train.py", f"{DEVICES} --train-backend fsdp", ""),
        (
            f"{DEVICES} --use-fault-tolerance --rollout-health-check-interval 3",
            "train.py",
            DEVICES,
            "--rollout-health-check-interval is left out: an engine that dies leaves the router",
        ),
        (f"{DEVICES} --log-throughput --tensorboard-dir d", "train.py", DEVICES, "--tensorboard-dir is left out"),
        (
            f"{DEVICES} --use-wandb --wandb-key k",
            "train.py",
            f"{DEVICES} --use-wandb",
            "--wandb-key is left out: it is a",
        ),
        (f"{DEVICES} --enable-mtp-training", "train.py", f"{DEVICES} --enable-mtp-training", ""),
        (
            f"{DEVICES} --rollout-sample-hook-path a.b --rollout-sample-hook-path c.d",
            "train.py",
            f"{DEVICES} --rollout-sample-hook-path a.b c.d",
            "",
        ),
    ],
)
def test_what_changes(tmp_path: pathlib.Path, options: str, program: str, argv: str, said: str):
    found = moved(tmp_path, options, program)
    assert shlex.join(found.argv) == argv
    assert any(said in change for change in found.changed) if said else not found.changed


def test_the_printed_command_gives_the_same_options(tmp_path: pathlib.Path):
    found = moved(tmp_path, """--a '{"b": 1}' --c "x y" --d $'it\\'s'""")
    printed = found.command(["--e", "f g"]).replace("\\\n", "")
    assert shlex.split(printed) == ["slime", "train", *found.argv, "--e", "f g"]


def test_what_stays_as_it_is_written_is_for_the_shell_that_reads_the_command(tmp_path: pathlib.Path):
    found = moved(tmp_path, '--save "/m/$(date +%F)/${NAME_OF_NOBODY}/a\\"b"')
    assert '--save "/m/$(date +%F)/${NAME_OF_NOBODY}/a\\"b"' in found.command() and len(found.unknown) == 2


def test_what_is_left_out_is_explained_and_not_here():
    """Whoever builds one of them takes it out of not_yet.py; it is given like any other from then on."""
    assert [flag for flag in sorted(LEFT_OUT) if flag not in NOT_YET and layers.find(flag) is None] == []


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_slimes_scripts_move_over_with_fewer_refusals(tmp_path: pathlib.Path, name: str):
    """Nothing is refused of the moved command that is not refused of the script's own words."""
    found = moved(tmp_path, shlex.join(SCRIPTS[name]))
    assert not found.unknown
    refused: list[set[str]] = []
    for argv in (SCRIPTS[name], found.argv):
        try:
            resolve(argv)
            refused.append(set())
        except UsageError as error:
            refused.append({part.message for part in error.parts})
    assert refused[1] <= refused[0]


def test_the_command_shows_all_of_it_and_then_the_dry_run(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]):
    head = "export NCCL_DEBUG=1\n"
    options = (
        "--hf-checkpoint m --prompt-data p --num-rollout 3 --rollout-batch-size 8 --rm-type math --use-fault-tolerance"
        " --n-samples-per-prompt 4 --save /x/$(date)"
    )
    moved(tmp_path, options, head=head)
    script = ["--from-script", str(tmp_path / "run.sh")]
    assert train.run([*script, "--dry-run", "--num-rollout", "5", "--run-dir", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("slime train \\\n    --hf-checkpoint m \\\n")
    for said in (
        "--num-rollout 5",
        "What changed, and why:\n  --use-fault-tolerance is left out",
        "run.sh:3: $(date) is not run",
        "exported by the script: NCCL_DEBUG",
        "--num-rollout is given more than once: the last one holds, 5",
    ):
        assert said in shown
    with pytest.raises(UsageError, match="--from-script starts nothing"):
        train.run(script)
    with pytest.raises(UsageError, match="--from-script needs a launch script"):
        train.run(["--from-script", "--dry-run"])
