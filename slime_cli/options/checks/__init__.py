"""Whether resolved options fit together, checked before anything heavy is imported: one module a subject.

:func:`check` reports every contradiction at once, each with the numbers and the fix, and returns warnings for what runs
but is likely not meant. A new check goes to the module of its subject, and there into ``TRAIN``.
"""

from collections.abc import Iterator

from slime_cli.errors import UsageError
from slime_cli.options.checks import algorithm, batch, off_policy, placement, sampling, stages
from slime_cli.options.checks.common import Check, Problem
from slime_cli.options.checks.placement import layout
from slime_cli.options.resolve import Resolved

__all__ = ["check", "layout"]

ALWAYS: tuple[Check, ...] = (batch.required, batch.positive, placement.cluster)
"""For every command that resolves options."""
TRAIN = (*ALWAYS, *placement.TRAIN, *batch.TRAIN, *algorithm.TRAIN, *off_policy.TRAIN, *sampling.TRAIN)


def check(resolved: Resolved) -> list[str]:
    """Warnings. Raises one UsageError with all contradictions; only `slime train` has all of them to check.

    With stages, each stage is checked: the top level alone need not make sense.
    """
    if resolved.stages:
        stages.agree(list(_stages(resolved)))
        return [f"{name}: {found}" for name, stage in _stages(resolved) for found in _check_stage(name, stage)]
    warnings: list[str] = []
    problems: list[Problem] = []
    for one in TRAIN if resolved.command == "train" else ALWAYS:
        for found in one(resolved):
            problems.append(found) if isinstance(found, tuple) else warnings.append(found)
    if len(problems) == 1:
        raise UsageError(*problems[0])
    if problems:
        listing = "\n".join(f"  {number}. {message} ({fix})" for number, (message, fix) in enumerate(problems, 1))
        raise UsageError(f"{len(problems)} options do not fit together:\n{listing}", "fix each as it says")
    return warnings


def _stages(resolved: Resolved) -> Iterator[tuple[str, Resolved]]:
    for index, stage in enumerate(resolved.stages):
        yield f"stage {stage['name']}", resolved.for_stage(index)


def _check_stage(name: str, stage: Resolved) -> list[str]:
    try:
        return check(stage)
    except UsageError as error:
        raise UsageError(f"{name}: {error.message}", error.fix) from None
