"""``slime train``: resolves and checks the options, claims the run directory, runs the phases, shows the result."""

import json
import pathlib
import time
from typing import TYPE_CHECKING

from slime_cli.commands import arguments, memory_plan, preflight
from slime_cli.errors import Interrupted
from slime_cli.manifests import layout
from slime_cli.options import checks
from slime_cli.options.resolve import Resolved, resolve

if TYPE_CHECKING:
    from slime_cli.screen import Screen


def run(argv: list[str]) -> int:
    """The whole command; returns the exit code. Raises SlimeError with its own exit code."""
    line = arguments.split(argv)
    words = line.rest
    if line.script is not None:
        from slime_cli.commands import from_script

        words = from_script.argv(line.script, line.rest, line.dry_run)
    resolved = resolve(words, line.profiles, "train")
    warnings = checks.check(resolved)
    run_dir = pathlib.Path(resolved.slime.run_dir or f"runs/{time.strftime('%Y%m%d-%H%M%S')}").resolve()
    if line.dry_run:
        return _dry_run(resolved, run_dir, warnings, line.verbose)

    from slime_cli import installed
    from slime_cli.commands import train_data
    from slime_cli.loop import attempts as folders
    from slime_cli.loop import extending
    from slime_cli.screen import Screen

    installed.require(*installed.TESTED)
    screen = Screen()
    sources = preflight.check(resolved, run_dir, screen.say)
    names = [phase["name"] for phase in resolved.phases] or ["train"]
    rollouts = {}
    if not extending.finished(resolved, run_dir):
        rollouts = train_data.check(list(zip(names, preflight.phases(resolved), sources, strict=True)), screen.say)
    if extending.finished(resolved, run_dir, rollouts):
        return _show_result(run_dir, screen)
    warnings += _check_disks(resolved, run_dir)
    with folders.alone(run_dir):
        return _train(resolved, run_dir, warnings, screen, rollouts)


def _train(
    resolved: Resolved, run_dir: pathlib.Path, warnings: list[str], screen: "Screen", rollouts: dict[str, int]
) -> int:
    from slime_cli.loop import attempts as folders
    from slime_cli.loop import extending, resuming

    for warning in warnings:
        screen.warn(warning)
    changed = folders.changed(resolved, run_dir)
    claimed = folders.claim(resolved, run_dir)
    screen.say(
        f"run directory {run_dir}, attempt {claimed.attempt}, on {claimed.hardware['count']} x"
        f" {claimed.hardware['name']}"
    )
    for change in changed:
        screen.say(f"since the last attempt: {change}")
    memory_plan.write(resolved, run_dir)
    phases = folders.phases(resolved, run_dir)
    extending.reopen(phases, run_dir, rollouts, screen.say)
    resuming.prepare(phases, run_dir, screen.say)

    from slime_cli.run import Run
    from slime_cli.tracing import report

    run = Run(resolved, run_dir, screen, rollouts)
    try:
        summary = run.run(lambda phases: report.summarize(run_dir, phases, run.endpoint))
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted; what was committed is in {run_dir}", "the same command resumes") from None
    report.show(screen.console, run_dir, summary)
    return 0


def _show_result(run_dir: pathlib.Path, screen: "Screen") -> int:
    from slime_cli.tracing import report

    screen.say("this run is finished; its result:")
    report.show(screen.console, run_dir, json.loads((run_dir / layout.SUMMARY).read_text()))
    return 0


def _check_disks(resolved: Resolved, run_dir: pathlib.Path) -> list[str]:
    """Tries every folder that the run writes to; warnings about the room there."""
    from slime_cli import disk
    from slime_cli.loop import attempts as folders
    from slime_cli.loop import targets
    from slime_cli.models import tiny

    disk.writable(run_dir, "--run-dir")
    phases = folders.phases(resolved, run_dir)
    for _, options, folder in phases:
        targets.check_folders(options.slime, folder, run_dir)
    model = resolved.slime.hf_checkpoint
    if model.startswith(tiny.PREFIX):
        return []
    config = preflight.config(model)
    return disk.short_of_room(need for phase in phases for need in targets.room(*phase, run_dir, config))


def _dry_run(resolved: Resolved, run_dir: pathlib.Path, warnings: list[str], verbose: bool) -> int:
    from rich.console import Console
    from rich.markup import escape

    from slime_cli.options import memory, render

    console = Console(highlight=False)

    def warn(text: str) -> None:
        text = escape(text.removeprefix("warning: "))  # some findings say it themselves
        console.print(f"[yellow]warning[/yellow] {text}", soft_wrap=not console.is_terminal)

    for warning in warnings:
        warn(warning)
    derived = preflight.derived(resolved)
    names = [phase["name"] for phase in resolved.phases] or [""]
    for name, phase in zip(names, preflight.phases(resolved), strict=True):
        if name:
            console.rule(f"phase {name}")
        console.print(render.render(phase, checks.layout(phase), memory.estimate(phase, derived), verbose))
    uris = [uri.partition("?")[0] for phase in preflight.phases(resolved) for uri in preflight.made(phase)]
    left = ["how rows render", *(f"the prompts of {name}" for name in dict.fromkeys(uris))]
    console.print(f"Left to the run, before it starts anything: {', '.join(left)}", style="dim", markup=False)
    preflight.check(resolved, run_dir, warn, planning=True)
    return 0
