"""What a finished run leaves and shows: summary.json, a table, the reward as a plot in the terminal and as PNG."""

import importlib.metadata
import json
import pathlib

from slime_cli import manifests
from slime_cli.loop.phase import Stage
from slime_cli.tracing import ledger as ledgers
from slime_cli.tracing.reading import metrics_of
from slime_cli.weights import sync


def summarize(run_dir: pathlib.Path, stages: list[Stage], endpoint: manifests.Endpoint | None) -> dict:
    """The run's result as one flat object; written to ``summary.json``."""
    policy = next((s for s in reversed(stages) if s.policy), None)
    lines = metric_lines(run_dir)
    out: dict = {
        "reward_before": None,
        "reward_after": None,
        "steps": sum(s.step for s in stages),
        "steps_by_stage": {s.name: s.step for s in stages},
        "seconds": round(sum(s.journal.get("seconds", 0.0) for s in stages), 1),
        "trainer": {"name": "megatron-core", "version": importlib.metadata.version("megatron-core")},
        "rollout": None,
        "logprob_abs_diff_max": None,
        "weight_version": None,
        "engines_verified": None,
    }
    if policy is not None:
        found = policy.evaluations.found()
        if found and found[0]["results"]:
            out["reward_before"] = found[0]["results"][0]["reward_mean"]
            out["reward_after"] = found[-1]["results"][0]["reward_mean"]
            out["eval_prompts"] = found[-1]["results"][0]["prompts"]
        worst = [
            v["train/train_rollout_logprob_abs_diff_max"]
            for v in lines
            if "train/train_rollout_logprob_abs_diff_max" in v
        ]
        out["logprob_abs_diff_max"] = max(worst, default=None)
        out["weight_version"] = policy.version
        if endpoint is not None:
            out["rollout"] = {"name": endpoint.engine_name, "version": endpoint.engine_version}
        out["engines_verified"] = sync.verified(policy.proofs)
        out["verification"] = [
            {"engine": p.url, "version": p.version, "kind": p.kind, "tensors": p.tensors} for p in policy.proofs
        ]
    parts = ledgers.ledgers(run_dir)
    out["ledger"] = ledgers.as_json(parts)
    manifests.write_json(run_dir / "summary.json", out)
    return out


def metric_lines(run_dir: pathlib.Path) -> list[dict]:
    """One line a rollout, the last attempt's where a rollout was trained again."""
    return [line for lines in metrics_of(run_dir).values() for line in lines]


def show(console, run_dir: pathlib.Path, summary: dict) -> None:
    """Table, plot, and where everything is."""
    from rich.table import Table

    rewards = [line["reward_mean"] for line in metric_lines(run_dir) if "reward_mean" in line]
    if len(rewards) > 1:
        _plot_terminal(console, rewards)
        _plot_png(run_dir / "reward.png", rewards, summary)
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
        table.add_row(f"verified {proof['engine']}", sync.SHOWN[proof["kind"]])
    console.print(table)
    console.print(ledgers.sentence(ledgers.total(ledgers.ledgers(run_dir)), ledgers.balanced(ledgers.ledgers(run_dir))))
    console.print(f"run directory: {run_dir}   (slime trace {run_dir} · slime profile step {run_dir})", soft_wrap=True)


def _plot_terminal(console, rewards: list[float]) -> None:
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


def _plot_png(path: pathlib.Path, rewards: list[float], summary: dict) -> None:
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
