"""Engines and trainer on one GPU that take turns with its memory (``--colocate --offload``), and the same run without.

Usage: python3 -m ci.gpu.colocate FOLDER    (a new folder; about 7 minutes on an H200)

Both train a random 0.6B Qwen3 (profile gpu-synthetic) for a few rollouts. With offload the engine has 0.8 of the GPU,
which it could not have beside the trainer. JSON lines: rollouts; how long each hand-over took; the GPU's memory in each
phase as nvidia-smi saw it, as torch and the engine counted it, and as it was predicted; agreement of both sides'
log-probabilities. Ends with 1 where a bound does not hold.
"""

import bisect
import json
import pathlib
import statistics
import subprocess
import sys
import threading
import time

from ci.gpu import common
from slime_cli.tracing.reading import spans_of

ROLLOUTS = 4
RUNS = {
    "offload": ["--offload", "--sglang-mem-fraction-static", "0.8"],
    "shared": ["--sglang-mem-fraction-static", "0.4"],
}
HANDED_OVER = ("release", "resume", "offload", "onload")
PHASES = {"wait_for_batch": "generate", "train": "train", "publish": "write", "sync": "sync"}
LEFT = 4.0
"""GiB that an engine may still have while the trainer trains, and the trainer while the engine generates: contexts,
workspaces and what lies between allocations (slime's own figure for Megatron after an offload is 3 to 5 GB)."""
GAP = 0.02
"""DESIGN's budget for the mean difference of log-probabilities in bfloat16."""


class Memory:
    """Samples the memory that the first GPU has in use, every 200 ms, in GiB."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.used: list[float] = []
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0", "--loop-ms=200"]
        with subprocess.Popen(query, stdout=subprocess.PIPE, text=True) as asked:
            for line in asked.stdout or ():
                self.times.append(time.time())
                self.used.append(float(line) / 1024)

    def between(self, start: float, end: float) -> list[float]:
        first, last = bisect.bisect_left(self.times, start), bisect.bisect_right(self.times, end)
        return self.used[first:last]


def run(folder: pathlib.Path, name: str, words: list[str], memory: Memory) -> dict[str, float]:
    """One run; what was seen of it."""
    path = folder / name
    more = ["--num-rollout", str(ROLLOUTS), "--save-interval", "100", *words]
    if code := common.train(path, "--profile", "gpu-synthetic", *more):
        sys.exit(code)
    spans = sorted(spans_of(path), key=lambda span: span.ts)
    for kind in HANDED_OVER:
        if found := [span for span in spans if span.name == kind]:
            common.say(
                "hand-over",
                run=name,
                part=kind,
                seconds=[span.end - span.ts for span in found],
                gib=[span.args["bytes"] / 2**30 for span in found if "bytes" in span.args],
                held_gib=[span.args["held_bytes"] / 2**30 for span in found if "held_bytes" in span.args],
            )
    used = {}
    for span_name, phase in PHASES.items():
        windows = [(s.ts, s.end) for s in spans if s.name == span_name and s.process == "conductor"]
        if seen := [x for window in windows for x in memory.between(*window)]:
            used[phase] = {"most": max(seen), "median": statistics.median(seen), "least": min(seen)}
    common.say("memory by nvidia-smi, GiB", run=name, **used)
    command = common.slime("profile", "memory", str(path), "--json")
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    common.say("memory predicted and measured, bytes", run=name, **json.loads(told.stdout))
    summary = json.loads((path / "summary.json").read_text())
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    parts = common.steps(path, lines[-1]["phase"], range(1, ROLLOUTS))
    gap = max(line["train/train_rollout_logprob_abs_diff"] for line in lines)
    common.say("step", run=name, **parts)
    common.say("agreement", run=name, verified=summary["engines_verified"], mean=gap)
    held = [s.args["held_bytes"] / 2**30 for s in spans if s.name == "offload" and "weights" in s.args.get("parts", ())]
    return {
        "gap": gap,
        "verified": float(bool(summary["engines_verified"])),
        "generate": parts["wait_for_batch"],
        "step": parts["step"],
        "trainer_left_gib": max(held, default=float("nan")),
        "generate_gib": used["generate"]["most"],
    }


def main() -> int:
    folder = pathlib.Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    memory = Memory()
    found = {name: run(folder, name, words, memory) for name, words in RUNS.items()}
    offload, shared = found["offload"], found["shared"]
    held = {
        "verified": bool(offload["verified"]),
        "log-probabilities": offload["gap"] <= GAP,
        "trainer_gives_back": offload["trainer_left_gib"] <= LEFT,
    }
    ratio = offload["step"] / shared["step"]
    common.say("result", machine=common.machine(), held=held, step_by_shared=ratio, **offload)
    return 0 if all(held.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
