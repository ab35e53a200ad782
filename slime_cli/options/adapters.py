"""LoRA adapters: the layers that they are beside. Torch-free.

Megatron has the projections of queries, keys and values in one linear layer, and those of gate and up in another, so an
adapter has one A for all that are in a layer. In HF's names (PEFT's and SGLang's) each projection has that A, and its
own rows of B.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from slime_cli.errors import UsageError
from slime_cli.options.groups import SlimeOptions

MODULES: dict[str, tuple[str, ...]] = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
"""Megatron's name of a linear layer -> HF's names of what is in it."""
ALL = "all-linear"
"""PEFT's word for all of them."""
_OTHERS = {
    "multi_latent_attention": "latent attention",
    "num_experts": "a mixture of experts",
    "experimental_attention_variant": "linear attention",
    "post_self_attn_layernorm": "norms behind its linear layers",
}
"""Megatron's option of an architecture -> what adapters were not tried beside."""


def modules(names: Sequence[str]) -> list[str]:
    """Megatron's names for those that ``--lora-target-modules`` lists, Megatron's or HF's. Raises UsageError."""
    flag = f"--lora-target-modules {' '.join(names)}"
    of_hf = {name for group in MODULES.values() for name in group}
    if unknown := [name for name in names if name not in MODULES and name not in of_hf and name != ALL]:
        known = f"{', '.join(MODULES)}; in HF's names {', '.join(sorted(of_hf))}; or {ALL}"
        raise UsageError(f"{flag}: no layer is called {unknown[0]}", f"known are {known}")
    chosen = [module for module, group in MODULES.items() if {module, ALL, *group} & set(names)]
    for module in chosen:
        given = set(MODULES[module]) & set(names)
        if module not in names and ALL not in names and given != set(MODULES[module]):
            raise UsageError(
                f"{flag}: Megatron has {', '.join(MODULES[module])} in one layer, {module}, which is adapted whole",
                f"name all of them, or {module}",
            )
    return chosen


def served(s: SlimeOptions) -> dict[str, Any]:
    """SGLang server arguments (by dest) of engines that get this run's adapters by name; none where they do not."""
    if s.lora_rank is None or s.lora_sync != "adapter":
        return {}
    names = in_hf(modules(s.lora_target_modules or [ALL]))
    # Of the versions one is asked for at a time, and the base by health checks; the third is for what ends meanwhile.
    return {
        "enable_lora": True,
        "max_lora_rank": s.lora_rank,
        "lora_target_modules": names,
        "max_loras_per_batch": 3,
    }


def in_hf(names: Collection[str]) -> list[str]:
    """HF's names of what is in these layers of Megatron's."""
    return [name for module, group in MODULES.items() if module in names for name in group]


def require_plain(architecture: Mapping[str, Any], model: str) -> None:
    """Raises UsageError for a model beside whose layers no adapter is trained. ``architecture``: its options, by dest,
    in Megatron's names."""
    for dest, what in _OTHERS.items():
        if architecture.get(dest):
            raise UsageError(
                f"--lora-rank: {model} has {what}, beside which slime trains no adapters",
                "leave it out; dense models such as Qwen2.5, Qwen3 and Llama 3 have them",
            )
