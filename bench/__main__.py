"""Runs every benchmark, prints the table, writes ``runs/bench.json``."""

import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
from typing import Any

from slime_cli import manifests
from slime_cli.hardware import device as hardware
from slime_cli.loop.attempts import versions
from slime_cli.screen import Screen

TARGET = "runs/bench.json"
QUICKSTART = pathlib.Path("runs/quickstart/summary.json")


class Table:
    """The rows so far; each says on what it was measured."""

    def __init__(self) -> None:
        self.screen = Screen()
        self.rows: list[dict[str, Any]] = []
        device = hardware.find()
        self.setup: dict[str, Any] = {
            "device": device.name,
            "cores": os.cpu_count(),
            "machine": platform.machine(),
            "load": os.getloadavg()[0],
            **versions(),
        }

    def at_most(self, name: str, value: float, unit: str, bound: float, **more: Any) -> None:
        self._add(name, value, unit, f"<= {bound:g}", value <= bound, more)

    def at_least(self, name: str, value: float, unit: str, bound: float, **more: Any) -> None:
        self._add(name, value, unit, f">= {bound:g}", value >= bound, more)

    def shown(self, name: str, value: float, unit: str, **more: Any) -> None:
        """A row without a budget: what it costs, whichever way that turns out."""
        value = float(f"{value:.4g}")
        setup = self.setup | more
        self.rows.append({"name": name, "value": value, "unit": unit, "budget": None, "holds": None, "setup": setup})
        self.screen.say(f"{name}: {value:.4g} {unit}")

    def _add(self, name: str, value: float, unit: str, budget: str, holds: bool, more: dict[str, Any]) -> None:
        setup = self.setup | more
        value = float(f"{value:.4g}")
        self.rows.append({"name": name, "value": value, "unit": unit, "budget": budget, "holds": holds, "setup": setup})
        self.screen.say(f"{name}: {value:.4g} {unit}  (budget {budget})  {'holds' if holds else 'FALLS SHORT'}")


def main() -> None:
    table = Table()
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        from slime_cli.models import tiny

        model = str(tiny.make("tiny:qwen3", folder / "model"))
        without_engines(table, folder, model)
        versions_as_deltas(table, folder, model)
        ways_of_weights(table, folder)
        loops(table, folder, model)
        trainer(table, folder, model)
        engines(table, folder, model)
        peers(table, folder)
    if QUICKSTART.exists():
        worst = json.loads(QUICKSTART.read_text())["logprob_abs_diff_max"]
        table.at_most("trainer against engine log-probabilities (runs/quickstart)", worst, "nats", 1e-4)
    manifests.write_json(TARGET, table.rows)
    table.screen.say(f"written to {TARGET}")


def without_engines(table: Table, folder: pathlib.Path, model: str) -> None:
    from bench import light

    table.at_most("slime --help", light.command_seconds("--help"), "s", 0.5)
    seconds = light.command_seconds("train", "--profile", "quickstart", "--dry-run")
    table.at_most("slime train --dry-run", seconds, "s", 0.5)
    rate = statistics.median(light.journal_rate(folder / f"journal-{i}") for i in range(3))
    table.at_least("journal: lease, generated, finish, batch, commit", rate, "samples/s", 20000)
    table.at_least("graders: judged pairs in one worker", light.grader_rate(), "pairs/s", 100)
    dd = light.disk_rate(folder)
    published = light.publish_rate(folder, model)
    table.at_least("disk publish / dd", published / dd, "ratio", 0.8, dd=dd, published=published)


def versions_as_deltas(table: Table, folder: pathlib.Path, model: str) -> None:
    from bench import light, weights

    for encoding in ("xor", "overwrite"):
        root = folder / f"weights-{encoding}"
        root.mkdir()
        dd = light.disk_rate(root) / 1e6
        found = weights.deltas(root, model, encoding)
        for share, bound in (("0.1", 0.005), ("1", 0.03), ("10", 0.15)):
            row = found["shares"][share]
            name = f"delta ({encoding}), {share} % of a bf16 model's values changed"
            table.at_most(f"{name}: bytes / full version", row["bytes"], "ratio", bound)
            table.shown(f"{name}: MB of model written a second / dd", row["write_mb_s"] / dd, "ratio", dd=dd, **row)
            table.shown(
                f"{name}: seconds to write and apply / to write it whole", row["seconds"], "ratio", dd=dd, **row
            )


def ways_of_weights(table: Table, folder: pathlib.Path) -> None:
    found = _process("bench.syncs", str(folder / "syncs"))
    for way in ("ipc", "gloo"):
        table.shown(
            f"weights into an engine: MB a second by {way} / by disk", found[way] / found["disk"], "ratio", **found
        )


def loops(table: Table, folder: pathlib.Path, model: str) -> None:
    from bench import schedules

    found = schedules.ratios(model, folder / "schedules")
    for schedule in ("one-step-off", "async"):
        name = f"{schedule} / sync, generation as long as training"
        table.at_least(name, found[schedule]["ratio"], "ratio", 1.7, schedules=found)


def trainer(table: Table, folder: pathlib.Path, model: str) -> None:
    from bench import light

    step = _process("bench.step", model)
    table.at_most("trainer step / bare Megatron loop", step["step"], "ratio", 1.05, seconds=step["seconds"])
    memory = _process("bench.heads")
    name = "peak memory of the log-probability path / one float32 copy of its logits"
    table.at_most(name, memory["chunked"], "ratio", 1, **memory)
    name = "tracing on / off, step time, every span on"
    cost = light.span_microseconds(folder)
    table.at_most(name, step["trace"], "ratio", 1.02, seconds=step["seconds"], microseconds_a_span=cost)


def engines(table: Table, folder: pathlib.Path, model: str) -> None:
    from bench import rollout

    stage, partial = rollout.measured(model, folder / "serve", table.screen.say)
    name = "rollout stage / straight to the engine"
    table.at_least(name, stage["ratio"], "ratio", 0.95, tokens_per_second=stage)
    name = "partial rollouts on / off, tokens/s of batches of one size, lengths with a long tail"
    table.at_least(name, partial["ratio"], "ratio", 1, tokens_per_second=partial)


def peers(table: Table, folder: pathlib.Path) -> None:
    from bench import peers

    found = peers.trl_rollout(folder / "peers", table.screen.say)
    if missing := found.get("missing"):
        table.screen.say(f"seconds of a quickstart rollout / TRL's GRPOTrainer: NOT MEASURED, {missing}")
        return
    table.at_most("seconds of a quickstart rollout / TRL's GRPOTrainer", found["ratio"], "ratio", 1, **found)


def _process(module: str, *arguments: str) -> dict[str, Any]:
    """The last line of a benchmark that runs in a process of its own."""
    command = [sys.executable, "-m", module, *arguments]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
