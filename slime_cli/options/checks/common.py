"""What the checks of every subject share.

A check is a generator over resolved options. It yields a text for a warning, or a pair, message and fix, for what must not run.
"""

from collections.abc import Callable, Iterator

from slime_cli.options.resolve import Resolved

Problem = tuple[str, str]
"""Message and fix."""
Check = Callable[[Resolved], Iterator[Problem | str]]
