"""A run's folder has one process at a time, whatever became of those before it."""

import os
import signal
import subprocess
import sys

import pytest

from slime_cli import manifests
from slime_cli.errors import UsageError
from slime_cli.loop import attempts as run_dir
from slime_cli.manifests import layout
from slime_cli.options.resolve import resolve

HOLD = """
import pathlib, sys, time
from slime_cli.loop import attempts as run_dir
with run_dir.alone(pathlib.Path(sys.argv[1])):
    print("here", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "here\n"
    yield process
    process.kill()
    process.wait()


def test_a_second_process_is_refused_by_the_name_of_the_first_until_it_ends(tmp_path, holder):
    for refused in (run_dir.refuse_second, lambda folder: run_dir.alone(folder).__enter__()):
        with pytest.raises(UsageError, match=f"process {holder.pid} on .* is running it"):
            refused(tmp_path)
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    run_dir.refuse_second(tmp_path)
    with run_dir.alone(tmp_path):
        assert str(os.getpid()) in (tmp_path / layout.LOCK).read_text()


def test_a_second_train_is_refused_at_once_and_changes_nothing(tmp_path, holder):
    (tmp_path / "run.json").write_text("{}")
    before = {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in tmp_path.iterdir()}
    code = (
        "import sys; from slime_cli.__main__ import run; code = run(sys.argv[1:]); "
        "print('HEAVY', [n for n in ('torch', 'ray', 'numpy', 'reasoning_gym') if n in sys.modules]); sys.exit(code)"
    )
    words = ["train", "--profile", "quickstart", "--run-dir", str(tmp_path)]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.returncode == 2 and f"process {holder.pid}" in done.stderr and "HEAVY []" in done.stdout, (
        done.stdout + done.stderr
    )
    assert {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in tmp_path.iterdir()} == before


def test_looking_for_another_process_makes_nothing(tmp_path):
    run_dir.refuse_second(tmp_path)
    run_dir.refuse_second(tmp_path / "absent")
    assert list(tmp_path.iterdir()) == []


def test_what_an_attempt_computed_with_is_written_for_that_attempt_alone(tmp_path):
    options = resolve(
        "--hf-checkpoint h --prompt-data p --rollout-batch-size 8 --loss-type sft_loss --num-rollout 3".split()
    )
    run_dir.claim(options, tmp_path)
    run_dir.computed_with(tmp_path, "attention by rectangles")
    run_dir.claim(options, tmp_path)
    run = manifests.read(tmp_path / layout.RUN, manifests.Run)
    kept = [attempt.hardware.get("trainer_kernels") for attempt in run.attempts]
    assert kept == ["attention by rectangles", None] and "trainer_kernels" not in run.hardware
    assert run.attempts[0].hardware | {"trainer_kernels": None} == run.hardware | {"trainer_kernels": None}
    run_dir.computed_with(tmp_path / "absent", "nothing")
    assert not (tmp_path / "absent").exists()
