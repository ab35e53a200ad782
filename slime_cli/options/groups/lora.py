"""LoRA: adapters are trained in the place of the weights; docs/lora.md says how."""

from typing import Literal

from slime_cli.options.declare import AT_LEAST_1, Bounds, given, group, option

_LORA = given("lora_rank")


@group("adapters")
class Lora:
    """Train low-rank adapters beside linear layers, whose own weights stay as they are."""

    lora_rank: int | None = option(
        None, "Rank of the adapters; the weights of --hf-checkpoint are frozen.", bounds=AT_LEAST_1
    )
    lora_alpha: int = option(32, "An adapter's output is multiplied by this / rank.", bounds=AT_LEAST_1, needs=_LORA)
    lora_dropout: float = option(
        0.0,
        "Share of a layer's inputs that its adapter does not see in a training pass.",
        bounds=Bounds(ge=0, lt=1),
        needs=_LORA,
    )
    lora_target_modules: list[str] | None = option(
        None,
        "Layers with adapters, in Megatron's names (linear_qkv linear_proj linear_fc1 linear_fc2), HF's (q_proj ...) or"
        " all-linear, which is what is taken when not given.",
        needs=_LORA,
    )
    lora_sync: Literal["adapter", "merged"] = option(
        "adapter",
        "What engines get of a version: the adapter alone, which every request names, or whole weights with it merged"
        " in, by any transport.",
        needs=_LORA,
    )
