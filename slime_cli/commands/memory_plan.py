"""The memory of each phase of a run, predicted from its options: ``slime train`` writes it down when it starts, and
``slime profile memory`` shows it, of a run or before one."""

import pathlib

from slime_cli import manifests
from slime_cli.commands import arguments, preflight
from slime_cli.errors import UsageError
from slime_cli.hardware import device as hardware
from slime_cli.manifests import layout
from slime_cli.options import checks, memory_phases
from slime_cli.options.resolve import Resolved, resolve

Plan = dict[str, dict[str, dict[str, memory_phases.Parts]]]
"""``[the run's phase][phase of a rollout][side]``."""


def of(resolved: Resolved) -> Plan:
    """Without those whose model is not known."""
    derived = preflight.derived(resolved)
    names = [phase["name"] for phase in resolved.phases] or ["train"]
    each = zip(names, preflight.phases(resolved), strict=True)
    found = {name: memory_phases.predicted(options, derived, hardware.memory()) for name, options in each}
    return {name: phases for name, phases in found.items() if phases is not None}


def of_words(words: list[str]) -> Plan:
    """For the command line of a `slime train`. Raises UsageError where the model's numbers are not known."""
    line = arguments.split(words)
    resolved = resolve(line.rest, line.profiles, "train")
    checks.check(resolved)
    plan = of(resolved)
    if not plan:
        raise UsageError(
            "the model's numbers are not known", "give --hf-checkpoint with a config.json, or a profile of models/"
        )
    return plan


def write(resolved: Resolved, run_dir: pathlib.Path) -> None:
    manifests.write_json(run_dir / layout.MEMORY, of(resolved))
