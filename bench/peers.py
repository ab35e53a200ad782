"""Seconds of a quickstart rollout, slime's against those of TRL's GRPOTrainer: the same weights, prompts, batch and
optimizer steps, on the same cores, one after the other.

Both begin with the weights that the quickstart's supervised phase ends with. TRL is not among slime's requirements: its
wheel alone is installed into a folder of its own, beside the transformers, datasets and accelerate that slime has.
Neither side saves checkpoints or evaluates in what is counted.
"""

import copy
import json
import os
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import yaml

from slime_cli import profiles
from slime_cli.buffer.sources.open import open_source
from slime_cli.rollout.chat import Renderer, RenderOptions

TRL = "trl==1.16.0"
HOME = pathlib.Path("runs/bench-peers")
ROLLOUTS = 16
WARM_UP = 4
"""Rollouts of each side that are not counted."""


def trl_rollout(folder: pathlib.Path, say: Callable[[str], None]) -> dict[str, Any]:
    """``ratio`` of the medians, and each side's seconds; ``missing``, the reason, where TRL could not be installed."""
    folder.mkdir(parents=True, exist_ok=True)
    if missing := installed(say):
        return {"missing": missing}
    profile = yaml.safe_load((pathlib.Path(profiles.__file__).parent / "runs/quickstart.yaml").read_text())
    phase = profile["phases"][1]
    say("bench: the quickstart's supervised phase, then rollouts of slime")
    ours = _slime(profile, folder)
    model = folder / "hf"
    _run("-m", "slime_cli", "convert", "dist-to-hf", "--load", f"{folder}/ours/sft/checkpoints", "--save", str(model))
    job = folder / "job.json"
    job.write_text(json.dumps(job_of(profile["slime"] | phase["slime"], phase["megatron"]["lr"], str(model))))
    say("bench: rollouts of TRL")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HOME.resolve()), os.environ.get("PYTHONPATH", "")])}
    theirs = json.loads(_run("-m", "bench.peer_trl", str(job), env=environment).splitlines()[-1])
    seconds = {"slime": ours["seconds"][WARM_UP:], "trl": theirs["seconds"][WARM_UP:]}
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "ratio": medians["slime"] / medians["trl"],
        "seconds": medians,
        "reward": {"slime": ours["reward"][-1], "trl": theirs["reward"][-1]},
        "threads_of_trl": theirs["threads"],
    }


def installed(say: Callable[[str], None]) -> str:
    """Installs TRL where it is not yet; why that failed."""
    if (HOME / "trl").is_dir():
        return ""
    say(f"bench: installing {TRL} into {HOME}")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(HOME), TRL]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if made.returncode == 0 else f"{TRL} could not be installed: {made.stderr.strip()[-300:]}"


def _slime(profile: dict[str, Any], folder: pathlib.Path) -> dict[str, list[float]]:
    """Each rollout's seconds and reward."""
    profile = copy.deepcopy(profile)
    for phase in profile["phases"]:
        phase["slime"]["save_interval"] = 1000  # the end saves anyway
    grpo = profile["phases"][1]["slime"]
    grpo |= {"num_rollout": ROLLOUTS, "skip_eval_before_train": True, "n_samples_per_eval_prompt": 1}
    path = folder / "quickstart.yaml"
    path.write_text(yaml.safe_dump(profile))
    _run("-m", "slime_cli", "train", "--profile", str(path), "--run-dir", str(folder / "ours"))
    lines = [json.loads(text) for text in (folder / "ours" / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["phase"] == "grpo"]
    return {"seconds": [line["seconds"] for line in lines], "reward": [line["reward_mean"] for line in lines]}


def job_of(s: dict[str, Any], lr: float, model: str) -> dict[str, Any]:
    """The work of :mod:`bench.peer_trl` for a run with these options."""
    source = open_source(s["prompt_data"])
    renderer = Renderer(model, RenderOptions(apply_chat_template=True))
    rows = []
    for i in range(min(len(source), s["rollout_batch_size"] * ROLLOUTS)):
        rendered = renderer.prompt(source[i])
        assert rendered is not None, "no prompt of this source is too long"
        rows.append([renderer.tokenizer.decode(rendered.tokens), source[i].label])
    return {
        "model": model,
        "rollouts": ROLLOUTS,
        "temperature": 1.0,
        "tokens": s["rollout_max_response_len"],
        "prompts": s["rollout_batch_size"],
        "samples": s["n_samples_per_prompt"],
        "steps": s["num_steps_per_rollout"],
        "lr": lr,
        "rows": rows,
    }


def _run(*arguments: str, env: dict[str, str] | None = None) -> str:
    made = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=env, check=False)
    if made.returncode:
        raise RuntimeError(f"{' '.join(arguments)} ended with {made.returncode}: {made.stderr[-2000:]}")
    return made.stdout
