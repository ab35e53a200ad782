"""Values out of any sense: numbers, slime's own and those of the engines that people set; texts, slime's own.

A new number of slime's own goes into its row here. (NaN is no number of any option: ``spec.py`` refuses it.)
"""

import math
from collections.abc import Callable, Iterator

from slime_cli.options import catalogue, own
from slime_cli.options.checks.common import Problem
from slime_cli.options.resolve import Resolved

RANGES: dict[str, Callable[[float], bool]] = {
    "at least 1": lambda x: 1 <= x < math.inf,
    "above 0": lambda x: 0 < x < math.inf,
    "at least 0": lambda x: 0 <= x < math.inf,
    "at least 0, or inf": lambda x: x >= 0,
    "between 0 and 1": lambda x: 0 <= x <= 1,
    "at least 0 and below 1": lambda x: 0 <= x < 1,
    "above 0 and at most 1": lambda x: 0 < x <= 1,
    "-1 or at least 1": lambda x: x == -1 or x >= 1,
    "between 1 and 65535": lambda x: 1 <= x <= 65535,
}
BOUNDS: dict[tuple[str, str], str] = {
    (
        "slime",
        "at least 1",
    ): (
        """
        actor_num_nodes actor_num_gpus_per_node rollout_num_gpus_per_engine rollout_batch_size n_samples_per_prompt
        num_steps_per_rollout update_weights_interval max_tokens_per_gpu save_interval eval_interval
        n_samples_per_eval_prompt rollout_max_response_len rollout_max_prompt_len eval_max_response_len
        over_sampling_batch_size sglang_server_concurrency rm_workers num_rollout num_epoch keep_rollouts
        keep_checkpoints max_groups_without_progress log_probs_chunk_size ref_update_interval"""
    ),
    ("slime", "above 0"): "rm_timeout opd_teacher_timeout",
    (
        "slime",
        "at least 0",
    ): (
        """
        rollout_num_gpus rollout_seed num_critic_only_steps kl_coef kl_loss_coef opd_kl_coef opsm_delta
        rs_veto_threshold eval_temperature ckpt_step rollout_stop_token_ids"""
    ),
    ("slime", "at least 0, or inf"): "value_clip max_logprob_diff",
    ("slime", "between 0 and 1"): "gamma lambd",
    ("slime", "above 0 and at most 1"): "rollout_top_p eval_top_p",
    ("slime", "-1 or at least 1"): "rollout_top_k",
    ("slime", "between 1 and 65535"): "sglang_router_port",
    (
        "megatron",
        "at least 1",
    ): (
        """
        tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size expert_model_parallel_size
        expert_tensor_parallel_size num_layers_per_virtual_pipeline_stage decoder_first_pipeline_num_layers
        decoder_last_pipeline_num_layers micro_batch_size global_batch_size num_layers hidden_size ffn_hidden_size
        num_attention_heads num_query_groups kv_channels vocab_size seq_length max_position_embeddings num_experts
        moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_router_topk moe_router_num_groups
        moe_router_group_topk q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rotary_base
        recompute_num_layers lr_decay_iters seed"""
    ),
    (
        "megatron",
        "at least 0",
    ): (
        """
        lr min_lr decoupled_lr decoupled_min_lr lr_warmup_init lr_warmup_iters lr_warmup_samples lr_wsd_decay_iters
        weight_decay start_weight_decay end_weight_decay adam_eps moe_aux_loss_coeff moe_z_loss_coeff mtp_num_layers
        moe_router_bias_update_rate init_method_std"""
    ),
    ("megatron", "at least 0, or inf"): "clip_grad",
    ("megatron", "above 0"): "layernorm_epsilon rotary_scaling_factor rope_scaling_factor",
    ("megatron", "at least 0 and below 1"): "adam_beta1 adam_beta2 sgd_momentum hidden_dropout attention_dropout",
    ("megatron", "between 0 and 1"): "lr_warmup_fraction optimizer_offload_fraction",
    ("megatron", "above 0 and at most 1"): "rotary_percent",
    (
        "sglang",
        "at least 1",
    ): (
        """
        context_length max_running_requests max_total_tokens max_queued_requests page_size dp_size ep_size pp_size
        moe_dense_tp_size cuda_graph_max_bs_decode"""
    ),
    ("sglang", "-1 or at least 1"): "chunked_prefill_size",
    ("sglang", "above 0"): "schedule_conservativeness watchdog_timeout",
    ("sglang", "above 0 and at most 1"): "mem_fraction_static",
    (
        "router",
        "at least 1",
    ): (
        """
        request_timeout_secs health_check_interval_secs health_check_timeout_secs health_failure_threshold
        health_success_threshold max_payload_size"""
    ),
    ("router", "at least 0"): "balance_abs_threshold balance_rel_threshold retry_max_retries queue_size",
    ("router", "-1 or at least 1"): "max_concurrent_requests",
    ("router", "between 0 and 1"): "cache_threshold",
    ("router", "between 1 and 65535"): "prometheus_port",
}
"""(section, range) -> dests."""


def bounds(r: Resolved) -> Iterator[Problem]:
    for (section, range_), dests in BOUNDS.items():
        values = getattr(r, section)
        for dest in dests.split():
            value = values.get(dest)
            if r.origins.get(f"{section}.{dest}") == "derived":
                continue  # what it follows from is here too
            for number in value if isinstance(value, list) else [value]:
                if isinstance(number, int | float) and not RANGES[range_](number):
                    yield f"{_flag(section, dest)} is {number}", f"it must be {range_}"


def texts(r: Resolved) -> Iterator[Problem]:
    """A script's unset variable gives an empty text, and a path after = or in a profile keeps its ~."""
    for option in own.OPTIONS:
        value = r.slime.get(option.dest)
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
