"""``slime trace RUN``: what a run did, from what it left on disk. Works on live, unfinished and dead runs. The command
adds where the time went (:mod:`slime_cli.profiling.step`).

Whatever is missing (no rollout finished yet, tracing off) is left out of the summary; only a folder that is no run
directory is an error.
"""

import dataclasses
import json
import math
import os
import pathlib
import time
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from slime_cli.errors import DataError
from slime_cli.manifests import Endpoint, Run, layout, read
from slime_cli.tracing import ledger as ledgers
from slime_cli.tracing.reading import metrics_of, phase_folders

_BARS = "▁▂▃▄▅▆▇█"
_ENGINES = ("megatron-core", "sglang", "sglang-router", "torch")


@dataclasses.dataclass(frozen=True, slots=True)
class PhaseSummary:
    """One phase's rollouts."""

    name: str
    rollouts: int
    steps: int
    """Optimizer steps; a rollout may take several."""
    seconds: float
    weight_version: str | None
    rewards: tuple[float | None, ...]
    """Mean reward of each rollout; None where it has none that is finite."""


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """A run at a glance."""

    run_dir: str
    state: str
    attempt: int
    created: float
    engines: dict[str, str]
    """Name -> version, as the run recorded them."""
    endpoint: str | None
    phases: tuple[PhaseSummary, ...]
    ledger: str | None
    """The sum as a sentence; None before the first rollout."""
    balanced: bool
    outcome: dict[str, Any]
    """``summary.json``; {} without one."""


def summarize(run_dir: str | os.PathLike[str]) -> Summary:
    """Raises DataError when ``run_dir`` is no run directory or ``run.json`` is damaged."""
    run_dir = pathlib.Path(run_dir)
    folders = phase_folders(run_dir)
    if not (run_dir / layout.RUN).exists():
        has = ", ".join(sorted(path.name for path in run_dir.iterdir()))
        raise DataError(f"{run_dir}: run.json is missing (there: {has})", "give the folder that `slime train` wrote")
    run = read(run_dir / layout.RUN, Run)
    journals = {name: path for name, path in folders.items() if (path / layout.JOURNAL).exists()}
    parts = ledgers.ledgers(run_dir) if journals else {}
    outcome = _outcome(run_dir / layout.SUMMARY)
    return Summary(
        run_dir=str(run_dir),
        state="finished" if outcome else "not finished (no summary.json)",
        attempt=run.attempt,
        created=run.created,
        engines={name: run.versions[name] for name in _ENGINES if name in run.versions},
        endpoint=_endpoint(folders.values()),
        phases=tuple(_phase(name, lines) for name, lines in metrics_of(run_dir).items()),
        ledger=ledgers.sentence(ledgers.total(parts), ledgers.balanced(parts)) if parts else None,
        balanced=ledgers.balanced(parts),
        outcome=outcome,
    )


def _outcome(path: pathlib.Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path}: not JSON ({error})", "the file is damaged; delete it to see the rest") from None
    return value if isinstance(value, dict) else {"summary": value}


def _endpoint(folders: Iterable[pathlib.Path]) -> str | None:
    for folder in folders:
        if (folder / layout.ENDPOINT).exists():
            end = read(folder / layout.ENDPOINT, Endpoint)
            return f"{end.engine_name} {end.engine_version} x {len(end.engines)} behind {end.router_url}"
    return None


def _phase(name: str, lines: Sequence[dict[str, Any]]) -> PhaseSummary:
    steps = [line["step"] for line in lines if isinstance(line.get("step"), int)]
    last = lines[-1].get("weight_version") if lines else None
    return PhaseSummary(
        name=name,
        rollouts=len(lines),
        steps=max(steps, default=0),
        seconds=sum(finite(line.get("seconds")) or 0.0 for line in lines),
        weight_version=None if last is None else str(last),
        rewards=tuple(finite(line.get("reward_mean")) for line in lines),
    )


def finite(value: object) -> float | None:
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return None


def sparkline(values: Sequence[float | None], width: int = 40) -> str:
    """One character a value, or a mean of neighbours when there are more than ``width``; a space for no value."""
    if len(values) > width:
        cuts = [round(i * len(values) / width) for i in range(width + 1)]
        values = [_mean(values[a:b]) for a, b in zip(cuts, cuts[1:], strict=False)]
    known = [value for value in values if value is not None]
    if not known:
        return ""
    low = min(known)
    span = max(known) - min(known)
    scale = (len(_BARS) - 1) / span if span else 0.0
    return "".join(" " if v is None else _BARS[round((v - low) * scale)] for v in values)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def reward_line(rewards: Sequence[float | None]) -> str:
    """``0.250 -> 0.900 ▁▃▅█``; of one rollout its number alone."""
    known = [reward for reward in rewards if reward is not None]
    if len(known) < 2:
        return f"{known[0]:.3f}" if known else "-"
    return f"{known[0]:.3f} -> {known[-1]:.3f}  {sparkline(rewards)}"


def render(summary: Summary) -> RenderableType:
    head = Table(show_header=False, box=None, pad_edge=False)
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(summary.created))
    cells = {
        "run": summary.run_dir,
        "state": f"{summary.state}; started {started}, attempt {summary.attempt}",
        "engines": ", ".join(f"{name} {version}" for name, version in summary.engines.items()),
        "endpoint": summary.endpoint,
        "samples": summary.ledger or "none dispatched yet",
        **{name: value for name, value in summary.outcome.items() if isinstance(value, str | int | float)},
    }
    for name, value in cells.items():
        if value not in (None, ""):
            bad = name == "samples" and summary.ledger and not summary.balanced
            head.add_row(Text(name, "bold"), Text(str(value), "bold red" if bad else ""))
    parts: list[RenderableType] = [head]
    if summary.phases:
        parts.append(_phase_table(summary.phases))
    return Group(*parts)


def _phase_table(phases: Sequence[PhaseSummary]) -> Table:
    table = Table("phase", "rollouts", "steps", "seconds", "weights", "reward")
    for phase in phases:
        numbers = (str(phase.rollouts), str(phase.steps), f"{phase.seconds:.1f}", phase.weight_version or "-")
        table.add_row(phase.name or "run", *numbers, Text(reward_line(phase.rewards)))
    return table
