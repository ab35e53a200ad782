"""Layouts of four ranks train as one process does, and resume from each other's checkpoints: the rows of ``make
layouts`` that take seconds.

1. Loss, gradient norm (the critic's too) and every weight after two rollouts, to the bound of the table in
   ``docs/parallelism.md``.
2. The comparison means something: two rollouts move the weights by far more than the bound, and a checkpoint without
   the optimizer's moments leads elsewhere.
"""

import pytest

import layout_launch
from bench import layouts

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1600)]
ALONE = sorted({case.alone for case in layout_launch.MATRIX})


@pytest.mark.parametrize("case", layout_launch.MATRIX, ids=lambda case: f"{case.name}-{case.model}-{case.estimator}")
def test_a_layout_of_four_trains_as_one_process_does(case: layouts.Case) -> None:
    found = layout_launch.ranks(case.job)
    assert len(found) == 4
    assert layouts.max_rel_diff(found, layout_launch.ranks(case.alone)) <= layouts.BOUND


@pytest.mark.parametrize("job", ALONE)
def test_two_rollouts_move_the_weights(job: str) -> None:
    (alone,) = layout_launch.ranks(job)
    assert alone["moved"] > 100 * layouts.BOUND
    assert alone.get("without_moments", 1) > 10 * layouts.BOUND
