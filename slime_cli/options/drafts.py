"""Engines that draft with the model's own layers of multi-token prediction (MTP). Torch-free.

SGLang 0.5.16 takes the model itself as the draft model for some architectures alone (DeepSeek's and GLM's); of others
(MiMo) it must be told.
"""

from collections.abc import Mapping
from typing import Any

from slime_cli.errors import UsageError

OWN = ("EAGLE", "NEXTN")
"""Algorithms that draft with layers of the model, where no other model is named for it."""
_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")


def options(given: Mapping[str, Any], config: dict[str, Any], model: str) -> dict[str, str]:
    """Options for SGLang besides ``given``, both by dest; ``config``: the fields of the language model
    in the folder ``model``.

    Raises UsageError where the model has no layers that could draft."""
    algorithm = given.get("speculative_algorithm")
    if algorithm not in OWN or given.get("speculative_draft_model_path"):
        return {}
    if not any(config.get(field) for field in _LAYERS):
        raise UsageError(
            f"--sglang-speculative-algorithm {algorithm}: {model} has no layers of multi-token prediction to draft with"
            f" (no {_LAYERS[0]} in its config.json)",
            "leave it out, or name a model that drafts: --sglang-speculative-draft-model-path",
        )
    return {"speculative_draft_model_path": model}
