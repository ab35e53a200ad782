"""Runs every benchmark, prints the table, writes ``runs/bench.json``."""

import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile

from slime_cli import manifests
from slime_cli.hardware import device as hardware
from slime_cli.loop.attempts import versions
from slime_cli.screen import Screen


def main() -> None:
    screen = Screen()
    rows = []
    device = hardware.find()
    setup = {
        "device": device.name,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "load": os.getloadavg()[0],
        **versions(),
    }

    def row(name: str, value: float, unit: str, budget: str, holds: bool, **more) -> None:
        rows.append(
            {
                "name": name,
                "value": float(f"{value:.4g}"),
                "unit": unit,
                "budget": budget,
                "holds": bool(holds),
                "setup": setup | more,
            }
        )
        screen.say(f"{name}: {value:.4g} {unit}  (budget {budget})  {'holds' if holds else 'FALLS SHORT'}")

    from bench import light

    seconds = light.command_seconds("--help")
    row("slime --help", seconds, "s", "<= 0.5", seconds <= 0.5)
    seconds = light.command_seconds("train", "--profile", "quickstart", "--dry-run")
    row("slime train --dry-run", seconds, "s", "<= 0.5", seconds <= 0.5)
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        rate = light.journal_rate(folder / "journal")
        row("journal: lease, generated, finish, batch, commit", rate, "samples/s", ">= 20000", rate >= 20000)
        from slime_cli.models import tiny

        model = str(tiny.make("tiny:qwen3", folder / "model"))
        dd = light.disk_rate(folder)
        published = light.publish_rate(folder, model)
        row("disk publish / dd", published / dd, "ratio", ">= 0.80", published / dd >= 0.8, dd=dd, published=published)
        step = json.loads(
            subprocess.run(
                [sys.executable, "-m", "bench.step", model], check=True, capture_output=True, text=True
            ).stdout.splitlines()[-1]
        )
        row(
            "trainer step / bare Megatron loop",
            step["step"],
            "ratio",
            "<= 1.05",
            step["step"] <= 1.05,
            seconds=step["seconds"],
        )
        memory = json.loads(
            subprocess.run(
                [sys.executable, "-m", "bench.heads"], check=True, capture_output=True, text=True
            ).stdout.splitlines()[-1]
        )
        name = "peak memory of the log-probability path / one float32 copy of its logits"
        row(name, memory["chunked"], "ratio", "<= 1", memory["chunked"] <= 1, **memory)
        row("tracing on / off, step time, every span on", step["trace"], "ratio", "<= 1.02", step["trace"] <= 1.02)
        from bench import rollout

        found = rollout.ratio(model, folder / "serve", screen.say)
        row(
            "rollout stage / straight to the engine",
            found["ratio"],
            "ratio",
            ">= 0.95",
            found["ratio"] >= 0.95,
            tokens_per_second=found,
        )
    quickstart = pathlib.Path("runs/quickstart/summary.json")
    if quickstart.exists():
        worst = json.loads(quickstart.read_text())["logprob_abs_diff_max"]
        row("trainer against engine log-probabilities (runs/quickstart)", worst, "nats", "<= 1e-4", worst <= 1e-4)
    manifests.write_json("runs/bench.json", rows)
    screen.say("written to runs/bench.json")


if __name__ == "__main__":
    main()
