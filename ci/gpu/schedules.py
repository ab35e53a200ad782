"""The schedules on two GPUs: an engine on the first, the trainer on the second, weights by nccl.

``python -m ci.gpu.schedules FOLDER [--small]`` (a new folder; about 6 minutes on two H200s) serves the model of profile
gpu-synthetic once and trains on its answers of mixed lengths under each schedule. Prints JSON lines: rollouts, and for
each schedule ``schedule``: median seconds of a rollout, the share of it that trainer and engine were idle, staleness,
and the seconds over those of ``sync``. Ends with exit code 1 where a run fails or is not proven. ``--small`` is for
trying it out, on a CPU as well.
"""

import argparse
import json
import os
import pathlib
import statistics
import sys
from typing import Any

from bench.syncs import serving
from ci.gpu import common, engines, shapes, synthetic

SCHEDULES = {
    "sync": [],
    "one-step-off": ["--schedule", "one-step-off", "--use-tis"],
    "async": ["--schedule", "async", "--max-staleness", "2", "--use-tis"],
}
ROLLOUTS = 8
"""The first two warm up, and the last has nothing to generate beside it."""
FEW = (
    "--rollout-batch-size 8 --n-samples-per-prompt 4 --rollout-max-response-len 48 --rollout-max-prompt-len 64"
    " --max-tokens-per-gpu 512 --rollout-stop-token-ids 65 66 67 68 69 70 71 72"
).split()
MIXED = ["--rollout-max-response-len", "4096", "--rollout-stop-token-ids", *synthetic.STOPS]


def run(folder: pathlib.Path, name: str, model: pathlib.Path, small: bool) -> dict[str, Any] | None:
    """Trains under one schedule; seconds, idle shares and staleness of its rollouts, or None if the run failed."""
    path = folder / name
    words = ["--profile", "gpu-synthetic", "--hf-checkpoint", str(model), "--save-interval", "100"]
    words += ["--rollout-endpoint", str(folder / "serve" / "endpoint.json"), "--colocate=false"]
    words += ["--update-weight-transport", "nccl", "--num-rollout", str(ROLLOUTS), *SCHEDULES[name]]
    if common.train(path, *words, *(FEW if small else MIXED)):
        return None
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()][2:-1]
    seconds = sum(line["seconds"] for line in lines)
    return {
        "seconds": statistics.median(line["seconds"] for line in lines),
        "trainer_idle": sum(line["trainer_idle"] for line in lines) / seconds,
        "rollout_idle": sum(line["rollout_idle"] for line in lines) / seconds,
        "staleness_mean": statistics.mean(line["staleness_mean"] for line in lines),
        "engines_verified": json.loads((path / "summary.json").read_text())["engines_verified"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--small", action="store_true", help="a small model and short answers")
    args = parser.parse_args()
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    held = True
    base = 0.0
    with serving(folder, engines.SMALL if args.small else shapes.tiny(shapes.QWEN3_06B)) as (_, model):
        if common.gpus() > 1:
            os.environ["CUDA_VISIBLE_DEVICES"] = "1"  # the engine has the first
        for name in SCHEDULES:
            found = run(folder, name, model, args.small)
            held = held and found is not None and found["engines_verified"] is True
            if found is not None:
                base = base or found["seconds"]
                common.say("schedule", schedule=name, over_sync=found["seconds"] / base, **found)
    common.say("result", held=held)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
