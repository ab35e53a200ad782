"""Values out of any sense: numbers, slime's own and those of the engines that people set; texts, slime's own.

Bounds of slime's own are declared with the option. (NaN is no number of any option: ``spec.py`` refuses it.)
"""

import math
from collections.abc import Iterator

from slime_cli.options import catalogue, own
from slime_cli.options.checks.common import Problem
from slime_cli.options.declare import ABOVE_0, AT_LEAST_0, AT_LEAST_1, PORT, Bounds
from slime_cli.options.resolve import Resolved

NATIVE: dict[tuple[str, Bounds], str] = {
    ("megatron", AT_LEAST_1): """
        tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size expert_model_parallel_size
        expert_tensor_parallel_size num_layers_per_virtual_pipeline_stage decoder_first_pipeline_num_layers
        decoder_last_pipeline_num_layers micro_batch_size global_batch_size num_layers hidden_size
        ffn_hidden_size num_attention_heads num_query_groups kv_channels vocab_size seq_length
        max_position_embeddings num_experts moe_ffn_hidden_size moe_shared_expert_intermediate_size
        moe_router_topk moe_router_num_groups moe_router_group_topk q_lora_rank kv_lora_rank qk_head_dim
        qk_pos_emb_head_dim v_head_dim rotary_base recompute_num_layers lr_decay_iters seed
    """,
    ("megatron", AT_LEAST_0): """
        lr min_lr decoupled_lr decoupled_min_lr lr_warmup_init lr_warmup_iters lr_warmup_samples
        lr_wsd_decay_iters weight_decay start_weight_decay end_weight_decay adam_eps moe_aux_loss_coeff
        moe_z_loss_coeff mtp_num_layers moe_router_bias_update_rate init_method_std
    """,
    ("megatron", Bounds(ge=0, also=(math.inf,))): "clip_grad",
    ("megatron", ABOVE_0): "layernorm_epsilon rotary_scaling_factor rope_scaling_factor",
    ("megatron", Bounds(ge=0, lt=1)): "adam_beta1 adam_beta2 sgd_momentum hidden_dropout attention_dropout",
    ("megatron", Bounds(ge=0, le=1)): "lr_warmup_fraction optimizer_offload_fraction",
    ("megatron", Bounds(gt=0, le=1)): "rotary_percent",
    ("sglang", AT_LEAST_1): """
        context_length max_running_requests max_total_tokens max_queued_requests page_size dp_size ep_size
        pp_size moe_dense_tp_size cuda_graph_max_bs_decode
    """,
    ("sglang", Bounds(ge=1, also=(-1,))): "chunked_prefill_size",
    ("sglang", ABOVE_0): "schedule_conservativeness watchdog_timeout",
    ("sglang", Bounds(gt=0, le=1)): "mem_fraction_static",
    ("router", AT_LEAST_1): """
        request_timeout_secs health_check_interval_secs health_check_timeout_secs health_failure_threshold
        health_success_threshold max_payload_size
    """,
    ("router", AT_LEAST_0): "balance_abs_threshold balance_rel_threshold retry_max_retries queue_size",
    ("router", Bounds(ge=1, also=(-1,))): "max_concurrent_requests",
    ("router", Bounds(ge=0, le=1)): "cache_threshold",
    ("router", PORT): "prometheus_port",
}
"""(section, bounds) -> dests."""


def bounds(r: Resolved) -> Iterator[Problem]:
    for section, dest, allowed in _bounded():
        value = r.values(section).get(dest)
        if r.origins.get(f"{section}.{dest}") == "derived":
            continue  # what it follows from is here too
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int | float) and not allowed.allow(number):
                yield f"{_flag(section, dest)} is {number}", f"it must be {allowed}"


def _bounded() -> Iterator[tuple[str, str, Bounds]]:
    """Section, dest and bounds of every number that has some."""
    for option in own.OPTIONS:
        if option.bounds:
            yield "slime", option.dest, option.bounds
    for (section, allowed), dests in NATIVE.items():
        for dest in dests.split():
            yield section, dest, allowed


def texts(r: Resolved) -> Iterator[Problem]:
    """A script's unset variable gives an empty text, and a path after = or in a profile keeps its ~."""
    for option in own.OPTIONS:
        value = getattr(r.slime, option.dest)
        if option.type != "str" or r.origins.get(f"slime.{option.dest}", "default") == "default":
            continue
        for text in value if isinstance(value, list) else [value]:
            if text == "":
                yield f"{option.flag} is empty", "give a value, or leave the option out"
            elif isinstance(text, str) and text.startswith("~/"):
                yield (
                    f"{option.flag} is {text}, with a ~ that no shell has replaced",
                    "write the whole path, or $HOME in a command line",
                )


def _flag(section: str, dest: str) -> str:
    if section == "slime":
        return own.flag(dest)
    return catalogue.PREFIXES[section] + catalogue.load(section).by_dest[dest][0].flag[2:]
