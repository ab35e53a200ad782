"""slime's own options as a parser sees them, and the few native defaults that slime changes.

They are declared in :mod:`slime_cli.options.groups`; names and meanings are those of slime launch scripts. Invariants
(tests hold them): every option is read by some code, and a name that Megatron has too is in OWN_OVER_MEGATRON with the
reason why slime takes it over.
"""

import functools
from collections.abc import Sequence
from typing import Any

from slime_cli.options.declare import POLICY, Need, OwnOption, options_of
from slime_cli.options.groups import GROUPS, SlimeOptions

__all__ = ["OPTIONS", "OwnOption", "SlimeOptions", "by_dest", "by_flag", "flag"]

OPTIONS: tuple[OwnOption, ...] = tuple(option for group in GROUPS for option in options_of(group))

OWN_OVER_MEGATRON = {
    "--load": "slime finds the step to resume by its journal, then hands Megatron the folder",
    "--ckpt-step": "slime checks that the checkpoint is there and whole before anything starts",
    "--save": "slime commits a checkpoint together with the journal",
    "--save-interval": "slime counts rollout steps, Megatron optimizer steps",
    "--eval-interval": "slime evaluates by generating answers, Megatron by a validation loss",
    "--wandb-project": "slime sends its own numbers, Megatron those of its own training loop",
}
"""Flags that Megatron has too. slime reads them; Megatron's parser does not see them."""

NATIVE_DEFAULTS: dict[str, dict[str, Any]] = {
    "megatron": {"micro_batch_size": 1, "lr": 1e-6, "dist_ckpt_optim_fully_reshardable": True},
    # A model's generation_config.json may name a temperature, a cut or a penalty. What asks for a chat completion would
    # be
    # sampled with them, and the trainer would compare its log-probabilities with those of another distribution.
    "sglang": {"sampling_defaults": "openai"},
    "router": {
        "balance_abs_threshold": 10,
        "balance_rel_threshold": 1.2,
        "log_level": "warn",
        "request_timeout_secs": 14400,
    },
}
"""Section -> dest -> value that slime gives where the user gives none; all else keeps the engine's default."""

SERVE_ROLLOUT = frozenset(option.dest for option in OPTIONS if "serve-rollout" in option.commands)
READ_BY: dict[str, tuple[frozenset[str] | None, tuple[str, ...]]] = {
    "train": (None, ("megatron", "sglang", "router")),
    "serve-rollout": (SERVE_ROLLOUT, ("sglang", "router")),
}
"""Command -> (own dests that it reads, None for all; sections whose flags it takes). Other commands take everything."""


HIDDEN = "(hidden)"
"""Stands for the value of a secret option."""


def shown(dest: str, value: Any) -> Any:
    """An option's value as it may be shown and recorded."""
    option = by_dest().get(dest)
    return HIDDEN if option is not None and option.secret and value is not None else value


def without_secrets(argv: Sequence[str]) -> list[str]:
    """A command line as it may be recorded."""
    out: list[str] = []
    hide = False
    for word in argv:
        flag, equals, _ = word.partition("=")
        secret = (option := by_flag().get(flag)) is not None and option.secret
        out.append(HIDDEN if hide and not word.startswith("--") else f"{flag}={HIDDEN}" if secret and equals else word)
        hide = secret and not equals
    return out


@functools.cache
def by_flag() -> dict[str, OwnOption]:
    return {flag: option for option in OPTIONS for flag in option.flags}


@functools.cache
def by_dest() -> dict[str, OwnOption]:
    return {option.dest: option for option in OPTIONS}


def flag(dest: str) -> str:
    """How an option of ours is written."""
    return by_dest()[dest].flag


def needed(option: OwnOption) -> list[str]:
    """All that it needs besides a policy to train: ``--use-kl-loss or --kl-coef``."""
    return [written(need) for need in option.needs if need != POLICY]


def written(need: Need) -> str:
    """As a command line would meet it."""
    names = " or ".join(map(flag, need.options))
    return f"{names} {'|'.join(need.values)}" if need.values else names
