"""The step budget as a table: ``slime profile step`` and ``slime trace`` show it."""

from rich.table import Table
from rich.text import Text

from slime_cli.profiling.step import Budget, Part
from slime_cli.tracing.names import TRAIN


def render(budget: Budget) -> Table:
    """Time by part of a rollout's step, ``train`` with its own parts below it, and how idle both sides were."""
    each = budget.seconds / max(1, budget.rollouts)
    title = f"{budget.rollouts} rollout{'s' * (budget.rollouts != 1)}, {budget.seconds:.2f} s, {each:.2f} s each"
    table = Table("part", "seconds", "share", "calls", title=title, title_justify="left")
    table.caption = _idle(budget)
    table.caption_justify = "left"
    for column in table.columns[1:]:
        column.justify = "right"

    def add(part: Part, name: str, style: str = "") -> None:
        table.add_row(Text(name), f"{part.seconds:.3f}", f"{part.share:.1f} %", str(part.calls or ""), style=style)

    for part in budget.parts:
        add(part, part.name)
        if part.name == TRAIN:
            for inner in budget.train:
                add(inner, f"  {inner.name.removeprefix('train: ')}", "dim")
    return table


def _idle(budget: Budget) -> str:
    lines = [f"trainer idle {100 * budget.trainer_idle_share:.1f} %: it waits for a batch"]
    if budget.rollout_idle_share is not None:
        lines.append(f"rollout idle {100 * budget.rollout_idle_share:.1f} %: nothing in flight")
    return "\n".join(lines)
