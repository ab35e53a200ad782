"""Names of the advantage estimators, by what they have in common. Imports nothing: options and the trainer both read
it."""

from typing import Literal, get_args

GROUP_RELATIVE = ("grpo", "gspo", "cispo")
"""One advantage for all tokens of a response, from its group's rewards; these differ in their policy loss."""
WHITENED = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
"""Defined with advantages whitened over the global batch."""
Estimator = Literal["grpo", "gspo", "cispo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"]
ESTIMATORS: tuple[str, ...] = get_args(Estimator)
