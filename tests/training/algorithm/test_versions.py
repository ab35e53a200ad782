"""Whose weights wrote which token, against a loop over the tokens in plain Python."""

import numpy as np
import pytest

from slime_cli.errors import UsageError
from slime_cli.training.algorithm import versions


def by_hand(told: int, trained: bool, present: int, kept: int | None, untold: int | None) -> tuple[bool, bool]:
    step = untold if told == -1 else told
    if not trained or step is None:
        return False, False
    return step == present, step != present and step == kept


@pytest.mark.parametrize("untold", [None, 3, 5])
@pytest.mark.parametrize("kept", [None, 3, 5])
def test_every_token_counts_for_the_weights_of_its_version(kept, untold):
    rng = np.random.default_rng(0)
    mask_R = rng.random(400) > 0.3
    versions_R = np.where(mask_R, rng.choice([3, 5] if kept == 3 else [5], 400), rng.integers(-1, 9, 400))
    if untold is not None and (kept is None or untold in (kept, 5)):
        versions_R[::7] = -1
    if kept is None:
        versions_R[::5] = rng.integers(0, 9, 80)
    got = versions.writers(versions_R.astype(np.int32), mask_R, present=5, kept=kept, untold=untold)
    want = [by_hand(v, m, 5, kept, untold) for v, m in zip(versions_R.tolist(), mask_R.tolist())]
    assert list(zip(got.present_R.tolist(), got.kept_R.tolist())) == want
    assert got.known_R.tolist() == [any(pair) for pair in want] and got.present_R.any()


@pytest.mark.parametrize("kept", [None, 3])
def test_where_nobody_tells_every_token_counts_as_said(kept):
    mask_R = np.array([True, False, True])
    assert versions.writers(None, mask_R, present=5, kept=kept, untold=5).present_R.tolist() == [True, False, True]
    assert not versions.writers(None, mask_R, present=5, kept=None, untold=None).known_R.any()
    if kept is not None:
        assert versions.writers(None, mask_R, present=5, kept=kept, untold=kept).kept_R.tolist() == [True, False, True]


def test_a_version_that_is_not_kept_is_an_error_that_names_it_but_not_at_tokens_that_are_not_trained():
    mask_R = np.array([True, True, True, False])
    with pytest.raises(UsageError, match="step 3 beside the present ones of step 5.*by others: step 2, step 4$") as e:
        versions.writers(np.array([2, 5, 4, 1]), mask_R, present=5, kept=3, untold=3)
    assert "--use-tis" in e.value.fix
    with pytest.raises(UsageError, match="by others: unknown weights$"):
        versions.writers(np.array([3, 5, -1, -1]), mask_R, present=5, kept=3, untold=None)
    assert versions.writers(np.array([3, 5, 3, 1]), mask_R, present=5, kept=3, untold=3).kept_R.tolist() == [
        True,
        False,
        True,
        False,
    ]
