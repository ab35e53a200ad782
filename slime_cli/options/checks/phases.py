"""Checks of options that all phases of a run must have in common, because their parts are made once for all."""

from slime_cli.errors import UsageError
from slime_cli.options import own
from slime_cli.options.resolve import Resolved

ONCE = {
    "megatron": (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "num_layers_per_virtual_pipeline_stage",
    ),
    "slime": (
        *("rm_workers", "rm_timeout", "sglang_server_concurrency", "hf_checkpoint", "custom_config_path"),
        *(option.dest for option in own.OPTIONS if option.group == "adapters"),
        *(option.dest for option in own.OPTIONS if option.group == "tracking"),
    ),
}
"""Section -> dests: process groups, reward workers, the client, the model, trackers. Engines besides, with all
their options."""


def agree(phases: list[tuple[str, Resolved]]) -> None:
    """``(name, options)`` of each. Raises UsageError for the first option that two of them have otherwise."""
    (first, one), *rest = phases
    for name, other in rest:
        for section, dests in ONCE.items():
            for dest in dests:
                if one.values(section).get(dest) != other.values(section).get(dest):
                    raise UsageError(
                        f"{first} and {name} differ in --{dest.replace('_', '-')}, which is settled once for the run",
                        "give it at the top of the profile, or as a flag",
                    )
    served = [(name, phase) for name, phase in phases if phase.slime.loss_type != "sft_loss"]
    for name, other in served[1:]:
        if other.sglang != served[0][1].sglang:
            raise UsageError(
                f"{served[0][0]} and {name} differ in SGLang's options, and the engines are started once",
                "make them equal",
            )
