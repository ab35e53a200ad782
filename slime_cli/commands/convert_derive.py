"""``slime convert derive``: Megatron's options that follow from an HF config, as a profile or as a command line."""

import enum
import pathlib
from typing import Annotated, Any

import typer


class Format(enum.StrEnum):
    profile = "profile"
    flags = "flags"


def derive(
    hf_checkpoint: Annotated[
        pathlib.Path, typer.Option("--hf-checkpoint", help="Folder of the Hugging Face model, or its config.json.")
    ],
    format: Annotated[
        Format, typer.Option("--format", help="A profile in YAML, or flags for a command line.")
    ] = Format.profile,
) -> None:
    """Print the Megatron options that follow from a config.json."""
    import shlex

    from slime_cli.errors import DataError
    from slime_cli.models import architecture
    from slime_cli.models.families import FAMILIES

    folder = hf_checkpoint.parent if hf_checkpoint.name == "config.json" else hf_checkpoint
    config = architecture.read_config(str(folder))
    args = architecture.megatron_args(config)
    name = architecture.name(config)
    if args is None:
        raise DataError(
            f"{folder / 'config.json'}: architecture {name} is not supported",
            f"supported: {', '.join(sorted(FAMILIES))}",
        )
    if format == Format.flags:
        print(shlex.join(architecture.argv(args)))
    else:
        print(profile(args, f"Architecture of {folder.resolve().name} ({name}) for Megatron."), end="")


def profile(args: dict[str, Any], description: str) -> str:
    """Options by dest as a profile that, read again, gives the same; flags that store their default are left out."""
    import json

    from slime_cli.options import catalogue

    table = catalogue.load("megatron")
    lines = [f"description: {json.dumps(description)}", "megatron:"]
    for dest, value in args.items():
        option = table.option_for(dest, value) if _differs(table, dest, value) else None
        if option is not None:
            lines.append(f"  {option.flag[2:]}: {json.dumps(value if option.takes_value else True)}")
    return "\n".join(lines) + "\n"


def _differs(table: Any, dest: str, value: Any) -> bool:
    first = table.by_dest[dest][0]
    return first.takes_value or value != first.default
