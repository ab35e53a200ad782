"""Parts that the checks of every subject share.

A check is a generator over resolved options. It yields a text for a warning, or a pair, message and fix, for what must
not run. The line between them: what contradicts itself, or lacks something, must not run; an option that is without
effect only because of another value at hand is a warning, in one line.
"""

from collections.abc import Callable, Iterator, Sequence

from slime_cli.options.resolve import Resolved

Problem = tuple[str, str]
"""Message and fix."""
Check = Callable[[Resolved], Iterator[Problem | str]]


class NoEffect(str):
    """The warning about options that are without effect for one reason."""

    flags: frozenset[str]


def no_effect(flags: Sequence[str], why: str) -> NoEffect:
    """``why`` completes the sentence."""
    warning = NoEffect(f"{', '.join(flags)} {'has' if len(flags) == 1 else 'have'} no effect {why}")
    warning.flags = frozenset(flags)
    return warning
