"""Which options a resumed run may change: those that do not rewrite its past.

slime's own options say so where they are declared. Of the engines' options these may change: how fast, in how much
memory, how long until given up, what is logged. All others say which model is trained, on what data, or how; and one
that is new here counts among them until somebody has looked at it.
"""

import fnmatch
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from slime_cli.errors import UsageError
from slime_cli.options import catalogue, derive, own
from slime_cli.options.layers import SECTIONS, from_map
from slime_cli.options.resolve import Resolved

FREE: dict[str, str] = {
    "megatron": """
        micro_batch_size recompute_* distribute_saved_activations moe_layer_recompute async_save ckpt_fully_parallel_*
        dist_ckpt_workers verify_integrity log_* moe_per_layer_logging barrier_with_L1_time distributed_timeout_minutes
        overlap_* ddp_num_buckets ddp_bucket_size nccl_ub use_sharp high_priority_stream_groups disable_jit_fuser
        pin_cpu_grads pin_cpu_params
    """,
    "sglang": """
        mem_fraction_static max_running_requests max_queued_requests max_total_tokens max_prefill_tokens
        prefill_max_requests chunked_prefill_size enable_dynamic_chunking schedule_policy schedule_conservativeness
        retraction_policy page_size *radix_cache radix_eviction_policy disable_overlap_schedule
        num_continuous_decode_steps scheduler_recv_interval enable_mixed_chunk dist_timeout *watchdog_timeout
        sleep_on_idle numa_node gc_* log_* decode_log_interval show_time_cost enable_metrics* enable_mfu_metrics
        *_buckets bucket_* crash_dump_folder enable_trace trace_modules otlp_traces_endpoint export_metrics_*
        enable_request_time_stats_logging warmups cuda_graph_* *_cuda_graph disable_cuda_graph_padding
        enable_torch_compile torch_compile_max_bs pp_size pp_max_micro_batch_size pp_async_batch_depth dp_size ep_size
        load_balance_method enable_dp_attention enable_dp_lm_head moe_dense_tp_size tokenizer_worker_num
        detokenizer_worker_num stream_interval batch_notify_size enable_memory_saver enable_*weights_cpu_backup
        weight_loader_* download_dir enable_hierarchical_cache hicache_* cpu_offload_gb offload_*
        disable_custom_all_reduce enable_symm_mem enable_nccl_nvls pre_warm_nccl attention_backend
        *_attention_backend sampling_backend moe_runner_backend moe_a2a_backend enable_cache_report
        enable_return_routed_experts
    """,
    "router": "*",
}
"""Section -> patterns of dests."""
CUSTOM = "custom"
"""Beside the sections: what ``--custom-config-path`` holds for users' functions."""
OF_THE_MODEL = "model_path tokenizer_path chat_template reasoning_parser tool_call_parser".split()
"""Options of the router that say what a request means."""


class Change(NamedTuple):
    """An option that differs from the attempt before."""

    where: str
    """The phase that has it, or an empty string."""
    section: str
    dest: str
    before: Any
    now: Any

    @property
    def name(self) -> str:
        """As ``run.json`` has it."""
        return f"{f'{self.where}: ' * bool(self.where)}{self.section}.{self.dest}"

    def __str__(self) -> str:
        before = _shown(self.section, self.dest, self.before)
        now = _shown(self.section, self.dest, self.now)
        return f"{f'{self.where}: ' * bool(self.where)}{_flag(self.section, self.dest)} was {before}, now {now}"


def free(section: str, dest: str) -> bool:
    """A resumed run may have another value. What only users' functions read may, as their code may: it is said."""
    if section == CUSTOM:
        return True
    if section == "slime":
        return dest in own.by_dest() and own.by_dest()[dest].resume == "free"
    if section == "router" and dest in OF_THE_MODEL:
        return False
    return any(fnmatch.fnmatchcase(dest, pattern) for pattern in FREE[section].split())


def recorded(resolved: Resolved) -> dict[str, Any]:
    """The options as ``run.json`` has them."""
    ours = {dest: own.shown(dest, value) for dest, value in resolved.values("slime").items()}
    natives = {name: resolved.values(name) for name in SECTIONS if name != "slime"}
    return _plain({"slime": ours} | natives | {"phases": resolved.phases, "custom": resolved.custom})


def _plain(value: Any) -> Any:
    """As it comes back from JSON, which has no infinity."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int) or isinstance(value, float) and math.isfinite(value):
        return value
    return str(value)


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Options that differ between two that were :func:`recorded`. Raises UsageError for other phases."""
    found = list(_differences("", {name: _known(name, before.get(name, {})) for name in SECTIONS}, now))
    found += _differences("", {CUSTOM: before.get(CUSTOM, {})}, now, sections=(CUSTOM,))
    old, new = before.get("phases", before.get("stages")) or [], now["phases"]
    names = [[phase["name"] for phase in phases] for phases in (old, new)]
    if names[0] != names[1]:
        said = [", ".join(each) or "none" for each in names]
        raise UsageError(
            f"the profile's phases were {said[0]}, now they are {said[1]}",
            "choose another --run-dir, or start with the same phases to resume",
        )
    for one, other in zip(old, new, strict=True):
        found += _differences(f"phase {one['name']}", *(_sections(phase) for phase in (one, other)))
    return found


def _known(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """With what options were that slime did not have yet: their defaults, or what follows from others."""
    if section != "slime":
        return dict(values)
    known = {option.dest: values.get(option.dest, option.default) for option in own.OPTIONS}
    filled = derive.derived(own.SlimeOptions(**known), {}, {})
    new = known.keys() - values.keys()
    return known | {dest: value for (_, dest), value in filled.items() if dest in new} | dict(values)


def _sections(phase: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    for (section, dest), value in from_map(dict(phase), f"phase {phase['name']}").items():
        found[section][dest] = value
    return found


def _differences(
    where: str, before: Mapping[str, Any], now: Mapping[str, Any], *, sections: Sequence[str] = SECTIONS
) -> Iterator[Change]:
    for section in sections:
        old, new = before[section], now[section]
        for dest in sorted(old.keys() | new.keys()):
            if old.get(dest) != new.get(dest):
                yield Change(where, section, dest, old.get(dest), new.get(dest))


def _flag(section: str, dest: str) -> str:
    if section == CUSTOM:
        return f"{own.flag('custom_config_path')}: {dest}"
    if section == "slime":
        return own.flag(dest) if dest in own.by_dest() else f"--{dest.replace('_', '-')}"
    return catalogue.PREFIXES[section] + dest.replace("_", "-")


def _shown(section: str, dest: str, value: Any) -> str:
    option = own.by_dest().get(dest) if section == "slime" else None
    if option and not option.takes_value:
        return "given" if value == option.set_by(option.flag) else "not given"
    if value is None:
        return "not given"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
