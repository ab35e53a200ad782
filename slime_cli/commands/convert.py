"""``slime convert``: Hugging Face weights to a genuine Megatron ``torch_dist`` checkpoint, and back."""

import contextlib
import pathlib
from collections.abc import Callable
from typing import Annotated, Any

import typer

from slime_cli import plain
from slime_cli.commands import convert_derive, convert_quantised

app = typer.Typer(no_args_is_help=True, **plain.TYPER, help="Checkpoints: HF to Megatron and back, FP8 and INT4.")

PASS = {"allow_extra_args": True, "ignore_unknown_options": True}
Profiles = Annotated[
    list[str] | None, typer.Option("--profile", help="A profile with Megatron's architecture options; may be repeated.")
]
Force = Annotated[bool, typer.Option("--force", help="Replace the checkpoint that --save holds.")]
EPILOG = "Megatron's own architecture options (--num-layers and so on) are taken too; most models need none."


@app.command(context_settings=PASS, epilog=EPILOG)
def hf_to_dist(
    context: typer.Context,
    hf_checkpoint: Annotated[pathlib.Path, typer.Option("--hf-checkpoint", help="Folder of the Hugging Face model.")],
    save: Annotated[pathlib.Path, typer.Option("--save", help="Folder to write iter_0000000 into.")],
    tensor: Annotated[
        int, typer.Option("--tensor-model-parallel-size", min=1, help="Tensor parallel ranks that write it.")
    ] = 1,
    pipeline: Annotated[
        int, typer.Option("--pipeline-model-parallel-size", min=1, help="Pipeline ranks that write it.")
    ] = 1,
    expert: Annotated[
        int, typer.Option("--expert-model-parallel-size", min=1, help="Expert parallel ranks that write it.")
    ] = 1,
    profile: Profiles = None,
    force: Force = False,
) -> None:
    """Write the model as a Megatron torch_dist checkpoint. It loads in any parallel layout."""
    from slime_cli import installed
    from slime_cli.cluster import conversion
    from slime_cli.commands import doctor_checkpoint
    from slime_cli.convert import convert

    with _screen() as say:
        megatron = _megatron(context.args, profile or [], say)
        looked_at = (doctor_checkpoint.TOKENIZER, doctor_checkpoint.TEMPLATE)
        doctor_checkpoint.require(hf_checkpoint, say, (doctor_checkpoint.IDS,), looked_at)
        installed.require(*installed.TRAINING)
        target = convert.hf_to_dist(
            hf_checkpoint,
            save,
            tensor=tensor,
            pipeline=pipeline,
            expert=expert,
            megatron=megatron,
            force=force,
            say=say,
            run=conversion.run,
        )
        say(f"done: {target} ({_size(target)})")


@app.command(context_settings=PASS, epilog=EPILOG)
def dist_to_hf(
    context: typer.Context,
    load: Annotated[
        pathlib.Path, typer.Option("--load", help="An iter_NNNNNNN folder, or the folder above it: the newest.")
    ],
    save: Annotated[pathlib.Path, typer.Option("--save", help="Folder to write the Hugging Face model into.")],
    ckpt_step: Annotated[
        int | None, typer.Option("--ckpt-step", help="The step of the checkpoint [the newest whole one].")
    ] = None,
    origin: Annotated[
        pathlib.Path | None,
        typer.Option("--origin-hf-dir", help="Config and tokenizer from here [the model it came from]."),
    ] = None,
    adapter_only: Annotated[
        bool, typer.Option("--adapter-only", help="A LoRA adapter alone, in PEFT's format [merged into its base].")
    ] = False,
    profile: Profiles = None,
    force: Force = False,
) -> None:
    """Write a Megatron checkpoint's weights as an HF model."""
    from slime_cli import installed
    from slime_cli.cluster import conversion
    from slime_cli.convert import convert
    from slime_cli.manifests import checkpoints

    with _screen() as say:
        megatron = _megatron(context.args, profile or [], say)
        installed.require(*installed.TRAINING)
        found = checkpoints.complete(load, say, ckpt_step)
        if adapter_only:
            target, iteration = convert.dist_to_adapter(
                found, save, origin=origin, force=force, say=say, run=conversion.run
            )
        else:
            target, iteration = convert.dist_to_hf(
                found, save, origin=origin, megatron=megatron, force=force, say=say, run=conversion.run
            )
        say(f"done: {target} ({_size(target)}), weights of iteration {iteration}")


def _megatron(words: list[str], profiles: list[str], say: Callable[[str], None]) -> dict[str, Any]:
    """Megatron options by dest: those of profiles, over them those of the command line. Anything else is an error."""
    from slime_cli.errors import UsageError
    from slime_cli.options import layers, own
    from slime_cli.options.profiles import load
    from slime_cli.options.spec import UNSET

    found: dict[str, Any] = {}
    for name in profiles:
        found |= {dest: value for (section, dest), value in load(name).layer.items() if section == "megatron"}
    layer, warnings = layers.from_argv(words, "convert")
    for (section, dest), value in layer.items():
        if section != "megatron":
            flag = own.by_dest()[dest].flag if section == "slime" else f"--{section}-{dest.replace('_', '-')}"
            raise UsageError(
                f"`slime convert` does not read {flag}",
                "leave it out: only Megatron's architecture options are passed on",
            )
        found[dest] = value
    for warning in warnings:
        say(f"warning: {warning}")
    return {dest: value for dest, value in found.items() if value is not UNSET and dest not in _NOT_ARCHITECTURE}


_NOT_ARCHITECTURE = {"attention_dropout", "hidden_dropout", "use_rotary_position_embeddings"}
"""Options that a model profile may hold and that do not change what the weights are."""


@contextlib.contextmanager
def _screen():
    """Yields ``say``; on a terminal a spinner turns meanwhile."""
    from slime_cli.screen import Screen

    screen = Screen()
    spinner = screen.console.status("converting") if screen.console.is_terminal else contextlib.nullcontext()
    with spinner:
        yield screen.say


def _size(folder: pathlib.Path) -> str:
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


app.command()(convert_derive.derive)
convert_quantised.add_to(app)
