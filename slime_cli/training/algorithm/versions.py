"""Which weights wrote the trained tokens of a batch: the trainer's present ones, the older ones it keeps, or others.

A token is on-policy when the present weights wrote it. Only there is the difference between the engine's and the
trainer's log-probabilities a figure of the two alone; elsewhere the policy's own change is in it too. Numpy;
torch-free.
"""

import dataclasses

import numpy as np

from slime_cli.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Writers:
    """Both bool, [R], and False wherever a token is not trained."""

    present_R: np.ndarray
    kept_R: np.ndarray
    """Written by the weights that ``--keep-old-actor`` keeps, and not by the present ones."""

    @property
    def known_R(self) -> np.ndarray:
        """The trainer has the weights that wrote the token."""
        return self.present_R | self.kept_R


def writers(
    versions_R: np.ndarray | None, mask_R: np.ndarray, *, present: int, kept: int | None, untold: int | None
) -> Writers:
    """Compares ``versions_R`` (the step of the version that wrote each token, -1 where nobody tells; None: nowhere)
    with the steps of the ``present`` and the ``kept`` weights.

    ``untold``: the step that a token counts for of which nobody tells; None: of other weights. Raises UsageError when
    weights are kept and a trained token is of neither: its old log-probability would be the wrong policy's.
    """
    told_R = np.full(len(mask_R), -1) if versions_R is None else versions_R
    steps_R = told_R if untold is None else np.where(told_R < 0, untold, told_R)
    present_R = mask_R & (steps_R == present)
    kept_R = np.zeros_like(mask_R) if kept is None else mask_R & (steps_R == kept) & ~present_R
    others = np.unique(steps_R[mask_R & ~present_R & ~kept_R])
    if kept is not None and len(others):
        named = ", ".join("unknown weights" if step < 0 else f"step {step}" for step in others.tolist())
        raise UsageError(
            f"--keep-old-actor keeps the weights of step {kept} beside the present ones of step {present}, and tokens"
            f" of this batch were written by others: {named}",
            "leave --keep-old-actor out; --use-rollout-logprobs or --use-tis weigh each token by what generated it",
        )
    return Writers(present_R, kept_R)
