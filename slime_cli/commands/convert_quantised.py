"""``slime convert hf-to-fp8``, ``fp8-to-bf16``, ``hf-to-int4`` and ``int4-to-bf16``; ``commands.convert`` adds them to
its app."""

import pathlib
from typing import Annotated, Any, Literal

import typer

Checkpoint = Annotated[pathlib.Path, typer.Option("--hf-checkpoint", help="Folder of the Hugging Face model.")]
Save = Annotated[pathlib.Path, typer.Option("--save", help="Folder to write the converted model into.")]
Force = Annotated[bool, typer.Option("--force", help="Replace the checkpoint that --save holds.")]
Ignore = Annotated[
    list[str] | None,
    typer.Option(
        "--ignore",
        metavar="PATTERN",
        help="Keep modules: whole parts of a name (layers.0), * for anything; may be repeated.",
    ),
]
AGAIN = "The same command continues an interrupted conversion."


def add_to(app: typer.Typer) -> None:
    for command in (hf_to_fp8, fp8_to_bf16, hf_to_int4, int4_to_bf16):
        app.command(epilog=AGAIN)(command)


def hf_to_fp8(
    hf_checkpoint: Checkpoint,
    save: Save,
    strategy: Annotated[
        Literal["block", "channel", "tensor"],
        typer.Option(
            "--strategy", help="One scale a block (DeepSeek's format), a row or a matrix (compressed-tensors')."
        ),
    ] = "block",
    block_size: Annotated[
        tuple[int, int] | None,
        typer.Option("--block-size", help="Rows and columns of a block.", show_default="128 128"),
    ] = None,
    scale_fmt: Annotated[
        Literal["ue8m0"] | None, typer.Option("--scale-fmt", help="Scales rounded up to powers of two.")
    ] = None,
    ignore: Ignore = None,
    force: Force = False,
) -> None:
    """Quantise the model's matrices to FP8 (e4m3). Activations are quantised as the engine runs."""
    from slime_cli.errors import UsageError

    for flag, value in (("--block-size", block_size), ("--scale-fmt", scale_fmt)):
        if value and strategy != "block":
            raise UsageError(f"{flag} is for --strategy block, not {strategy}", f"leave out {flag}")
    if block_size and min(block_size) < 1:
        raise UsageError(
            f"--block-size {block_size[0]} {block_size[1]}: must be at least 1", "SGLang's kernels are made for 128 128"
        )
    options = {"strategy": strategy, "scale_fmt": scale_fmt, "ignore": tuple(ignore or ())}
    _run(hf_checkpoint, save, force, "ToFp8", **options | ({"block": block_size} if block_size else {}))


def fp8_to_bf16(hf_checkpoint: Checkpoint, save: Save, force: Force = False) -> None:
    """Make bfloat16 weights of an FP8 model."""
    _run(hf_checkpoint, save, force, "FromFp8")


def hf_to_int4(
    hf_checkpoint: Checkpoint,
    save: Save,
    group_size: Annotated[
        int, typer.Option("--group-size", min=1, help="Neighbours with one scale; SGLang takes 32, 64 or 128.")
    ] = 32,
    symmetric: Annotated[
        bool, typer.Option("--symmetric/--asymmetric", help="Without or with a zero point for each group.")
    ] = True,
    ignore: Ignore = None,
    force: Force = False,
) -> None:
    """Round the model's matrices to INT4 (pack-quantized, W4A16)."""
    _run(hf_checkpoint, save, force, "ToInt4", group=group_size, symmetric=symmetric, ignore=tuple(ignore or ()))


def int4_to_bf16(hf_checkpoint: Checkpoint, save: Save, force: Force = False) -> None:
    """Make bfloat16 weights of a pack-quantized INT4 model."""
    _run(hf_checkpoint, save, force, "FromInt4")


def _run(hf_checkpoint: pathlib.Path, save: pathlib.Path, force: bool, name: str, **options: Any) -> None:
    """``name`` and ``options``: of the format, imported (with torch) once the checkpoint has been looked at."""
    from slime_cli.commands import doctor_checkpoint as checkpoint
    from slime_cli.screen import Screen

    screen = Screen()
    needed = (checkpoint.CONFIG, checkpoint.WEIGHTS)
    looked_at = (checkpoint.TOKENIZER, checkpoint.IDS, checkpoint.TEMPLATE)
    checkpoint.require(hf_checkpoint, screen.say, needed, looked_at)
    from slime_cli.convert import number_formats, requantise

    form = getattr(number_formats, name)(**options)
    folder, count = requantise.convert(hf_checkpoint, save, form, screen=screen, force=force)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    screen.say(f"done: {folder}, {count} matrices in {form.dtype}, {size / 1e6:.1f} MB")
