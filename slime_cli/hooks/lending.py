"""Samples lent to a user's function: it gets copies, and what it may change of them is carried over.

Called by the adapters beside it. Invariants: what a function may not change stays as it is, and is named; what is
carried over can be stored and trained.
"""

import contextlib
import copy
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from slime_cli.buffer.types import Sample
from slime_cli.buffer.values import plain
from slime_cli.hooks import kinds
from slime_cli.hooks.kinds import Hook
from slime_cli.hooks.protocols import Groups

_FIELDS = tuple(field.name for field in dataclasses.fields(Sample))
_ATOMS = (str, int, float, bool, type(None))


def copied(sample: Sample) -> Sample:
    """With lists of its own, and metadata all the way down."""
    out = copy.copy(sample)
    for name in _FIELDS:
        if isinstance(value := getattr(sample, name), list):
            setattr(out, name, list(value))
    out.metadata = _own(sample.metadata)
    return out


def _own(value: Any) -> Any:
    """A deep copy; of what JSON knows in a fraction of ``copy.deepcopy``'s time."""
    kind = type(value)
    if kind is dict:
        return {name: _own(inner) for name, inner in value.items()}
    if kind is list:
        return [_own(inner) for inner in value]
    return value if kind in _ATOMS else copy.deepcopy(value)


@contextlib.contextmanager
def lent(hook: Hook, groups: Groups, allowed: Sequence[str] = ()) -> Iterator[Groups]:
    """Copies of the samples for the call in the block; what it changed of them is carried over. UsageError for what it
    may not change."""
    copies = [[copied(sample) for sample in group] for group in groups]
    given = [list(group) for group in copies]
    yield given
    if sorted(map(id, flat(given))) != sorted(map(id, flat(copies))):
        raise hook.refuse("took samples out, or put others in", "what it gets are groups, and they stay whole")
    for sample, one in zip(flat(groups), flat(copies), strict=True):
        try:
            after = kinds.plain_fields(one) | {"reward": plain(one.reward)}
        except (ValueError, TypeError, RuntimeError) as error:
            raise hook.refuse(f"left something unfit in sample {sample.index}: {error}", "fix the function") from None
        changed = [name for name, value in after.items() if value != getattr(sample, name)]
        changed += [f.name for f in dataclasses.fields(one) if f.name not in after and _differ(sample, one, f.name)]
        if wrong := [name for name in changed if name not in allowed]:
            may = f"it may change {', '.join(allowed)}" if allowed else "it may look at samples, not change them"
            raise hook.refuse(f"changed {', '.join(wrong)} of sample {sample.index}", may)
        _carry(hook, sample, {name: after.get(name, getattr(one, name)) for name in changed})


def _differ(sample: Sample, one: Sample, name: str) -> bool:
    return not kinds.unchanged([getattr(sample, name)], [getattr(one, name)])


def _carry(hook: Hook, sample: Sample, values: dict[str, Any]) -> None:
    try:
        dataclasses.replace(sample, **values).check()
    except (ValueError, TypeError) as error:
        raise hook.refuse(f"left something unfit: {error}", "fix the function") from None
    for name, value in values.items():
        setattr(sample, name, value)


def flat(groups: Groups) -> list[Sample]:
    return [sample for group in groups for sample in group]
