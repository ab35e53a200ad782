"""Ranks, engines and the devices that they are on. :func:`layout` is the one place that turns parallel sizes into ranks
and engines."""

from collections.abc import Iterator

from slime_cli.options.checks.common import Problem, no_effect
from slime_cli.options.checks.functions import of_user
from slime_cli.options.resolve import Resolved


def layout(resolved: Resolved) -> dict[str, int]:
    """Parallel sizes of the trainer, its ranks, and the number of engines. dp is 0 when the sizes do not divide."""
    slime = resolved.slime
    megatron = resolved.megatron
    tp = megatron.get("tensor_model_parallel_size", 1)
    pp = megatron.get("pipeline_model_parallel_size", 1)
    cp = megatron.get("context_parallel_size", 1)
    world = slime.actor_num_nodes * slime.actor_num_gpus_per_node
    model = max(tp * pp * cp, 1)
    return {
        "tp": tp,
        "pp": pp,
        "cp": cp,
        "dp": 0 if world % model else world // model,
        "ep": megatron.get("expert_model_parallel_size", 1),
        "world_size": world,
        "engine_tp": slime.rollout_num_gpus_per_engine,
        "engines": (slime.rollout_num_gpus or 0) // max(slime.rollout_num_gpus_per_engine, 1),
    }


def cluster(r: Resolved) -> Iterator[Problem | str]:
    devices = r.slime.rollout_num_gpus or 0
    each = r.slime.rollout_num_gpus_per_engine
    endpoint = r.slime.rollout_endpoint
    if each > 0 and devices % each:
        yield f"--rollout-num-gpus {devices} is not a multiple of --rollout-num-gpus-per-engine {each}", "change one"
    if endpoint and r.slime.colocate:
        yield (
            "--colocate and --rollout-endpoint exclude each other",
            "engines of another process cannot be moved: keep one",
        )
    if endpoint:
        unused = [
            f"--{section}-{dest.replace('_', '-')}"
            for section in ("sglang", "router")
            for dest in getattr(r, section)
            if r.origins[f"{section}.{dest}"] == "flag"
        ]
        own = ("rollout_num_gpus", "sglang_router_ip", "sglang_router_port")
        unused += [f"--{dest.replace('_', '-')}" for dest in own if r.origins[f"slime.{dest}"] == "flag"]
        if unused:
            yield no_effect(unused, "with --rollout-endpoint: they are for `slime serve-rollout`")
    elif devices == 0 and r.slime.loss_type != "sft_loss" and not r.slime.debug_train_only:
        yield (
            "--rollout-num-gpus is 0 and there is no --rollout-endpoint",
            "something must generate: give one of the two",
        )
    if r.slime.colocate and not endpoint and devices > layout(r)["world_size"]:
        yield (
            f"--colocate has {layout(r)['world_size']} devices, --rollout-num-gpus is {devices}",
            "leave the latter out",
        )


def offload(r: Resolved) -> Iterator[Problem | str]:
    s = r.slime
    sides = (("train", s.offload_train, s.no_offload_train), ("rollout", s.offload_rollout, s.no_offload_rollout))
    for side, _, stays in sides:
        if stays and not s.offload:
            yield no_effect([f"--no-offload-{side}"], "without --offload")
    for side, goes, stays in sides:
        if goes and stays:
            yield f"--offload-{side} and --no-offload-{side} exclude each other", "keep one"
    wanted = [f"--offload-{side}" for side, goes, _ in sides if goes]
    if wanted and s.loss_type != "sft_loss" and s.schedule != "sync":
        yield (
            f"{' and '.join(wanted)} with --schedule {s.schedule}: engines and trainer work at the same time, and both"
            " need their memory",
            "give --schedule sync, or leave it out",
        )
    if s.offload_rollout and of_user(s.rollout_function_path):
        yield (
            "--offload-rollout with a --rollout-function-path of yours: it may ask engines that have no memory",
            "leave one of the two out",
        )
    if s.offload_train and r.megatron.get("optimizer_cpu_offload"):
        yield "--offload-train has less to do with --optimizer-cpu-offload: that part is in the host's memory always"


def parallel(r: Resolved) -> Iterator[Problem | str]:
    sizes = layout(r)
    megatron = r.megatron
    tp, pp, cp, ep, world = (sizes[name] for name in ("tp", "pp", "cp", "ep", "world_size"))
    if sizes["dp"] == 0:
        yield (
            (
                f"{world} trainer ranks ({r.slime.actor_num_nodes} nodes x {r.slime.actor_num_gpus_per_node})"
                f" cannot be split into tensor {tp} x pipeline {pp} x context {cp} = {tp * pp * cp}"
            ),
            "change --actor-num-gpus-per-node or the parallel sizes",
        )
    expert_tp = megatron.get("expert_tensor_parallel_size") or tp
    if ep > 1 and world % (expert_tp * ep * pp):
        yield (
            f"{world} trainer ranks cannot be split into expert tensor {expert_tp} x expert {ep} x pipeline {pp}",
            "change one",
        )
    if ep > 1 and (experts := megatron.get("num_experts")) is not None and experts % ep:
        yield f"--num-experts {experts} is not a multiple of --expert-model-parallel-size {ep}", "change the latter"
    if megatron.get("sequence_parallel") and tp == 1:
        yield "--sequence-parallel has no effect with --tensor-model-parallel-size 1: Megatron turns it off"
    heads = megatron.get("num_attention_heads")
    groups = megatron.get("num_query_groups")
    if heads and groups and heads % groups:
        yield f"--num-attention-heads {heads} is not a multiple of --num-query-groups {groups}", "change one"
    chosen = megatron.get("moe_router_topk")
    experts = megatron.get("num_experts")
    if chosen and experts and chosen > experts:
        yield f"--moe-router-topk {chosen} is more than --num-experts {experts}", "lower it"
    for name in ("num_attention_heads", "ffn_hidden_size"):
        if (value := megatron.get(name)) and value % tp:
            yield (
                f"--{name.replace('_', '-')} {value} is not a multiple of --tensor-model-parallel-size {tp}",
                "lower it",
            )
    uneven = any(
        key.startswith(
            ("decoder_first_pipeline", "decoder_last_pipeline", "pipeline_model_parallel_layout", "account_for")
        )
        for key in megatron
    )
    if (layers := megatron.get("num_layers")) and layers % pp and not uneven:
        yield (
            f"--num-layers {layers} is not a multiple of --pipeline-model-parallel-size {pp}",
            "change the pipeline size",
        )
    if megatron.get("bf16") and megatron.get("fp16"):
        yield "--bf16 and --fp16 exclude each other", "keep one, or write --fp16=false to undo a profile's"


TRAIN = (parallel, offload)
