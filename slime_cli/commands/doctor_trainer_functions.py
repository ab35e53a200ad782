"""Contract tests of users' functions that run in trainer ranks. Called by :mod:`slime_cli.commands.doctor_function`.

Each gets the loaded function and its ``args``, calls it on made-up numbers through the code of the run, and says what
came back. Importing this module costs no torch; what a test needs it imports itself.
"""

from collections.abc import Callable, Iterator
from typing import Any

from slime_cli.hooks.kinds import Hook
from slime_cli.hooks.protocols import Args

Said = Iterator[str]


def of_trainer(hook: Hook, args: Args) -> Said:
    yield "its signature fits; a trainer rank calls it, so its answer is checked when a phase runs"


def advantage(hook: Hook, args: Args) -> Said:
    import numpy as np

    from slime_cli.training.algorithm import user_weights

    shape, _ = _shape()
    data = {"rewards": np.array([1.0, 0.0]), "group_index": np.array([0, 0]), "sample_index": np.array([0, 1])}
    data |= {"response_lengths": shape.response_lengths_N, "loss_mask": shape.mask_R, "kl": None, "values": None}
    data["rollout_log_probs"] = np.linspace(-1.5, -0.2, 5)
    advantages_R, _ = user_weights.advantages(hook, args, shape, data)
    yield f"advantages of 5 tokens of 2 samples: {np.round(advantages_R, 3).tolist()}"


def tis(hook: Hook, args: Args) -> Said:
    import numpy as np

    from slime_cli.training.algorithm import user_weights

    shape, lengths_N = _shape()
    old_R, rollout_R = np.linspace(-1, -0.1, 5), np.linspace(-1.5, -0.2, 5)
    weights_R, metrics = user_weights.importance(hook, args, lengths_N, old_R, rollout_R, shape)
    named = ", ".join(metrics) or "none"
    yield f"weights of 5 tokens of 2 samples: {np.round(weights_R, 3).tolist()}; metrics: {named}"


def pg_loss_reducer(hook: Hook, args: Args) -> Said:
    import numpy as np

    from slime_cli.training.algorithm import user_weights

    shape, lengths_N = _shape()
    weights_R = user_weights.reduction(hook, lengths_N, shape.response_lengths_N, shape.mask_R, False)
    yield f"weights of 5 tokens of 2 samples: {np.round(weights_R, 3).tolist()}"


def data_postprocess(hook: Hook, args: Args) -> Said:
    import numpy as np

    from slime_cli.training.algorithm import user_weights

    shape, lengths_N = _shape()
    numbers = {"rewards": np.array([1.0, 0.0]), "total_lengths": lengths_N, "truncated": np.array([0, 0])}
    numbers |= {"sample_indices": np.array([0, 1]), "group_indices": np.array([0, 0])}
    log_probs = {"log_probs": np.linspace(-1, -0.1, 5), "rollout_log_probs": np.linspace(-1.5, -0.2, 5)}
    mask_R = user_weights.masks(hook, args, 0, shape.mask_R, shape.response_lengths_N, log_probs, numbers)
    yield f"of {int(shape.mask_R.sum())} trained tokens, {int(mask_R.sum())} are still trained"


def _shape() -> tuple[Any, Any]:
    import numpy as np

    from slime_cli.training.algorithm.advantages import Shape

    return Shape(np.array([3, 2]), np.array([True, False, True, True, True])), np.array([5, 4])


CONTRACTS: dict[str, Callable[[Hook, Args], Said]] = {
    "tis": tis,
    "pg_loss_reducer": pg_loss_reducer,
    "data_postprocess": data_postprocess,
    "loss": of_trainer,
    "advantage": advantage,
    "model_provider": of_trainer,
    "megatron_init": of_trainer,
    "before_log_prob": of_trainer,
    "before_train_step": of_trainer,
}
