"""``slime trace``: what a run did. Reads only; safe while the run works."""

import pathlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from slime_cli import plain

if TYPE_CHECKING:
    from rich.console import RenderableType


class _SummaryByDefault(TyperGroup):
    """``slime trace RUN`` means ``slime trace summary RUN``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            args = ["summary", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_SummaryByDefault, no_args_is_help=True, **plain.TYPER, help="Summary, ledger and exports of a run."
)

RunDir = Annotated[pathlib.Path, typer.Argument(metavar="RUN", help="The run's directory.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


@app.command()
def summary(run: RunDir, as_json: AsJson = False) -> None:
    """Phases, steps, rewards, where the time went, and the ledger. `slime trace RUN` does the same."""
    import dataclasses

    from rich.console import Group

    from slime_cli.profiling import table
    from slime_cli.profiling.step import step_budget
    from slime_cli.tracing.reading import spans_of
    from slime_cli.tracing.summary import render, summarize

    found = summarize(run)
    budget = step_budget(spans_of(run))
    shown = Group(render(found), *([table.render(budget)] if budget.rollouts else []))
    _show(dataclasses.asdict(found) | {"budget": budget}, as_json, lambda _: shown)


@app.command()
def ledger(run: RunDir, as_json: AsJson = False) -> None:
    """Prove dispatched = trained + dropped (by reason) + in flight. Exit code 1 when it does not hold."""
    from slime_cli.tracing import ledger as ledgers

    parts = ledgers.ledgers(run)
    _show(ledgers.as_json(parts) if as_json else parts, as_json, ledgers.render)
    if not ledgers.balanced(parts):
        raise typer.Exit(1)


@app.command()
def export(
    run: RunDir,
    out: Annotated[pathlib.Path | None, typer.Option("-o", "--out", help="File to write [RUN/trace.json].")] = None,
) -> None:
    """Write the spans for ui.perfetto.dev or chrome://tracing."""
    from slime_cli import disk
    from slime_cli.tracing.perfetto import export as write

    out = out or run / "trace.json"
    if run.is_dir():
        disk.writable(out.parent, "--out")
    print(f"{write(run, out):,} spans in {out}: open it in https://ui.perfetto.dev")


@app.command()
def why(
    run: RunDir,
    sample_index: Annotated[int, typer.Argument(help="The sample's index in the run.")],
    phase: Annotated[str | None, typer.Option(help="Look in this phase only.")] = None,
    as_json: AsJson = False,
) -> None:
    """The fate of one sample, and its line of the data."""
    from rich.console import Group

    from slime_cli.tracing import ledger as ledgers

    found = ledgers.find(run, sample_index, phase)
    _show(found, as_json, lambda all_: Group(*(ledgers.render_record(name, record) for name, record in all_.items())))


def _show(value: Any, as_json: bool, render: Callable[[Any], "RenderableType"]) -> None:
    if as_json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())
    else:
        from rich.console import Console

        Console().print(render(value))
