"""Throughput of a random 0.6B Qwen3 on one GPU (profile gpu-synthetic): answers of one length, then of mixed lengths.

Usage: python -m ci.gpu.synthetic FOLDER    (a new folder; about 6 minutes on an H200)

Further words go to ``slime train``; with ``--equal`` before them there is no run of mixed lengths.
Both runs use one endpoint. The same load goes straight to the engine before, for the share of its speed that a rollout
has.
"""

import json
import pathlib
import random
import statistics
import sys
import time
from typing import Any

from bench.syncs import serving
from ci.gpu import common, shapes

MODEL = shapes.tiny(shapes.QWEN3_06B)
STOPS = [str(token) for token in range(1000, 151_000, 500)]
"""Ending on one of these 300 tokens of 151,936, answers of a model with random weights have geometric lengths."""
ENGINE = ["--sglang-mem-fraction-static", "0.3"]
ROLLOUTS = 8
"""Rollouts of a run. The first warms up, the fifth and the last end with a checkpoint."""
SAMPLES = 256
LENGTH = 512
PARAMETERS = 0.596e9
SHARE = 0.95
"""DESIGN's budget: tokens a second of a rollout ÷ the same load straight at the engine."""


def run(folder: pathlib.Path, name: str, endpoint: str, words: list[str], rollouts: int) -> dict[str, Any]:
    """One run of the profile; what its rollouts after the first took."""
    path = folder / name
    model = str(folder / "serve" / "model")
    words = ["--profile", "gpu-synthetic", "--hf-checkpoint", model, "--rollout-endpoint", endpoint, *words]
    if code := common.train(path, *words, "--num-rollout", str(rollouts)):
        sys.exit(code)
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    phase = lines[-1]["phase"]
    later = range(1, rollouts)
    parts = common.steps(path, phase, later)
    by_rollout = [common.steps(path, phase, [rollout]) for rollout in later]  # those with a checkpoint take longer
    counted = [common.samples(path, phase, rollout) for rollout in later]
    trained = statistics.median(sum(tokens) for tokens, _ in counted)
    answered = statistics.median(sum(answers) for _, answers in counted)
    peak = next((flops for gpu, flops in common.PEAK.items() if common.machine().startswith(gpu)), float("nan"))
    generate = parts["wait_for_batch"]
    found: dict[str, Any] = {
        "generate_tokens_per_s": answered / generate,
        "train_tokens_per_s": trained / parts["train"],
        "mfu": 6 * PARAMETERS * trained / parts["train"] / peak,
        "mfu_forward_backward": 6 * PARAMETERS * trained / parts["train: forward_backward"] / peak
        if "train: forward_backward" in parts
        else float("nan"),
        "other_shares": [1 - working(each) / each["step"] for each in by_rollout],
        "other_share": 1 - sum(map(working, by_rollout)) / sum(each["step"] for each in by_rollout),
    }
    longest = max(length for tokens, _ in counted for length in tokens)
    common.say("step", run=name, samples=len(counted[0][0]), longest=longest, trained_tokens=trained, **parts)
    common.say("throughput", run=name, machine=common.machine(), **found)
    common.say(
        "checkpoints",
        run=name,
        blocking=common.spans(path, "save_checkpoint"),
        waited=common.spans(path, "wait_for_checkpoint"),
    )
    summary = json.loads((path / "summary.json").read_text())
    common.say(
        "log-probabilities",
        run=name,
        max=summary["logprob_abs_diff_max"],
        mean=max(line["train/train_rollout_logprob_abs_diff"] for line in lines),
        engines_verified=summary["engines_verified"],
    )
    return found


def working(parts: dict[str, float]) -> float:
    """Seconds of generation and training."""
    return parts["wait_for_batch"] + parts["train"]


def main() -> int:
    folder = pathlib.Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    words = sys.argv[2:]
    equal_alone = words[:1] == ["--equal"]
    words = words[equal_alone:]
    memory = common.Memory()
    started = time.monotonic()
    with serving(folder, MODEL, ENGINE) as (url, _):
        common.say("serve-rollout", seconds=time.monotonic() - started)
        draw = random.Random(0)
        prompts = [[draw.randrange(1000, 150_000) for _ in range(40)] for _ in range(SAMPLES)]
        first = common.straight(url, prompts, LENGTH)  # compiles kernels
        speed = common.straight(url, prompts, LENGTH)
        load = {"requests": SAMPLES, "tokens": LENGTH}
        common.say("straight", tokens_per_s=speed, first=first, **load, peak_gib=memory.peak())
        where = str(folder / "serve" / "endpoint.json")
        equal = run(folder, "equal", where, words, ROLLOUTS)
        common.say("memory", run="equal", peak_gib=memory.peak())
        if not equal_alone:
            mixed = [*words, "--rollout-max-response-len", "4096", "--rollout-stop-token-ids", *STOPS]
            run(folder, "mixed", where, mixed, ROLLOUTS)
            common.say("memory", run="mixed", peak_gib=memory.peak())
    share = equal["generate_tokens_per_s"] / speed
    common.say("result", rollout_by_straight=share, held=share >= SHARE)
    return 0 if share >= SHARE else 1


if __name__ == "__main__":
    sys.exit(main())
