"""GRPO of SmolLM2-135M-Instruct on one GPU: profile gpu-smollm2 from start to end, held-out reward before and after.

Usage: python ci/gpu/smollm2.py FOLDER    (a new folder; about 5 minutes on an H200)

Further words go to ``slime train``. smollm2_model.py says which packages the model comes from.
"""

import json
import pathlib
import subprocess
import sys

import common

AFTER = 0.6
"""Held-out reward that the run must reach, from about 0.2."""
MEAN_DIFFERENCE = 0.02
"""DESIGN's budget for bfloat16: log-probabilities of trainer and engine."""


def main() -> int:
    folder = pathlib.Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    model, run = folder / "model", folder / "smollm2"
    subprocess.run([sys.executable, pathlib.Path(__file__).parent / "smollm2_model.py", str(model)], check=True)
    memory = common.Memory()
    code = common.train(run, "--profile", "gpu-smollm2", "--hf-checkpoint", str(model), *sys.argv[2:])
    if code:
        return code
    summary = json.loads((run / "summary.json").read_text())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    mean = max(line["train/train_rollout_logprob_abs_diff"] for line in lines)
    phase = lines[-1]["phase"]
    parts = common.steps(run, phase, range(2, len(lines)))
    common.say("step", machine=common.machine(), **parts)
    common.say("checkpoints", blocking=common.spans(run, "save_checkpoint"), all=len(common.spans(run, "save")))
    common.say(
        "result",
        reward_before=summary["reward_before"],
        reward_after=summary["reward_after"],
        logprob_diff_mean=mean,
        logprob_diff_max=summary["logprob_abs_diff_max"],
        engines_verified=summary["engines_verified"],
        peak_gib=memory.peak(),
        rollouts=len(lines),
        seconds=summary["seconds"],
    )
    held = summary["reward_after"] >= AFTER and mean <= MEAN_DIFFERENCE and summary["engines_verified"] is True
    common.say("held", held=held)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
