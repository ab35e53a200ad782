"""The quickstart under every schedule, as it is and killed at five moments: ``make schedules``, an hour on 2 cores.

Each run is the command that a user would type, in a run directory of its own under ``runs/schedules``; one that was
interrupted is resumed and one that is finished is not run again. Writes ``runs/schedules.json`` after each run, and
ends with an error when a run does not reach the reward, exceeds its bound, or has a ledger that does not balance.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from slime_cli import manifests
from slime_cli.buffer.journal import Journal

ROOT = pathlib.Path("runs/schedules")
REWARD = 0.85
TIS = ["--use-tis"]
CASES: dict[str, list[str]] = {
    "sync": ["--schedule", "sync"],
    "one-step-off": ["--schedule", "one-step-off", *TIS],
    "async-1": ["--schedule", "async", "--max-staleness", "1", *TIS],
    "async-4": ["--schedule", "async", "--max-staleness", "4", *TIS],
}


def main() -> None:
    rows: list[dict[str, Any]] = []
    wanted = sys.argv[1:] or [*CASES, *(f"{name}-killed" for name in CASES)]
    for name in wanted:
        folder = ROOT / name
        print(f"-- {name}", flush=True)
        command = [sys.executable, "-m", "slime_cli", "train", "--profile", "quickstart", "--run-dir", str(folder)]
        command += CASES[name.removesuffix("-killed")]
        kills = 0
        if not (folder / "summary.json").exists():
            kills = run(command, folder, MOMENTS if name.endswith("-killed") else [])
        rows.append(row(name, folder, kills))
        manifests.write_json("runs/schedules.json", rows)
    for found in rows:
        print(json.dumps(found))
    if wrong := [problem for found in rows for problem in problems(found)]:
        sys.exit("\n".join(wrong))


# -- killed at five moments --------------------------------------------------------------------------------------------


def _lines(folder: pathlib.Path) -> int:
    path = folder / "metrics.jsonl"
    return sum('"phase": "grpo"' in line for line in path.read_text().splitlines()) if path.exists() else 0


def _made(folder: pathlib.Path, after: int, pattern: str, complete: str, whole: bool) -> bool:
    """A folder of that pattern is there, after so many rollouts, and complete or not yet."""
    if _lines(folder) < after:
        return False
    newest = max((folder / "grpo").glob(pattern), default=None)
    return newest is not None and (newest / complete).exists() == whole


MOMENTS: list[tuple[str, Callable[[pathlib.Path], bool]]] = [
    ("a batch is on disk and is trained", lambda f: _made(f, 3, "rollouts/0*", "manifest.json", True)),
    ("a checkpoint is being written", lambda f: _made(f, 8, "checkpoints/iter_*", "checkpoint.json", False)),
    ("a version is being written", lambda f: _made(f, 13, "weights/v*", "manifest.json", False)),
    ("a version is being sent", lambda f: _made(f, 18, "weights/v*", "manifest.json", True)),
    ("groups are in flight", lambda f: _lines(f) >= 24),
]


def run(command: list[str], folder: pathlib.Path, moments: list[tuple[str, Callable[[pathlib.Path], bool]]]) -> int:
    """The command to its end, killed at each of ``moments`` on the way; how often it was."""
    folder.mkdir(parents=True, exist_ok=True)
    kills = 0
    for what, now in [*moments, ("", lambda f: False)]:
        with open(folder / "out.log", "ab") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            while process.poll() is None:
                if now(folder):
                    os.kill(process.pid, signal.SIGKILL)
                    process.wait()
                    kills += 1
                    print(f"   killed: {what}, after {_lines(folder)} rollouts", flush=True)
                    break
                time.sleep(0.002)
            else:
                if process.returncode:
                    sys.exit(f"exit code {process.returncode}: {' '.join(command)}; see {folder / 'out.log'}")
                if what:
                    sys.exit(f"{folder}: finished before it could be killed while {what}")
    return kills


# -- what came of it ---------------------------------------------------------------------------------------------------


def row(name: str, folder: pathlib.Path, kills: int) -> dict[str, Any]:
    summary = json.loads((folder / "summary.json").read_text())
    lines = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["phase"] == "grpo"]
    options = json.loads((folder / "run.json").read_text())["options"]["slime"]
    with Journal.open_readonly(folder / "grpo" / "journal.sqlite") as journal:
        ledger = journal.ledger()
    samples = sum(line["samples"] for line in lines)
    seconds = sum(line["seconds"] for line in lines)
    return {
        "name": name,
        "schedule": options["schedule"],
        "max_staleness": options["max_staleness"],
        "reward_before": summary["reward_before"],
        "reward_after": summary["reward_after"],
        "seconds": round(seconds, 1),
        "staleness_mean": round(sum(line["staleness_mean"] * line["samples"] for line in lines) / samples, 3),
        "staleness_max": max(line["staleness_max"] for line in lines),
        "idle_rollout": round(sum(line["rollout_idle"] for line in lines) / seconds, 3),
        "idle_trainer": round(sum(line["trainer_idle"] for line in lines) / seconds, 3),
        "dispatched": ledger.dispatched,
        "trained": ledger.trained,
        "dropped": sum(ledger.dropped.values()),
        "in_flight": sum(ledger.in_flight.values()),
        "trained_twice": ledger.trained_twice,
        "balanced": ledger.balanced,
        "killed": kills,
    }


def problems(found: dict[str, Any]) -> list[str]:
    """Bounds that a row does not meet."""
    bound = found["max_staleness"]
    out = []
    if found["reward_after"] < REWARD:
        out.append(f"{found['name']}: reward {found['reward_after']:.3f} is below {REWARD}")
    if bound is not None and found["staleness_max"] > bound:
        out.append(f"{found['name']}: staleness {found['staleness_max']} exceeds {bound}")
    if not found["balanced"] or found["trained_twice"]:
        out.append(f"{found['name']}: the ledger does not balance")
    return out


if __name__ == "__main__":
    main()
