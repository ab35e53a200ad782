"""Whether resolved options fit together, checked before anything heavy is imported.

:func:`check` reports every contradiction at once, each with the numbers and the fix, and returns warnings for what runs
but is likely not meant. :func:`layout` is the one place that turns parallel sizes into ranks and engines.
"""

from collections.abc import Callable, Iterator
from typing import Any

from slime_cli.errors import UsageError
from slime_cli.options import off_policy, own, stages
from slime_cli.options.estimators import GROUP_RELATIVE
from slime_cli.options.resolve import Resolved

Problem = tuple[str, str]
"""Message and fix."""


def layout(resolved: Resolved) -> dict[str, int]:
    """Parallel sizes of the trainer, its ranks, and the number of engines. dp is 0 when the sizes do not divide."""
    slime, megatron = resolved.slime, resolved.megatron
    tp = megatron.get("tensor_model_parallel_size", 1)
    pp = megatron.get("pipeline_model_parallel_size", 1)
    cp = megatron.get("context_parallel_size", 1)
    world = slime["actor_num_nodes"] * slime["actor_num_gpus_per_node"]
    model = max(tp * pp * cp, 1)
    return {
        "tp": tp,
        "pp": pp,
        "cp": cp,
        "dp": 0 if world % model else world // model,
        "ep": megatron.get("expert_model_parallel_size", 1),
        "world_size": world,
        "engine_tp": slime["rollout_num_gpus_per_engine"],
        "engines": (slime["rollout_num_gpus"] or 0) // max(slime["rollout_num_gpus_per_engine"], 1),
    }


def check(resolved: Resolved) -> list[str]:
    """Warnings. Raises one UsageError with all contradictions; only `slime train` has all of them to check.

    With stages, each stage is checked: the top level alone need not make sense.
    """
    if resolved.stages:
        stages.agree(list(_stages(resolved)))
        return [f"{name}: {found}" for name, stage in _stages(resolved) for found in _check_stage(name, stage)]
    warnings: list[str] = []
    problems: list[Problem] = []
    for one in _TRAIN if resolved.command == "train" else _ALWAYS:
        for found in one(resolved):
            problems.append(found) if isinstance(found, tuple) else warnings.append(found)
    if len(problems) == 1:
        raise UsageError(*problems[0])
    if problems:
        listing = "\n".join(f"  {number}. {message} ({fix})" for number, (message, fix) in enumerate(problems, 1))
        raise UsageError(f"{len(problems)} options do not fit together:\n{listing}", "fix each as it says")
    return warnings


def _stages(resolved: Resolved) -> Iterator[tuple[str, Resolved]]:
    for index, stage in enumerate(resolved.stages):
        yield f"stage {stage['name']}", resolved.for_stage(index)


def _check_stage(name: str, stage: Resolved) -> list[str]:
    try:
        return check(stage)
    except UsageError as error:
        raise UsageError(f"{name}: {error.message}", error.fix) from None


def _required(r: Resolved) -> Iterator[Problem]:
    if not r.slime["hf_checkpoint"]:
        yield "--hf-checkpoint is missing", "give the Hugging Face folder of the model"
    if r.command != "train":
        return
    if not r.slime["prompt_data"]:
        yield "--prompt-data is missing", "give a file of prompts, or reasoning-gym:TASK"
    if r.slime["num_rollout"] is None and r.slime["num_epoch"] is None:
        yield "--num-rollout is missing", "say how many rollout steps to run, or give --num-epoch"
    if not r.slime["rollout_batch_size"]:
        yield "--rollout-batch-size is missing", "say how many prompts one rollout step takes"


def _positive(r: Resolved) -> Iterator[Problem]:
    names = (
        "actor_num_nodes actor_num_gpus_per_node rollout_num_gpus_per_engine rollout_batch_size "
        "n_samples_per_prompt num_steps_per_rollout update_weights_interval max_tokens_per_gpu save_interval "
        "eval_interval n_samples_per_eval_prompt rollout_max_response_len rollout_max_prompt_len eval_max_response_len "
        "over_sampling_batch_size sglang_server_concurrency rm_timeout rm_workers num_rollout num_epoch keep_rollouts "
        "keep_checkpoints"
    )
    for name in names.split():
        if (value := r.slime[name]) is not None and value <= 0:
            yield f"--{name.replace('_', '-')} is {value}", "it must be at least 1"


