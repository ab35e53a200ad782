"""Bounds for symbolic work, so that no answer costs a worker.

Two bounds, since neither is enough alone. :func:`within` interrupts Python code after some CPU time, and CPython's own
long integer arithmetic and regular expressions, which look for signals; it needs a main thread, which reward workers
grade in. :func:`too_large` refuses numbers by their size before anything computes them: they would fill the memory.
What both miss is left to the worker's owner, who kills it after ``--rm-timeout``.
"""

import math
import signal
import threading
from collections.abc import Callable
from typing import Any

MOST_DIGITS = 100_000
"""Numbers with more decimal digits are not computed."""


_patience = 10.0


def patience() -> float:
    """Seconds of wall time for one verdict, after which the worker's owner kills it (``--rm-timeout``)."""
    return _patience


def set_patience(seconds: float) -> None:
    """Called by the worker."""
    global _patience
    _patience = seconds


class OverTime(BaseException):
    """Raised by :func:`within`. No Exception: the libraries catch those and continue."""


def within[T](seconds: float, compute: Callable[[], T]) -> T:
    """``compute()``, or OverTime after ``seconds`` of this process's CPU time (wall time would judge the machine)."""
    if threading.current_thread() is not threading.main_thread():
        return compute()
    armed = True

    def late(number: int, frame: Any) -> None:
        if armed:
            raise OverTime

    before = signal.signal(signal.SIGPROF, late)
    try:
        signal.setitimer(signal.ITIMER_PROF, seconds, seconds / 10)  # again, where a bare except swallowed it
        try:
            return compute()
        finally:
            armed = False
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def too_large(expression: Any) -> bool:
    """True when a number in this sympy expression has more than MOST_DIGITS digits, by an estimate from its powers."""
    import sympy

    if isinstance(expression, sympy.MatrixBase):
        return any(too_large(entry) for entry in expression.flat())
    digits: dict[Any, float] = {}
    for node in sympy.postorder_traversal(expression):
        parts = [digits.get(part, 0.0) for part in node.args]
        if node.is_Number:
            size = number_digits(node)
        elif isinstance(node, sympy.Pow):
            size = max(parts[0], 1.0) * grown(parts[1]) if parts[1] else parts[0]
        elif isinstance(node, sympy.factorial):
            size = max(parts[0], 1.0) * grown(parts[0])
        else:
            size = sum(parts)
        if size > MOST_DIGITS:
            return True
        digits[node] = size
    return False


def number_digits(number: Any) -> float:
    if number.is_Rational:
        return 0.302 * max(abs(number.p).bit_length(), number.q.bit_length())
    return abs(math.log10(abs(number))) if number.is_finite and number else 0.0


def grown(digits: float) -> float:
    """A number of so many digits, as a factor."""
    return 10.0**digits if digits < 300 else math.inf
