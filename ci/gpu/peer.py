"""Seconds of a rollout, slime's and TRL's GRPOTrainer's, on one GPU: the first rollouts of profile gpu-smollm2.

Usage: python -m ci.gpu.peer FOLDER [--trl PATH]    (a new folder; about 5 minutes on an H200)

``--trl``: a folder that holds TRL (``pip install --no-deps --target PATH trl==1.16.0``), unless it is installed. Both
sides begin with the same weights and go through the same prompts with as many samples, tokens and optimizer steps, in
bfloat16. slime runs as the profile says, with ``--offload`` and weights by ipc. TRL generates with transformers, once
plainly and once with its continuous batching: vLLM does not install beside slime's SGLang. Prints JSON lines; the
faster of the two counts.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys

import yaml

from bench.peers import job_of
from ci.gpu import common
from slime_cli import profiles

ROLLOUTS = 7
WARM_UP = 2
"""Rollouts of each side that are not counted."""
WORDS = ["--offload", "--update-weight-transport", "ipc", "--skip-eval-before-train", "--save-interval", "1000"]


def ours(folder: pathlib.Path, model: pathlib.Path) -> list[float]:
    run = folder / "slime"
    words = ["--profile", "gpu-smollm2", "--hf-checkpoint", str(model), "--num-rollout", str(ROLLOUTS), *WORDS]
    if code := common.train(run, *words):
        sys.exit(code)
    lines = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["seconds"] for line in lines]


def theirs(folder: pathlib.Path, model: pathlib.Path, trl: str, batching: bool) -> list[float]:
    """Empty where it fails; the reason is printed."""
    profile = yaml.safe_load((pathlib.Path(profiles.__file__).parent / "runs/gpu-smollm2.yaml").read_text())
    options = profile["slime"]
    job = job_of(options, profile["megatron"]["lr"], str(model))
    more = {"rollouts": ROLLOUTS, "gpu": True, "last_number": True, "continuous_batching": batching}
    path = folder / f"job-{batching}.json"
    path.write_text(json.dumps(job | more))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([trl, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "bench.peer_trl", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200, check=False)
    except subprocess.TimeoutExpired:
        common.say("trl", continuous_batching=batching, failed="no end after 200 s")
        return []
    if done.returncode:
        common.say("trl", continuous_batching=batching, failed=done.stderr[-1500:])
        return []
    found = json.loads(done.stdout.splitlines()[-1])
    common.say("trl", continuous_batching=batching, **found)
    return found["seconds"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--trl", default="")
    args = parser.parse_args()
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    model = folder / "model"
    subprocess.run([sys.executable, pathlib.Path(__file__).parent / "smollm2_model.py", str(model)], check=True)
    peers = [theirs(folder, model, args.trl, batching) for batching in (False, True)]
    medians = [statistics.median(seconds[WARM_UP:]) for seconds in peers if seconds]
    mine = statistics.median(ours(folder, model)[WARM_UP:])
    if not medians:
        return 1
    common.say("result", machine=common.machine(), slime_s=mine, trl_s=min(medians), trl_by_slime=min(medians) / mine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