def _cluster(r: Resolved) -> Iterator[Problem | str]:
    devices, each = r.slime["rollout_num_gpus"] or 0, r.slime["rollout_num_gpus_per_engine"]
    endpoint = r.slime["rollout_endpoint"]
    if each > 0 and devices % each:
        yield f"--rollout-num-gpus {devices} is not a multiple of --rollout-num-gpus-per-engine {each}", "change one"
    if endpoint and r.slime["colocate"]:
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
        unused += ["--rollout-num-gpus"] if r.origins["slime.rollout_num_gpus"] == "flag" else []
        if unused:
            yield f"{', '.join(unused)}: no effect with --rollout-endpoint", "give them to `slime serve-rollout`"
    elif devices == 0 and r.slime["loss_type"] != "sft_loss":
        yield (
            "--rollout-num-gpus is 0 and there is no --rollout-endpoint",
            "something must generate: give one of the two",
        )
    if r.slime["colocate"] and not endpoint and devices > layout(r)["world_size"]:
        yield (
            f"--colocate has {layout(r)['world_size']} devices, --rollout-num-gpus is {devices}",
            "leave the latter out",
        )


def _parallel(r: Resolved) -> Iterator[Problem | str]:
    sizes, megatron = layout(r), r.megatron
    tp, pp, cp, ep, world = (sizes[name] for name in ("tp", "pp", "cp", "ep", "world_size"))
    if sizes["dp"] == 0:
        yield (
            f"{world} trainer ranks ({r.slime['actor_num_nodes']} nodes x {r.slime['actor_num_gpus_per_node']}) cannot "
            f"be split into tensor {tp} x pipeline {pp} x context {cp} = {tp * pp * cp}",
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
        yield "--sequence-parallel needs --tensor-model-parallel-size above 1", "leave it out, or raise the tensor size"
    for name in ("num_attention_heads", "ffn_hidden_size"):
        if (value := megatron.get(name)) and value % tp:
            yield (
                f"--{name.replace('_', '-')} {value} is not a multiple of --tensor-model-parallel-size {tp}",
                "lower it",
            )
    uneven = any(key.startswith(("decoder_first_pipeline", "decoder_last_pipeline", "pipeline_model_parallel_layout",
                                 "account_for")) for key in megatron)  # fmt: skip
    if (layers := megatron.get("num_layers")) and layers % pp and not uneven:
        yield (
            f"--num-layers {layers} is not a multiple of --pipeline-model-parallel-size {pp}",
            "change the pipeline size",
        )
    if megatron.get("bf16") and megatron.get("fp16"):
        yield "--bf16 and --fp16 exclude each other", "keep one, or write --fp16=false to undo a profile's"


def _batch(r: Resolved) -> Iterator[Problem | str]:
    prompts, group = r.slime["rollout_batch_size"], r.slime["n_samples_per_prompt"]
    steps, batch = r.slime["num_steps_per_rollout"], r.megatron.get("global_batch_size")
    if not prompts:
        return
    if steps is None or batch is None or prompts * group != batch * steps:
        yield (
            f"--rollout-batch-size {prompts} x --n-samples-per-prompt {group} = {prompts * group} samples, but "
            f"--global-batch-size {batch or '?'} x --num-steps-per-rollout {steps or '?'}"
            f"{f' = {batch * steps}' if batch and steps else ''}",
            "make the products equal, or leave one of the last two out",
        )
        return
    dp, micro = layout(r)["dp"], r.megatron.get("micro_batch_size", 1)
    if not r.slime["use_dynamic_batch_size"] and dp and batch % (dp * micro):
        yield (
            f"--global-batch-size {batch} is not a multiple of data parallel {dp} x --micro-batch-size {micro}",
            "change one, or give --use-dynamic-batch-size with --max-tokens-per-gpu",
        )
    elif batch < dp:
        yield f"--global-batch-size {batch} is below data parallel {dp}: some ranks have nothing to do in every step"
    if dp == 1 and r.slime["balance_data"] and r.origins["slime.balance_data"] == "flag":
        yield "--balance-data has no effect with data parallel 1", "leave it out, or give more trainer ranks"
    over = r.slime["over_sampling_batch_size"]
    if over is not None and over < prompts:
        yield f"--over-sampling-batch-size {over} is below --rollout-batch-size {prompts}", "raise it, or leave it out"


def _tokens(r: Resolved) -> Iterator[Problem | str]:
    dynamic, cap = r.slime["use_dynamic_batch_size"], r.slime["max_tokens_per_gpu"]
    if dynamic and not cap:
        yield "--use-dynamic-batch-size needs --max-tokens-per-gpu", "give the tokens that one rank can take"
    if not dynamic:
        for name in ("max_tokens_per_gpu", "oversize", "balance_by_flops"):
            if r.origins[f"slime.{name}"] == "flag":
                yield f"--{name.replace('_', '-')} has no effect", "add --use-dynamic-batch-size"
    answer, prompt = r.slime["rollout_max_response_len"], r.slime["rollout_max_prompt_len"] or 0
    room = (cap or 0) * layout(r)["cp"]
    if dynamic and cap and answer and answer + prompt > room:
        policy = f"--oversize {r.slime['oversize']} applies"
        yield f"samples can have {answer + prompt} tokens and a micro-batch takes {room}: {policy}"
    context = r.sglang.get("context_length")
    if isinstance(context, int) and answer and answer + prompt > context:
        yield (
            f"--sglang-context-length {context} is below prompt {prompt} + answer {answer}",
            "raise it, or lower the lengths",
        )


def _algorithm(r: Resolved) -> Iterator[Problem | str]:
    s = r.slime
    if not 0 <= s["eps_clip"] < 1 or s["eps_clip_high"] < 0:
        yield (
            f"--eps-clip {s['eps_clip']} and --eps-clip-high {s['eps_clip_high']}",
            "ratios need 0 <= low < 1 and 0 <= high",
        )
    if s["eps_clip_c"] is not None and s["eps_clip_c"] <= 1:
        yield f"--eps-clip-c is {s['eps_clip_c']}", "the bound of dual clip must be above 1 (3 is usual)"
    if s["use_kl_loss"] and s["kl_loss_coef"] == 0:
        yield "--use-kl-loss with --kl-loss-coef 0: the divergence is logged and does not change the gradient"
    yield from _without_effect(r)
    if (s["loss_type"] == "custom_loss") != bool(s["custom_loss_function_path"]):
        yield "--loss-type custom_loss and --custom-loss-function-path go together", "give both or neither"
    if s["loss_type"] == "custom_loss" and s["custom_pg_loss_reducer_function_path"]:
        yield "--custom-pg-loss-reducer-function-path has no effect with --loss-type custom_loss", "reduce the loss in your own function"
    if s["only_train_params_name_list"] and s["freeze_params_name_list"]:
        yield "--only-train-params-name-list and --freeze-params-name-list exclude each other", "keep one of the two"
    if s["loss_type"] == "sft_loss":
        return
    if s["advantage_estimator"] in GROUP_RELATIVE and s["kl_coef"]:
        yield f"--kl-coef has no effect with --advantage-estimator {s['advantage_estimator']}", "use --use-kl-loss and --kl-loss-coef"
    if s["kl_coef"] and s["use_kl_loss"] and s["kl_loss_coef"]:
        yield "--kl-coef and --kl-loss-coef both weigh the divergence from the reference", "keep it in the reward or in the loss"
    compared = s["advantage_estimator"] in (*GROUP_RELATIVE, "reinforce_plus_plus_baseline")
    if s["n_samples_per_prompt"] == 1 and s["rewards_normalization"] and compared:
        yield (
            "--n-samples-per-prompt 1: compared within its group every reward is 0, and nothing is learnt",
            ("raise it, or give --disable-rewards-normalization"),
        )
    if not s["rewards_normalization"] and r.origins["slime.grpo_std_normalization"] == "flag":
        yield "--disable-grpo-std-normalization has no effect with --disable-rewards-normalization", "keep one"


_NEEDS = {
    "kl_loss_coef": ("use_kl_loss",),
    "kl_loss_type": ("use_kl_loss", "kl_coef"),
    "use_unbiased_kl": ("use_kl_loss",),
    "ref_update_interval": ("use_kl_loss", "kl_coef"),
    "opsm_delta": ("use_opsm",),
    **{name: ("use_tis",) for name in ("tis_level", "tis_mode", "tis_clip", "tis_clip_low", "tis_batch_normalize")},
    "custom_tis_function_path": ("use_tis", "get_mismatch_metrics"),
    **{name: ("use_rs",) for name in ("rs_level", "rs_lower_bound", "rs_upper_bound", "rs_veto_threshold")},
    "opd_kl_coef": ("use_opd",),
    **{name: ("use_opd",) for name in ("opd_type", "opd_teacher_load", "opd_teacher_url")},
    "opd_teacher_timeout": ("opd_teacher_url",),
}
"""Option -> options of which one must be given for it to have an effect."""
_OF_ESTIMATORS = {
    "gamma": ("reinforce_plus_plus", "ppo"),
    "lambd": ("ppo",),
    "value_clip": ("ppo",),
    "num_critic_only_steps": ("ppo",),
    "megatron_config_path": ("ppo",),
    "grpo_std_normalization": GROUP_RELATIVE,
    "rewards_normalization": (*GROUP_RELATIVE, "reinforce_plus_plus_baseline"),
    "eps_clip_c": ("grpo", "gspo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"),
}
"""Option -> estimators that read it."""


def _without_effect(r: Resolved) -> Iterator[Problem]:
    s = r.slime
    for name, needed in _NEEDS.items():
        if r.origins[f"slime.{name}"] == "flag" and not any(s[other] for other in needed):
            yield f"{own.flag(name)} has no effect", f"add {' or '.join(own.flag(other) for other in needed)}"
    for name, estimators in _OF_ESTIMATORS.items():
        if r.origins[f"slime.{name}"] == "flag" and s["advantage_estimator"] not in estimators:
            yield f"{own.flag(name)} has no effect with --advantage-estimator {s['advantage_estimator']}", f"it is read by {', '.join(estimators)}"


_MOMENTS = ("use_precision_aware_optimizer", "optimizer_cpu_offload", "optimizer_cuda_graph")
"""Megatron options about Adam's moments, or about where they are."""


def _optimizer(r: Resolved) -> Iterator[Problem | str]:
    megatron, stateless = r.megatron, r.slime["use_stateless_adam"]
    if stateless and megatron.get("optimizer", "adam") != "adam":
        yield f"--use-stateless-adam with --optimizer {megatron['optimizer']}", "keep one"
    for name in _MOMENTS if stateless else ():
        if megatron.get(name):
            yield f"--{name.replace('_', '-')} is about moments, and --use-stateless-adam keeps none", "keep one"
    if stateless and r.slime["reset_optimizer_states"]:
        yield "--reset-optimizer-states has no effect with --use-stateless-adam", "there is nothing to forget: keep one"
    if megatron.get("async_save") and megatron.get("optimizer_cpu_offload"):
        yield "--async-save cannot write what --optimizer-cpu-offload keeps in pinned memory", "keep one"
    if megatron.get("no_save_optim"):
        yield "--no-save-optim: a run that is killed cannot be resumed; its checkpoints can start another with --load"


def _off_policy(r: Resolved) -> Iterator[Problem | str]:
    s = r.slime
    if s["loss_type"] == "sft_loss":
        return
    for name in ("use_tis", "use_rs"):
        if s[name] and s["use_rollout_logprobs"]:
            yield (
                f"{own.flag(name)} with --use-rollout-logprobs: the old policy is the engine's, so their ratio is 1",
                "keep one of the two",
            )
    if s["get_mismatch_metrics"] and s["use_rollout_logprobs"]:
        yield "--get-mismatch-metrics with --use-rollout-logprobs: the old policy is the engine's, so there is no mismatch to see", "keep one of the two"
    if s["loss_type"] == "custom_loss" and s["use_top_p_replay"]:
        yield "--use-top-p-replay with --loss-type custom_loss: such a loss gets logits of the whole distribution", "keep one of the two"
    for prefix, low, high in (("tis", "tis_clip_low", "tis_clip"), ("rs", "rs_lower_bound", "rs_upper_bound")):
        if s[f"use_{prefix}"] and not 0 <= s[low] <= s[high]:
            yield f"{own.flag(low)} {s[low]} and {own.flag(high)} {s[high]}", "ratios need 0 <= lower <= upper"
    if s["use_tis"] and s["tis_mode"] == "truncate" and s["tis_clip_low"]:
        yield "--tis-clip-low has no effect with --tis-mode truncate", "use --tis-mode clip"
    yield from _routing(r)
    if s["use_opd"]:
        yield from off_policy.teacher(r)
    yield from off_policy.interval(r)


def _routing(r: Resolved) -> Iterator[Problem | str]:
    s = r.slime
    if s["use_routing_replay"] and s["use_rollout_routing_replay"]:
        yield "--use-routing-replay and --use-rollout-routing-replay exclude each other", "follow the old policy's pass or the engine"
    if s["use_routing_replay"] and s["use_rollout_logprobs"]:
        yield "--use-routing-replay with --use-rollout-logprobs: no pass of the old policy chooses experts", "use --use-rollout-routing-replay"
    if s["use_routing_replay"] and s["num_steps_per_rollout"] == 1 and not s["keep_old_actor"]:
        yield "--use-routing-replay with one step a rollout: the policy has not moved since the pass that it replays"
    if r.megatron.get("moe_router_fusion") and (s["use_routing_replay"] or s["use_rollout_routing_replay"]):
        yield "--moe-router-fusion leaves out the replay of experts", "leave it out"


def _sampling(r: Resolved) -> Iterator[Problem | str]:
    s = r.slime
    if not s["rollout_temperature"] > 0:
        yield (
            f"--rollout-temperature is {s['rollout_temperature']}",
            "training needs samples with probabilities: above 0",
        )
    for name in ("rollout_top_p", "eval_top_p"):
        if not 0 < s[name] <= 1:
            yield f"--{name.replace('_', '-')} is {s[name]}", "it must be above 0 and at most 1"
    if s["loss_type"] != "sft_loss" and (s["rollout_top_p"] < 1 or s["rollout_top_k"] > 0):
        yield from off_policy.cut(r)
    elif s["use_top_p_replay"] and s["loss_type"] != "sft_loss":
        yield "--use-top-p-replay has no effect: nothing is cut", "add --rollout-top-p with --rollout-top-k"


def _reward(r: Resolved) -> Iterator[Problem | str]:
    s = r.slime
    builtin = str(s["prompt_data"] or "").startswith("reasoning-gym:")
    if s["loss_type"] != "sft_loss" and not (s["rm_type"] or s["custom_rm_path"] or builtin):
        if s["custom_generate_function_path"]:
            yield "no reward: each sample must come with its own from --custom-generate-function-path, or be dropped"
        else:
            yield (
                "no reward: neither --rm-type nor --custom-rm-path",
                "give one; only reasoning-gym: prompts and --custom-generate-function-path bring their own",
            )
    if s["rm_type"] == "remote_rm" and not s["rm_url"]:
        yield "--rm-type remote_rm needs --rm-url", "give the service's address"
    if s["group_rm"] and not s["custom_rm_path"]:
        yield "--group-rm needs --custom-rm-path", "built-in rewards look at one sample"


def _evaluation(r: Resolved) -> Iterator[Problem | str]:
    s = r.slime
    data = s["eval_prompt_data"] or []
    if len(data) % 2:
        yield f"--eval-prompt-data has {len(data)} words", "give pairs: NAME PATH NAME PATH"
    elif len(set(data[::2])) < len(data) // 2:
        yield f"--eval-prompt-data names a set twice: {' '.join(data[::2])}", "give each its own name"
    if s["eval_interval"] and not data:
        yield "--eval-interval without --eval-prompt-data", "give a set to evaluate on"
    if s["eval_temperature"] < 0:
        yield f"--eval-temperature is {s['eval_temperature']}", "0 is greedy; it cannot be negative"


_ALWAYS: tuple[Callable[[Resolved], Iterator[Any]], ...] = (_required, _positive, _cluster)
_TRAIN = (*_ALWAYS, _parallel, _batch, _tokens, _algorithm, _optimizer, _off_policy, _sampling, _reward, _evaluation)
