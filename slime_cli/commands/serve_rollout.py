"""``slime serve-rollout``: SGLang servers behind the router, until Ctrl-C or the end of the process that started it."""

import os
import pathlib
import time
from collections.abc import Callable

from slime_cli import disk, installed, interrupts, manifests
from slime_cli.commands import arguments, preflight
from slime_cli.errors import UsageError
from slime_cli.hardware import device as hardware
from slime_cli.loop import attempts as folders
from slime_cli.manifests import layout
from slime_cli.models import architecture, tiny
from slime_cli.options import checks
from slime_cli.options.resolve import Resolved, resolve
from slime_cli.screen import Screen


def run(argv: list[str]) -> int:
    """Serves until it is told to stop; returns the exit code. Raises EngineError when nothing is left to serve with."""
    line = arguments.split(argv)
    if line.dry_run or line.verbose or line.script:
        flag = "--dry-run" if line.dry_run else "--verbose" if line.verbose else "--from-script"
        raise UsageError(f"`slime serve-rollout` does not read {flag}", "leave it out; `slime train` does")
    resolved = resolve(line.rest, line.profiles, "serve-rollout")
    warnings = checks.check(resolved)
    installed.require(*installed.SERVING)
    run_dir = pathlib.Path(resolved.slime.run_dir or "runs/serve").resolve()
    folders.refuse_second(run_dir)
    screen = Screen()
    model = resolved.slime.hf_checkpoint
    if not model.startswith(tiny.PREFIX):  # a tiny one is made whole, in the run directory
        _check_model(resolved, model, screen.say)
    hardware.check_engine(preflight.config(model))
    disk.writable(run_dir, "--run-dir")
    with folders.alone(run_dir):
        return _serve(resolved, run_dir, model, warnings, screen)


def _serve(resolved: Resolved, run_dir: pathlib.Path, model: str, warnings: list[str], screen: Screen) -> int:
    import msgspec

    from slime_cli.serving import claim
    from slime_cli.serving.engine import Engine
    from slime_cli.serving.fleet import Fleet
    from slime_cli.weights import matching

    if model.startswith(tiny.PREFIX):
        model = str(tiny.make(model, run_dir / layout.MODEL))
    for warning in warnings:
        screen.warn(warning)
    if words := hardware.dtype_words(resolved.megatron, architecture.read_config(model)):
        screen.say(words)
    owner = os.getppid()
    fleet = Fleet(resolved, model, run_dir, Engine, screen.say)
    path = run_dir / layout.ENDPOINT
    try:
        screen.say("starting the engines (about 20 s on a CPU)")
        endpoint = fleet.wait_healthy()
        claim.offer(claim.beside(path))
        endpoint = msgspec.structs.replace(endpoint, claim=str(claim.beside(path)), **matching.identity(model))
        manifests.write(path, endpoint)
        screen.say(f"serving {model} at {endpoint.router_url}, {len(endpoint.engines)} engine(s); written to {path}")
        screen.say("Ctrl-C stops everything")
        while os.getppid() == owner:  # the shell or program that started this command is still there
            fleet.check()
            time.sleep(1)
        screen.say("the process that started this command ended")
    except KeyboardInterrupt:
        screen.say("stopping")
    finally:
        with interrupts.undisturbed():
            fleet.stop()
            path.unlink(missing_ok=True)
            claim.beside(path).unlink(missing_ok=True)
    return 0


def _check_model(resolved: Resolved, model: str, say: Callable[[str], None]) -> None:
    """Before SGLang starts, which takes half a minute to find out, or never does. Weights are looked at where it reads
    them.
    """
    from slime_cli.commands import doctor_checkpoint as checkpoint

    needed = [checkpoint.CONFIG]
    if resolved.sglang.get("load_format", "auto") in ("auto", "safetensors"):
        needed.append(checkpoint.WEIGHTS)
    if not (resolved.sglang.get("skip_tokenizer_init") or resolved.sglang.get("tokenizer_path")):
        needed += [checkpoint.TOKENIZER, checkpoint.IDS]
    checkpoint.require(model, say, needed, (checkpoint.TEMPLATE,))
