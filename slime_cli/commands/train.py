"""``slime train``: resolves and checks the options, claims the run directory, runs the stages, shows the result."""

import json
import pathlib
import signal
import time
from collections.abc import Callable

from slime_cli import installed
from slime_cli.commands import arguments, train_data
from slime_cli.errors import Interrupted
from slime_cli.options import checks
from slime_cli.options.resolve import Resolved, resolve

_HOOKS = {
    "custom_generate_function_path": "generate",
    "dynamic_sampling_filter_path": "dynamic_filter",
    "custom_advantage_function_path": "advantage",
    "custom_loss_function_path": "loss",
    "custom_tis_function_path": "tis",
    "custom_pg_loss_reducer_function_path": "pg_loss_reducer",
}
"""Option -> kind of function; those of rewards are looked at by the rewards."""


def run(argv: list[str]) -> int:
    """The whole command; returns the exit code. Raises SlimeError with its own exit code."""
    line = arguments.split(argv)
    resolved = resolve(line.rest, line.profiles, "train")
    warnings = checks.check(resolved)
    if line.dry_run:
        return _dry_run(resolved, warnings, line.verbose)
    installed.require(*installed.TESTED)
    run_dir = pathlib.Path(resolved.slime["run_dir"] or f"runs/{time.strftime('%Y%m%d-%H%M%S')}").resolve()

    from slime_cli import run_dir as folders
    from slime_cli.screen import Screen

    folders.refuse_second(run_dir)
    screen = Screen()
    _check_model(resolved, screen.say)
    _check_functions(resolved)
    rollouts = train_data.check(list(zip(_names(resolved), _stages(resolved), strict=True)), screen.say)

    from slime_cli import resuming

    resuming.check_starts(folders.stages(resolved, run_dir))
    warnings += _check_disks(resolved, run_dir)
    with folders.alone(run_dir):
        return _train(resolved, run_dir, warnings, screen, rollouts)


def _train(
    resolved: Resolved, run_dir: pathlib.Path, warnings: list[str], screen, rollouts: dict[str, int]
) -> int:
    from slime_cli import resuming
    from slime_cli import run_dir as folders

    for warning in warnings:
        screen.warn(warning)
    claimed = folders.claim(resolved, run_dir)
    screen.say(f"run directory {run_dir}, attempt {claimed.attempt}, on {claimed.hardware['count']} x {claimed.hardware['name']}")
    finished = run_dir / "summary.json"
    if finished.exists():
        from slime_cli import report

        screen.say("this run is finished; its result:")
        report.show(screen.console, run_dir, json.loads(finished.read_text()))
        return 0
    signal.signal(signal.SIGTERM, _interrupt)
    resuming.prepare(folders.stages(resolved, run_dir), run_dir, screen.say)

    from slime_cli import report
    from slime_cli.loop import Conductor

    conductor = Conductor(resolved, run_dir, screen, rollouts)
    try:
        summary = conductor.run(lambda stages: report.summarize(run_dir, stages, conductor.endpoint))
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted; what was committed is in {run_dir}", "the same command resumes") from None
    report.show(screen.console, run_dir, summary)
    return 0


def _check_disks(resolved: Resolved, run_dir: pathlib.Path) -> list[str]:
    """Tries every folder that the run writes to; warnings about the room there."""
    from slime_cli import disk, saving
    from slime_cli import run_dir as folders

    disk.writable(run_dir, "--run-dir")
    stages = folders.stages(resolved, run_dir)
    for _, options, folder in stages:
        saving.check_folders(options.slime, folder, run_dir)
    config = _config(resolved)
    return disk.short_of_room(need for stage in stages for need in saving.room(*stage, run_dir, config)) if config else []


def _config(resolved: Resolved) -> dict | None:
    """config.json of the model; None for one that is yet to be made."""
    from slime_cli.weights import architecture

    model = pathlib.Path(resolved.slime["hf_checkpoint"] or "")
    return architecture.read_config(str(model)) if (model / "config.json").is_file() else None


def _interrupt(signum, frame):
    raise KeyboardInterrupt


def _check_model(resolved: Resolved, say: Callable[[str], None]) -> None:
    """Refuses a checkpoint that is not whole before Ray, Megatron or an engine is started; ``tiny:`` models are made
    whole.
    """
    from slime_cli.commands import doctor_checkpoint as checkpoint
    from slime_cli.weights import tiny

    if (model := resolved.slime["hf_checkpoint"]).startswith(tiny.PREFIX):
        return
    chat = any(stage.slime["apply_chat_template"] for stage in _stages(resolved))
    needed = (checkpoint.CONFIG, checkpoint.TOKENIZER, checkpoint.WEIGHTS)
    checkpoint.require(model, say, needed, (checkpoint.TEMPLATE,) if chat else ())


def _stages(resolved: Resolved) -> list[Resolved]:
    """The options of each stage; of the whole run where there is one alone."""
    return [resolved.for_stage(i) for i in range(len(resolved.stages))] or [resolved]


def _names(resolved: Resolved) -> list[str]:
    return [stage["name"] for stage in resolved.stages] or ["train"]


def _check_functions(resolved: Resolved) -> None:
    """Loads the user's functions, so that one that cannot be used ends the command before anything is started."""
    from slime_cli.options.resolve import args_namespace
    from slime_cli.rollout import hooks
    from slime_cli.rollout.rewards import check_options

    for stage in _stages(resolved):
        if stage.slime["loss_type"] != "sft_loss":
            check_options(args_namespace(stage))
            for option, kind in _HOOKS.items():
                if stage.slime[option]:
                    hooks.load(stage.slime[option], kind)


def _dry_run(resolved: Resolved, warnings: list[str], verbose: bool) -> int:
    from rich.console import Console

    from slime_cli.options import memory, render
    from slime_cli.weights import architecture

    config = _config(resolved)
    derived = architecture.megatron_args(config) if config else None
    console = Console(highlight=False)
    for warning in warnings:
        console.print(f"[yellow]warning[/yellow] {warning}")
    stages = [(stage["name"], resolved.for_stage(i)) for i, stage in enumerate(resolved.stages)] or [("", resolved)]
    for name, stage in stages:
        if name:
            console.rule(f"stage {name}")
        console.print(render.render(stage, checks.layout(stage), memory.estimate(stage, derived), verbose))
    return 0
