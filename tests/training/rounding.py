"""How far two float32 computations of one number may be apart, whatever the processor. For all tests that compare
training.

Layouts, packings, thread counts and instruction sets add up the same terms in other orders and with other instructions
(a fused multiply-add rounds once, not twice). A sum of n rounded terms is off by about sqrt(n) roundings of the terms'
size, however it is added (N. Higham, "Accuracy and Stability of Numerical Algorithms", 2nd edition, section 2.8). So
numbers are compared with sqrt(n) roundings; a wider bound would hide a fault, and a narrower one fails on some
processor.

That is right only where a number moves no faster than the weights behind it. Adam with its usual epsilon of 1e-8 breaks
it: its first steps are the signs of gradients, and one that is nothing but rounding moves a weight by the whole
learning rate. Cases therefore train with :data:`ADAM_EPSILON`, and ``test_layouts.py`` moves every weight by one
rounding to see that it is so.
"""

import math

import pytest

EPSILON = {"float32": 2.0**-23, "float64": 2.0**-52}
"""Distance from 1 to the next number."""
TERMS = 400
"""No sum behind a compared number is longer: the batch of ``layout_cases.py`` has fewer tokens, and no matrix as many
columns."""
ADAM_EPSILON = 1e-4
"""Far above the rounding of a gradient, far below a gradient (1e-2 at these sizes): Adam's step is then as smooth as
the loss."""


def bound(dtype: str = "float32", terms: int = TERMS) -> float:
    """Relative to the size of the terms."""
    return math.sqrt(terms) * EPSILON[dtype]


def close(want, size: float = 1.0):
    """What equals ``want`` (a number, or a dict of such) within rounding of terms as large as it or as ``size``:
    advantages, log-probabilities and gradient norms are of size 1, also where their sum is small."""
    return pytest.approx(want, rel=bound(), abs=size * bound())
