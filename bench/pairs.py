"""Times that are compared within one run. They are taken in turns, so that a machine that slows down for a while slows
down all of them, and a ratio is the median over rounds, so that what one round suffered alone is left out."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

WARM_UP = 2
"""Rounds that are not counted."""

Times = dict[str, list[float]]
"""Kind -> seconds, one a round."""


def interleaved(kinds: Mapping[str, Callable[[], object]], rounds: int) -> Times:
    """Every kind once a round; each takes every place in the order equally often."""
    names = list(kinds)
    times: Times = {name: [] for name in names}
    for number in range(WARM_UP + rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            start = time.perf_counter()
            kinds[name]()
            if number >= WARM_UP:
                times[name].append(time.perf_counter() - start)
    return times


def ratio(one: Sequence[float], other: Sequence[float]) -> float:
    """Median of the rounds' ratios."""
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


def medians(times: Times) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in times.items()}
