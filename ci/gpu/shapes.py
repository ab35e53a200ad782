"""Sizes of the Qwen3 models that the checks of this folder make, with random weights."""

from collections.abc import Mapping

QWEN3_06B = dict(
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
)
QWEN3_4B = QWEN3_06B | dict(hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32)


def tiny(shape: Mapping[str, int]) -> str:
    """The model as ``--hf-checkpoint`` takes it."""
    more = {"rope_theta": 1000000, "initializer_range": 0.02, "max_position_embeddings": 40960}
    return "tiny:qwen3?" + "&".join(f"{name}={value}" for name, value in {**shape, **more}.items())
