"""``slime profile``: where time goes, in a run's steps and inside the generation engines, and where memory does."""

import pathlib
from typing import Annotated

import typer

from slime_cli import plain

app = typer.Typer(
    no_args_is_help=True,
    **plain.TYPER,
    help="Where the time goes, in a run's steps and inside the engines, and where the memory does.",
)


@app.command()
def step(
    run: Annotated[pathlib.Path, typer.Argument(metavar="RUN", help="The run's directory.")],
    phase: Annotated[str | None, typer.Option(help="This phase only.")] = None,
    rollout_id: Annotated[int | None, typer.Option(help="This rollout only.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Where a rollout's time goes, and how long both sides are idle."""
    from slime_cli.errors import DataError
    from slime_cli.profiling.step import step_budget
    from slime_cli.profiling.table import render
    from slime_cli.tracing.reading import spans_of

    budget = step_budget(spans_of(run), phase, rollout_id)
    if not budget.rollouts:
        raise DataError(f"{run}: its spans hold no such finished step", "wait for one; tracing must be on for the run")
    if as_json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(budget), indent=2).decode())
    else:
        from rich.console import Console

        Console().print(render(budget))


@app.command()
def engines(
    endpoint: Annotated[pathlib.Path, typer.Argument(metavar="ENDPOINT.json", help="By `slime serve-rollout`.")],
    out: Annotated[pathlib.Path, typer.Option("-o", "--out", help="Folder for the traces; engines write them there.")],
    num_steps: Annotated[int, typer.Option(min=1, help="Forward steps to record.")] = 8,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the traces.")] = 300.0,
) -> None:
    """A torch profile of each engine behind an endpoint. For ui.perfetto.dev."""
    from slime_cli import disk
    from slime_cli.manifests import Endpoint, read
    from slime_cli.profiling.engines import profile_engines

    disk.writable(out, "--out")
    for url, paths in profile_engines(read(endpoint, Endpoint), out, num_steps, timeout=timeout).items():
        for path in paths:
            print(f"{url}  {path}")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def memory(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """A device's memory in each phase of a rollout: `memory RUN` shows the prediction beside what was measured, `memory
    OPTIONS` predicts for the options of a `slime train` that has not started."""
    import json

    from slime_cli.commands import memory_plan
    from slime_cli.errors import DataError, UsageError
    from slime_cli.manifests import layout
    from slime_cli.profiling import memory
    from slime_cli.tracing.reading import spans_of

    words = context.args
    if not words:
        raise UsageError("slime profile memory: of which run?", "give its directory, or the options of `slime train`")
    if len(words) == 1 and not words[0].startswith("--"):
        path = pathlib.Path(words[0]) / layout.MEMORY
        if not path.exists():
            raise DataError(f"{path}: no such file", "give the folder that `slime train` writes to")
        predicted = json.loads(path.read_text())
        spans = list(spans_of(words[0]))
        found = {name: memory.measured(spans, name) for name in predicted}
    else:
        predicted = memory_plan.of_words(words)
        found = {name: {} for name in predicted}
    if as_json:
        print(json.dumps({name: memory.as_json(predicted[name], found[name]) for name in predicted}, indent=2))
        return
    from rich.console import Console

    for name in predicted:
        Console().print(memory.table(f"phase {name}", predicted[name], found[name]))
