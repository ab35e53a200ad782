"""The whole loop on several GPUs: once colocated, once with GPUs of their own for trainer and engines.

``python -m ci.gpu.loops FOLDER [--devices N] [--small]`` (a new folder). *colocated*: N trainer ranks and engines of
four tensor-parallel ranks take turns on N devices (``--offload``), weights go by CUDA IPC. *disaggregated*: half of the
devices each, weights go by NCCL. Prints JSON lines: rollouts, the step's parts, ``sync`` (GB/s into the engine,
flushing its cache included), agreement of both sides' log-probabilities. Ends with exit code 1 where a
bound does not hold. ``--small`` is for trying it out, on a CPU as well, without ``--offload``.
"""

import argparse
import json
import pathlib
import statistics
import sys
from typing import Any

from ci.gpu import common, engines

ROLLOUTS = 3
WIDEST = 4
"""Tensor-parallel ranks of an engine."""
GAP = {False: 0.02, True: 1e-4}
"""Mean difference of log-probabilities, by ``--small``: bfloat16 on a GPU, float32 on a CPU."""
SMALL = (
    "--num-rollout 3 --rollout-batch-size 4 --n-samples-per-prompt 4 --rollout-max-response-len 6"
    " --rollout-max-prompt-len 32 --max-tokens-per-gpu 512"
).split()


def ways(devices: int, small: bool) -> dict[str, list[str]]:
    """Options of each run."""

    def placed(trainer: int, engines: int, tensor: int) -> list[str]:
        words = ["--actor-num-gpus-per-node", str(trainer), "--rollout-num-gpus", str(engines)]
        words += ["--rollout-num-gpus-per-engine", str(min(engines, WIDEST)), "--use-distributed-optimizer"]
        return words + ["--tensor-model-parallel-size", str(tensor), *(["--sequence-parallel"] if tensor > 1 else [])]

    half = devices // 2
    turns = [] if small else ["--offload", "--sglang-mem-fraction-static", "0.7"]
    return {
        "colocated": [*placed(devices, devices, 2), "--update-weight-transport", "ipc", *turns],
        "disaggregated": [*placed(half, half, min(half, 2)), "--colocate=false", "--update-weight-transport", "nccl"],
    }


def run(folder: pathlib.Path, name: str, words: list[str], small: bool) -> bool:
    """One run; whether it ended well and its bounds hold."""
    path = folder / name
    model = f"{engines.SMALL}&num_key_value_heads=4" if small else engines.MODEL
    words = ["--hf-checkpoint", model, *words, "--save-interval", "100"]
    words += ["--entropy-coef", "0.01"]  # a random model earns no reward, and its weights are to change
    words += SMALL if small else ["--num-rollout", str(ROLLOUTS)]
    if common.train(path, "--profile", "gpu-synthetic", *words):
        return False
    summary = json.loads((path / "summary.json").read_text())
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    parts: dict[str, Any] = common.steps(path, lines[-1]["phase"], range(1, ROLLOUTS))
    common.say("step", run=name, **parts)
    seconds = common.spans(path, "sync")
    size = sum(file.stat().st_size for file in (path / "model").glob("*.safetensors"))
    common.say("sync", run=name, seconds=seconds, gb=size / 1e9, gb_s=size / statistics.median(seconds[1:]) / 1e9)
    gap = max(line["train/train_rollout_logprob_abs_diff"] for line in lines)
    held = bool(summary["engines_verified"]) and gap <= GAP[small]
    common.say("agreement", run=name, verified=summary["engines_verified"], mean=gap, held=held)
    return held


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--devices", type=int, help="2, 4 or 8; as many as there are GPUs")
    parser.add_argument("--small", action="store_true", help="a small model and few requests")
    args = parser.parse_args()
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    held = {}
    for name, words in ways(args.devices or common.gpus() or 2, args.small).items():
        held[name] = run(folder, name, words, args.small)
    common.say("result", held=held)
    return 0 if all(held.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
