"""Checks that resolved options fit together, before anything heavy is imported: one module a subject.

:func:`check` reports every contradiction at once, each with the numbers and the fix, and returns warnings for what runs
but is likely not meant. A new check goes to the module of its subject, and there into ``TRAIN``.
"""

from collections.abc import Iterator

from slime_cli.errors import UsageError, together
from slime_cli.options.checks import (
    algorithm,
    batch,
    bounds,
    debug,
    functions,
    lora,
    needs,
    off_policy,
    phases,
    placement,
    sampling,
    schedule,
    settled,
    weights,
)
from slime_cli.options.checks.common import Check, NoEffect
from slime_cli.options.checks.placement import layout
from slime_cli.options.resolve import Resolved

__all__ = ["check", "layout"]

NUMBERS: tuple[Check, ...] = (bounds.bounds, bounds.texts)
"""The other checks rely on these: they are asked only when these have found nothing."""
ALWAYS: tuple[Check, ...] = (batch.required, placement.cluster)
"""For every command that resolves options."""
SUBJECTS = (placement, batch, algorithm, lora, off_policy, sampling, settled, schedule, weights, functions)
SUBJECTS += (debug, needs)
TRAIN = (*ALWAYS, *(check for subject in SUBJECTS for check in subject.TRAIN))


def check(resolved: Resolved) -> list[str]:
    """Warnings. Raises one UsageError with all contradictions; only `slime train` has all of them to check.

    With phases, each phase is checked: the top level alone need not make sense.
    """
    if resolved.phases:
        phases.agree(list(_phases(resolved)))
        return _once([(name, _check_phase(name, phase)) for name, phase in _phases(resolved)])
    warnings = list(resolved.warnings)
    _ask(NUMBERS, resolved, warnings)
    _ask(TRAIN if resolved.command == "train" else ALWAYS, resolved, warnings)
    return warnings


def _ask(subjects: tuple[Check, ...], resolved: Resolved, warnings: list[str]) -> None:
    """Adds to ``warnings``. Raises one UsageError with everything that must not run."""
    problems: list[UsageError] = []
    for found in (found for subject in subjects for found in subject(resolved)):
        problems.append(UsageError(*found)) if isinstance(found, tuple) else warnings.append(found)
    if problems:
        raise together(
            problems, "options do not fit together" if subjects is not NUMBERS else "options are out of range"
        )


def _once(found: list[tuple[str, list[str]]]) -> list[str]:
    """Each warning once, with the names of the phases that have it unless all have.

    An option without effect in one phase is not worth a word where it has one in another.
    """
    idle = [{flag for text in warnings if isinstance(text, NoEffect) for flag in text.flags} for _, warnings in found]
    everywhere = set.intersection(*idle)
    names: dict[str, list[str]] = {}
    for name, warnings in found:
        for warning in warnings:
            if not isinstance(warning, NoEffect) or warning.flags <= everywhere:
                names.setdefault(warning, []).append(name)
    return [text if len(of) == len(found) else f"{', '.join(of)}: {text}" for text, of in names.items()]


def _phases(resolved: Resolved) -> Iterator[tuple[str, Resolved]]:
    for index, phase in enumerate(resolved.phases):
        yield f"phase {phase['name']}", resolved.for_phase(index)


def _check_phase(name: str, phase: Resolved) -> list[str]:
    try:
        return check(phase)
    except UsageError as error:
        raise UsageError(f"{name}: {error.message}", error.fix) from None
