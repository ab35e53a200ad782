"""Shared by the checks of this folder: commands of slime as a user starts them, and JSON lines of what they did.

Each check is one script that runs on a machine with a GPU in the repository's root, in one call of a few minutes.
It prints a JSON line for every rollout as it ends and for every result, and ends with exit code 1 when a bound is not
held. Nothing of slime is called but its commands; what a run did is read from its folder.
"""

import concurrent.futures
import json
import pathlib
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import httpx

from slime_cli.profiling.step import step_budget
from slime_cli.tracing.reading import spans_of

PEAK = {"NVIDIA H100": 989e12, "NVIDIA H200": 989e12, "NVIDIA A100": 312e12}
"""Dense bfloat16 FLOP/s by the vendor's datasheet."""
SHOWN = (
    "seconds",
    "reward_mean",
    "response_length_mean",
    "truncated_ratio",
    "train/train_rollout_logprob_abs_diff",
    "train/train_rollout_logprob_abs_diff_max",
    "train/grad_norm",
    "train/entropy",
    "train/loss",
)


def say(what: str, **fields: Any) -> None:
    """One JSON line, at once; numbers to five digits."""
    print(json.dumps({"what": what} | {k: _short(v) for k, v in fields.items()}), flush=True)


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {name: _short(inner) for name, inner in value.items()}
    return value


def machine() -> str:
    """The first GPU's name."""
    return _names()[0]


def gpus() -> int:
    """How many there are; 0 where there is no driver."""
    try:
        return len(_names())
    except (OSError, subprocess.CalledProcessError):
        return 0


def _names() -> list[str]:
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    return [line.strip() for line in lines]


class Memory:
    """Memory in use on the first GPU, asked twice a second; the most since the last :meth:`peak`."""

    def __init__(self) -> None:
        self._most = 0.0
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0", "--loop-ms=500"]
        with subprocess.Popen(query, stdout=subprocess.PIPE, text=True) as asked:
            for line in asked.stdout or ():
                self._most = max(self._most, float(line) / 1024)

    def peak(self) -> float:
        """GiB."""
        most, self._most = self._most, 0.0
        return most


def slime(*words: str) -> list[str]:
    return [sys.executable, "-m", "slime_cli", *words]


def train(run_dir: pathlib.Path, *words: str) -> int:
    """``slime train`` to its end; a line for each rollout meanwhile. Its exit code."""
    log = run_dir.with_suffix(".log")
    started = time.monotonic()
    shown = 0
    with open(log, "w") as output:
        process = subprocess.Popen(slime("train", "--run-dir", str(run_dir), *words), stdout=output, stderr=output)
        while process.poll() is None:
            time.sleep(0.5)
            shown = _follow(run_dir / "metrics.jsonl", shown)
    _follow(run_dir / "metrics.jsonl", shown)
    if process.returncode:
        print(log.read_text()[-3000:], flush=True)
    say("train", run=run_dir.name, exit_code=process.returncode, seconds=time.monotonic() - started)
    return process.returncode


def _follow(metrics: pathlib.Path, shown: int) -> int:
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    for text in lines[shown:]:
        line = json.loads(text)
        found = {name.removeprefix("train/"): line[name] for name in SHOWN if name in line}
        say("rollout", phase=line["phase"], rollout=line["rollout_id"], **found)
    return len(lines)


def steps(run_dir: pathlib.Path, phase: str, rollouts: Sequence[int]) -> dict[str, float]:
    """Median seconds of each part of a step over ``rollouts``; the trainer's own parts as ``train: NAME``."""
    spans = spans_of(run_dir)
    budgets = [step_budget(spans, phase, rollout) for rollout in rollouts]
    names = dict.fromkeys(part.name for budget in budgets for part in (*budget.parts, *budget.train))
    return {"step": statistics.median(budget.seconds for budget in budgets)} | {
        name: statistics.median(
            sum(part.seconds for part in (*budget.parts, *budget.train) if part.name == name) for budget in budgets
        )
        for name in names
    }


def spans(run_dir: pathlib.Path, name: str) -> list[float]:
    """Seconds of every span of that name, of all processes."""
    return [span.end - span.ts for span in spans_of(run_dir) if span.name == name]


def samples(run_dir: pathlib.Path, phase: str, rollout: int) -> tuple[list[int], list[int]]:
    """(tokens, answer's tokens) of each sample of a rollout."""
    import pyarrow.parquet

    path = next(run_dir.glob(f"{phase}/rollouts/{rollout:06d}/samples.parquet"), None)
    table = pyarrow.parquet.read_table(path or next(run_dir.glob(f"rollouts/{rollout:06d}/samples.parquet")))
    return [len(tokens) for tokens in table["tokens"].to_pylist()], table["response_length"].to_pylist()


def straight(url: str, prompts: list[list[int]], length: int) -> float:
    """Tokens a second of one engine, or of a router's, with all of these requests at once."""
    sampling = {"max_new_tokens": length, "temperature": 1.0, "ignore_eos": True}

    def one(prompt: list[int]) -> int:
        body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
        return client.post(f"{url}/generate", json=body).json()["meta_info"]["completion_tokens"]

    limits = httpx.Limits(max_connections=len(prompts))
    with (
        httpx.Client(timeout=600, limits=limits, trust_env=False) as client,
        concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool,
    ):
        started = time.monotonic()
        tokens = sum(pool.map(one, prompts))
        return tokens / (time.monotonic() - started)
