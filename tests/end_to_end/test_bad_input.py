"""What goes wrong at the edge: the message, the exit code, and that nothing is started before."""

import os
import signal
import socket
import time

from tests.end_to_end.conftest import SMALL, TINY, slime, start


def test_an_unknown_option_names_the_nearest():
    done = slime("train", "--profile", "quickstart", "--tensor-model-paralell-size", "2")
    assert done.returncode == 2 and "--tensor-model-parallel-size" in done.stderr


def test_a_broken_row_names_file_and_line(tmp_path):
    data = tmp_path / "p.jsonl"
    data.write_text('{"input": "1 + 1", "label": "2"}\n{"input": \n{"input": "2 + 2", "label": "4"}\n')
    words = ("train", "--profile", "quickstart", "--run-dir", tmp_path / "run", "--prompt-data", data)
    done = slime(*words)
    assert done.returncode == 3 and f"{data}, line 2" in done.stderr and "--on-bad-row skip" in done.stderr
    assert not (tmp_path / "run").exists()


def test_rows_that_no_engine_could_take_are_named_before_anything_is_started(tmp_path):
    """The first is beyond the model's context, the second would be control tokens; both are well-formed JSON."""
    data = tmp_path / "p.jsonl"
    data.write_text(
        f'{{"input": "1 + 1", "label": "2"}}\n{{"input": "{"1+" * 400}", "label": "2"}}\n{{"input": "<|end|>"}}\n'
    )
    sizes = (
        "--num-rollout 1 --rollout-batch-size 2 --n-samples-per-prompt 2 --rollout-max-response-len 6 --rm-type exact"
    )
    words = ("train", "--hf-checkpoint", TINY, "--run-dir", tmp_path / "run", *sizes.split(), "--prompt-data")
    done = slime(*words, data)
    assert done.returncode == 3 and f"{data}:2: it has" in done.stderr, done.stderr
    done = slime(*words, f"{data}@[2:]")
    assert done.returncode == 3 and f"{data}:3: the prompt holds the control token <|end|>" in done.stderr, done.stderr
    assert not (tmp_path / "run").exists()


def test_an_empty_data_set(tmp_path):
    data = tmp_path / "empty.jsonl"
    data.write_text("")
    done = slime("train", "--profile", "quickstart", "--run-dir", tmp_path / "run", "--prompt-data", data)
    assert done.returncode == 3 and "empty.jsonl" in done.stderr


def test_batch_sizes_that_do_not_fit():
    done = slime("train", "--profile", "quickstart", "--global-batch-size", "500", "--dry-run")
    assert done.returncode == 2 and "500" in done.stderr


def test_an_unwritable_run_directory(tmp_path):
    (tmp_path / "file").write_text("")
    done = slime("train", "--profile", "quickstart", "--run-dir", tmp_path / "file" / "run")
    assert done.returncode == 2 and "--run-dir" in done.stderr


def test_an_occupied_port(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = slime("serve-rollout", "--hf-checkpoint", TINY, "--run-dir", tmp_path, "--sglang-router-port", port)
    assert done.returncode == 2 and str(port) in done.stderr


def test_an_engine_that_dies_at_start_shows_its_last_words(tmp_path):
    began = time.time()
    done = slime(
        "serve-rollout", "--hf-checkpoint", TINY, "--run-dir", tmp_path, "--sglang-attention-backend", "flashmla"
    )
    assert done.returncode == 4, done.stderr
    assert "its last lines" in done.stderr and time.time() - began < 120


def test_a_vanished_endpoint_ends_a_run_with_exit_4(served, tmp_path):
    gone = tmp_path / "endpoint.json"
    text = (served / "endpoint.json").read_text()
    router = text.split('"router_url": "')[1].split('"')[0]
    gone.write_text(text.replace(router, "http://127.0.0.1:9"))
    done = slime("train", "--profile", SMALL, "--run-dir", tmp_path / "run", "--rollout-endpoint", gone)
    assert done.returncode == 4 and "does not answer" in done.stderr


def test_engines_die_with_their_owner(tmp_path):
    process = start("serve-rollout", "--hf-checkpoint", TINY, "--run-dir", tmp_path, log=tmp_path / "out.log")
    deadline = time.time() + 60
    while not (tmp_path / "logs" / "engine-0.log").exists() and time.time() < deadline:
        time.sleep(0.1)
    time.sleep(1)
    children = [int(p) for p in os.popen(f"ps -o pid= --ppid {process.pid}").read().split()]
    assert len(children) == 2  # the router and the engine
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    time.sleep(2)
    states = os.popen(f"ps -o state= -p {','.join(map(str, children))}").read().split()
    assert all(state == "Z" for state in states), states
