"""Writes and shows the result of a finished run: summary.json, a table, the reward as a plot in the terminal and as
PNG.

``slime train`` calls :func:`summarize` with what each phase came to, then :func:`show`; on a run that is finished
already only the latter.
"""

import dataclasses
import importlib.metadata
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from slime_cli import manifests
from slime_cli.manifests import layout
from slime_cli.manifests.proof import SHOWN, Proof, verified
from slime_cli.tracing import ledger as ledgers
from slime_cli.tracing.reading import metrics_of

_WORST = "train/train_rollout_logprob_abs_diff_max"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhaseResult:
    """The result of a finished phase, over all its attempts."""

    name: str
    policy: bool
    """It trained on generated samples, so that its weights were published to engines and evaluated."""
    steps: int
    """Optimizer steps that are committed."""
    seconds: float
    weight_version: str | None = None
    """The version that the engines hold; None in a phase without engines."""
    evaluations: Sequence[dict[str, Any]] = ()
    """The objects of ``eval/STEP.json``, by step."""
    proofs: Sequence[Proof] = ()
    """The proof of each engine for ``weight_version``."""


def summarize(
    run_dir: pathlib.Path, phases: Sequence[PhaseResult], endpoint: manifests.Endpoint | None
) -> dict[str, Any]:
    """The run's result as one flat object; written to ``summary.json``. What is told of engines is the last policy
    phase's."""
    out: dict[str, Any] = {
        "reward_before": None,
        "reward_after": None,
        "steps": sum(phase.steps for phase in phases),
        "steps_by_phase": {phase.name: phase.steps for phase in phases},
        "seconds": round(sum(phase.seconds for phase in phases), 1),
        "trainer": {"name": "megatron-core", "version": importlib.metadata.version("megatron-core")},
        "rollout": None,
        "logprob_abs_diff_max": None,
        "weight_version": None,
        "engines_verified": None,
    }
    policy = next((phase for phase in reversed(phases) if phase.policy), None)
    if policy is not None:
        out |= _rewards(policy.evaluations)
        out["logprob_abs_diff_max"] = max((v[_WORST] for v in metric_lines(run_dir) if _WORST in v), default=None)
        out["weight_version"] = policy.weight_version
        if endpoint is not None:
            out["rollout"] = {"name": endpoint.engine_name, "version": endpoint.engine_version}
        out["engines_verified"] = verified(policy.proofs)
        out["verification"] = [
            {"engine": p.url, "version": p.version, "kind": p.kind, "tensors": p.tensors} for p in policy.proofs
        ]
    out["ledger"] = ledgers.as_json(ledgers.ledgers(run_dir))
    manifests.write_json(run_dir / layout.SUMMARY, out)
    return out


def _rewards(evaluations: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The first data set's, before and after; {} without an evaluation."""
    if not evaluations or not evaluations[0]["results"]:
        return {}
    before = evaluations[0]["results"][0]
    after = evaluations[-1]["results"][0]
    return {
        "reward_before": before["reward_mean"],
        "reward_after": after["reward_mean"],
        "eval_prompts": after["prompts"],
    }


def metric_lines(run_dir: pathlib.Path) -> list[dict[str, Any]]:
    """One line a rollout, the last attempt's where a rollout was trained again."""
    return [line for lines in metrics_of(run_dir).values() for line in lines]


def show(console: Console, run_dir: pathlib.Path, summary: dict[str, Any]) -> None:
    """Table, plot, and where everything is."""
    from rich.table import Table

    rewards = [line["reward_mean"] for line in metric_lines(run_dir) if "reward_mean" in line]
    if len(rewards) > 1:
        _plot_terminal(console, rewards)
        _plot_png(run_dir / layout.REWARD_PLOT, rewards, summary)
    elif rewards:
        console.print(f"mean reward of the one rollout: {rewards[0]:.3f}")
    table = Table(title="run finished", show_header=False)
    for name, value in summary.items():
        if name in ("ledger", "verification") or value is None:
            continue
        if isinstance(value, dict):
            value = " ".join(str(v) for v in value.values()) if "version" in value else json.dumps(value)
        table.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
    for proof in summary.get("verification") or ():
        table.add_row(f"verified {proof['engine']}", SHOWN[proof["kind"]])
    console.print(table)
    parts = ledgers.ledgers(run_dir)
    console.print(ledgers.sentence(ledgers.total(parts), ledgers.balanced(parts)))
    console.print(f"run directory: {run_dir}   (slime trace {run_dir} · slime profile step {run_dir})", soft_wrap=True)


def _plot_terminal(console: Console, rewards: list[float]) -> None:
    import plotext
    from rich.text import Text

    plotext.clear_figure()
    plotext.plot_size(min(console.width, 90), 16)
    plotext.theme("clear")
    plotext.title("mean reward of the training samples")
    plotext.xlabel("rollout")
    plotext.ylim(0, max(1.0, max(rewards)))
    plotext.plot(list(range(1, len(rewards) + 1)), rewards, marker="braille")
    console.print(Text.from_ansi(plotext.build()), soft_wrap=True)  # its escape codes are for a terminal only


def _plot_png(path: pathlib.Path, rewards: list[float], summary: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=130)
    axes.plot(range(1, len(rewards) + 1), rewards, color="#2a6fbb", label="training samples")
    for name, x, colour in (("reward_before", 0, "#999999"), ("reward_after", len(rewards), "#2e8b57")):
        if summary.get(name) is not None:
            axes.plot(
                [x],
                [summary[name]],
                "o",
                color=colour,
                label=f"held out, {name.removeprefix('reward_')}: {summary[name]:.3f}",
            )
    axes.set(xlabel="rollout", ylabel="mean reward", title="Reward", ylim=(0, max(1.02, max(rewards))))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
