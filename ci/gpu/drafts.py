"""Speculative decoding with the layer that a run trains: engines draft with the policy's own MTP layer.

Usage: python ci/gpu/drafts.py FOLDER    (a new folder; about 4 minutes on an H200)

Three runs of drafts.yaml at once: weights over the disk, weights by ipc, and one that leaves the MTP layer untrained,
whose drafts are hardly ever accepted. JSON lines: ``rollout`` of each, ``drafts`` (acceptance by rollout,
log-probabilities, and whether every tensor of engines was proven, those that draft among them). Exit code 1 when a
trained layer's drafts are not accepted far more often than the untrained one's, or something is not proven.
"""

import concurrent.futures
import json
import pathlib
import sys
from typing import Any

import common

HERE = pathlib.Path(__file__).parent
ENGINE = [
    *("--sglang-speculative-algorithm", "EAGLE", "--sglang-speculative-num-steps", "2"),
    *("--sglang-speculative-eagle-topk", "1", "--sglang-speculative-num-draft-tokens", "3"),
    *("--sglang-mem-fraction-static", "0.15", "--sglang-max-total-tokens", "65536"),
]
RUNS = {
    "disk": ["--enable-mtp-training"],
    "ipc": ["--enable-mtp-training", "--update-weight-transport", "ipc"],
    "untrained": [],
}
TIMES = 2.0
"""Acceptance with a trained layer ÷ with an untrained one, at least."""


def run(folder: pathlib.Path, name: str) -> dict[str, Any]:
    path = folder / name
    words = ["--profile", str(HERE / "drafts.yaml"), *ENGINE, *RUNS[name], *sys.argv[2:]]
    if code := common.train(path, *words):
        return {"run": name, "exit_code": code}
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    drafted = [line for line in lines if "spec_accept_rate" in line]
    summary = json.loads((path / "summary.json").read_text())
    return {
        "run": name,
        "accept_rate": [line["spec_accept_rate"] for line in drafted],
        "accept_length": [line["spec_accept_length"] for line in drafted],
        "mtp_loss": [line["train/mtp_loss"] for line in lines if "train/mtp_loss" in line][-1:],
        "reward": [line["reward_mean"] for line in drafted],
        "logprob_diff_max": summary["logprob_abs_diff_max"],
        "engines_verified": summary["engines_verified"],
    }


def main() -> int:
    folder = pathlib.Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with concurrent.futures.ThreadPoolExecutor(len(RUNS)) as pool:
        found = dict(zip(RUNS, pool.map(lambda name: run(folder, name), RUNS), strict=True))
    for result in found.values():
        common.say("drafts", machine=common.machine(), **result)
    proven = all(found[name].get("engines_verified") is True for name in ("disk", "ipc"))  # others have no such layer
    if not proven or not all(result.get("accept_rate") for result in found.values()):
        common.say("held", held=False)
        return 1
    rate = {name: sum(result["accept_rate"]) / len(result["accept_rate"]) for name, result in found.items()}
    held = min(rate["disk"], rate["ipc"]) >= TIMES * rate["untrained"]
    common.say("held", held=held, accept_rate=rate)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
