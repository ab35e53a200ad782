"""Words for messages that several rooms write."""

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """``" (did you mean 'x'?)"`` or an empty string."""
    hits = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {hits[0]!r}?)" if hits else ""
