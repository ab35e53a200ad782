"""Checks of LoRA adapters, and of the options that exclude them."""

from collections.abc import Iterator

from slime_cli.errors import UsageError
from slime_cli.options import adapters, own
from slime_cli.options.checks.common import Problem
from slime_cli.options.resolve import Resolved

OTHERS = {
    "only_train_params_name_list": "adapters are all that is trained",
    "freeze_params_name_list": "adapters are all that is trained",
    "enable_mtp_training": "multi-token-prediction (MTP) layers have no adapters and would be trained themselves",
    "custom_model_provider_path": "adapters are beside the layers of slime's own model",
    "ref_load": "a checkpoint of other weights is no adapter over the same base; the reference is the base itself",
    "opd_teacher_load": "a checkpoint of other weights is no adapter over the same base",
    "keep_old_actor": "a resume could not put a published version, whose adapter is merged, back beside its base",
}
"""slime's option -> why it can't be given beside ``--lora-rank``."""


def together(r: Resolved) -> Iterator[Problem]:
    s = r.slime
    if s.lora_rank is None:
        return
    rank = f"--lora-rank {s.lora_rank}"
    for dest, why in OTHERS.items():
        if getattr(s, dest):
            yield f"{own.flag(dest)} with {rank}: {why}", "leave out one of the two"
    if s.advantage_estimator == "ppo" and s.loss_type != "sft_loss":
        yield f"--advantage-estimator ppo with {rank}: its critic would train whole weights", "grpo has no critic"
    tensor = r.megatron.get("tensor_model_parallel_size", 1)
    if s.lora_rank % tensor:
        yield (
            f"{rank} is not a multiple of --tensor-model-parallel-size {tensor}, whose ranks share its rows",
            f"--lora-rank {-(-s.lora_rank // tensor) * tensor}",
        )
    try:
        adapters.modules(s.lora_target_modules or [adapters.ALL])
        adapters.require_plain(r.megatron, "the model that Megatron's options describe")
    except UsageError as error:
        yield error.message, error.fix


def by_name(r: Resolved) -> Iterator[Problem]:
    """Options that exclude engines which get adapters alone."""
    s = r.slime
    if s.lora_rank is None or s.lora_sync != "adapter" or not s.generates:
        return
    aborts = "requests are aborted, after which SGLang (0.5.16) can't unload the adapter that they named"
    files = f"--update-weight-transport {s.update_weight_transport}"
    refused = {
        files: s.update_weight_transport != "disk" and "it sends whole weights",
        "--update-weight-mode delta": s.update_weight_mode == "delta" and "a delta is of whole weights",
        "--update-weight-local-checkpoint-dir": s.update_weight_local_checkpoint_dir
        and "engines load adapters as they are published",
        "--in-flight abort": s.in_flight == "abort" and aborts,
        "--partial-rollout": s.partial_rollout and aborts,
        "--dynamic-sampling-filter-path": s.dynamic_sampling_filter_path and aborts,
        "--schedule async": s.schedule == "async" and aborts,
        "--in-flight pause": s.in_flight == "pause" and "a request keeps the adapter that it began with",
        "--offload-rollout": s.offload_rollout
        and "an engine that gives its memory back loses its base, which no version brings again",
        f"--sglang-dp-size {r.sglang.get('dp_size')}": (r.sglang.get("dp_size") or 1) > 1
        and "SGLang (0.5.16) loads adapters into one copy of a model only",
    }
    for flag, why in refused.items():
        if why:
            yield f"{flag} with --lora-rank {s.lora_rank}: {why}", "leave it out, or give --lora-sync merged"


TRAIN = (together, by_name)
