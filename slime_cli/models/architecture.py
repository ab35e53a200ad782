"""Megatron's architecture options for an HF config. Torch-free.

:func:`megatron_args` is the one place that derives them: training, conversion, ``slime convert derive`` and the shipped
model profiles (``ci/model_profiles.py``) all take them from here. What each architecture means is in
:mod:`slime_cli.models.families`. Keys are dests of Megatron's own parser, values as slime reads them from a command
line.
"""

import pathlib
from typing import Any

from slime_cli.errors import DataError, UsageError
from slime_cli.models import schemes, whole
from slime_cli.models.families import FAMILIES
from slime_cli.options import catalogue
from slime_cli.options.spec import expand, to_words

CHOICES = frozenset(
    {
        "seq_length",
        "max_position_embeddings",
        "moe_grouped_gemm",
        "moe_router_dtype",
        "moe_router_load_balancing_type",
        "moe_aux_loss_coeff",
        "moe_router_bias_update_rate",
    }
)
"""Derived, but a user may have it otherwise: how the model is trained, not what it is."""

PATTERNS = ("moe_layer_freq", "linear_attention_freq")
"""Dests whose values are list expressions; two spellings can mean the same."""


def read_config(checkpoint: str) -> dict[str, Any]:
    """``config.json`` of an HF checkpoint folder. Raises DataError when it is missing or damaged."""
    folder = pathlib.Path(checkpoint)
    try:
        return whole.read_config(folder)
    except ValueError as error:
        found = whole.check_folder(folder)
        raise DataError(str(error), found.fix or whole.again_or_another(folder)) from None


def vocabulary(checkpoint: str) -> int:
    """Rows of the embedding; a model of several modalities has them in its text config."""
    return rows(read_config(checkpoint))


def rows(config: dict[str, Any]) -> int:
    return (config if "vocab_size" in config else config["text_config"])["vocab_size"]


def context_length(config: dict[str, Any], given: int | None = None) -> int | None:
    """Tokens of a prompt with its answer: ``given`` (``--sglang-context-length``), or what SGLang takes from the
    config; None where it does not say."""
    if given:
        return given
    text = config.get("text_config") or config
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    plain = "original_max_position_embeddings" in rope or rope.get("rope_type") == "llama3"
    factor = 1 if plain else rope.get("factor") or 1
    known = (
        text.get(key)
        for key in ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "max_position_embeddings")
    )
    return next((int(factor * value) for value in known if isinstance(value, int)), None)


def routed_experts(config: dict[str, Any], where: str) -> tuple[int, int]:
    """Layers, and experts that a token goes to in each. Raises UsageError for a model without; ``where`` wants them."""
    text = config.get("text_config", config)
    if "num_experts_per_tok" not in text:
        raise UsageError(f"{where} is not a mixture of experts", "leave it out")
    return text["num_hidden_layers"], text["num_experts_per_tok"]


def name(config: dict[str, Any]) -> str:
    """The HF architecture, ``?`` when the config does not say."""
    return (config.get("architectures") or ["?"])[0]


def megatron_args(config: dict[str, Any]) -> dict[str, Any] | None:
    """Options by dest, e.g. ``{"num_layers": 28, ...}``; None for an architecture that is not derived here.

    Raises DataError for a known architecture with a feature that Megatron has no option for, or in a format whose
    weights :mod:`slime_cli.models.schemes` cannot make.
    """
    family = FAMILIES.get(name(config))
    if family is None:
        return None
    schemes.of_config(config)  # which refuses what cannot be trained
    return {dest: value for dest, value in family(config).items() if value is not None}


def argv(args: dict[str, Any]) -> list[str]:
    """The same options as a command line for Megatron's parser; a flag that stores its default is left out."""
    table = catalogue.load("megatron")
    out = []
    for dest, value in args.items():
        options = table.by_dest.get(dest, [])
        if options and not options[0].takes_value and value == options[0].default:
            continue
        out += to_words(table.option_for(dest, value), value)
    return out


def contradiction(derived: dict[str, Any], given: dict[str, Any]) -> str | None:
    """The first dest at which ``given`` makes another model than ``derived`` does; None when they agree."""
    for dest, value in derived.items():
        other = given.get(dest)
        if other is not None and dest not in CHOICES and not _same(dest, value, other):
            return dest
    return None


def _same(dest: str, one: Any, other: Any) -> bool:
    return one == other or dest in PATTERNS and expand(str(one)) == expand(str(other))


def check_given(derived: dict[str, Any], given: dict[str, Any], where: str) -> None:
    """Raises UsageError when options given for training contradict those that follow from the checkpoint ``where``."""
    dest = contradiction(derived, given)
    if dest is not None:
        flag = catalogue.load("megatron").by_dest[dest][0].flag
        raise UsageError(
            f"{flag} makes {dest} {given[dest]}, {where} makes it {derived[dest]}",
            "leave it out: it follows from --hf-checkpoint",
        )


def to_derive(config: dict[str, Any], given: dict[str, Any], where: str) -> dict[str, Any]:
    """Megatron's options that follow from ``config`` and are not ``given``.

    Raises UsageError for a contradiction, and where nothing follows and nothing is given.
    """
    derived = megatron_args(config)
    if derived is None and "num_layers" not in given:
        raise UsageError(
            f"{where}: its Megatron options are not derived for this architecture yet",
            "add a model profile with --profile, or pass --num-layers and the others",
        )
    check_given(derived or {}, given, where)
    return {dest: value for dest, value in (derived or {}).items() if dest not in given}
