"""Values that follow from others when the user leaves them out. Fills, never overrides, never raises.

What contradicts itself is left as given for :mod:`slime_cli.options.checks` to report.
"""

from collections.abc import Collection
from typing import Any

from slime_cli.hardware import device as hardware
from slime_cli.options.estimators import WHITENED
from slime_cli.options.groups import SlimeOptions

FALLBACKS = {
    "eps_clip_high": "eps_clip",
    "over_sampling_batch_size": "rollout_batch_size",
    "eval_reward_key": "reward_key",
    "eval_temperature": "rollout_temperature",
    "eval_top_p": "rollout_top_p",
    "eval_max_response_len": "rollout_max_response_len",
    "eval_top_k": "rollout_top_k",
    "eval_input_key": "input_key",
    "eval_label_key": "label_key",
    "eval_tool_key": "tool_key",
    "eval_max_context_len": "rollout_max_context_len",
}
"""slime dest -> slime dest whose value it takes when not given."""
FULLY_ASYNC = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
"""slime's own function for rollouts that are generated all the time."""
MAX_LOGPROB_DIFF = 0.5
"""Bfloat16 gives about 0.02, weights of fewer bits some tenths; engines that hold other weights give nats."""
MAX_LOGPROB_DIFF_OF_FLOAT32 = 0.05
"""Where both compute in float32, which gives 1e-5 to 1e-4: engines of another rotary base may differ by no more than
tenths."""


def derived(
    slime: SlimeOptions, megatron: dict[str, Any], sglang: dict[str, Any], taken_back: Collection[tuple[str, str]] = ()
) -> dict[tuple[str, str], Any]:
    """(section, dest) -> value for all that can be filled in. ``taken_back``: what nobody wants to be filled in."""
    found: dict[tuple[str, str], Any] = {}
    for dest, source in FALLBACKS.items():
        if getattr(slime, dest) is None and getattr(slime, source) is not None:
            found["slime", dest] = getattr(slime, source)
    _lengths(slime, found)
    _batch(slime, megatron, found)
    if slime.n_samples_per_prompt == 1 and slime.grpo_std_normalization:
        found["slime", "grpo_std_normalization"] = False
    if slime.advantage_estimator in WHITENED:
        found["slime", "normalize_advantages"] = True  # part of both methods
    if teacher_in_rm_url(slime):
        found["slime", "opd_teacher_url"], found["slime", "opd_type"] = slime.rm_url, "sglang"
    elif _one_teacher(slime) and slime.opd_type is None:
        found["slime", "opd_type"] = "sglang" if slime.opd_teacher_url else "megatron"
    if slime.load_debug_rollout_data:
        found["slime", "debug_train_only"] = True
    # Saved rollouts may be those of other weights.
    told = slime.custom_generate_function_path or slime.load_debug_rollout_data
    if slime.max_logprob_diff is None and not told:
        full = _full_precision(slime, megatron, sglang)
        found["slime", "max_logprob_diff"] = MAX_LOGPROB_DIFF_OF_FLOAT32 if full else MAX_LOGPROB_DIFF
    if _saves_meanwhile(megatron) and ("megatron", "async_save") not in taken_back:
        found["megatron", "async_save"] = True
    if slime.schedule is None:
        found["slime", "schedule"] = "async" if slime.rollout_function_path == FULLY_ASYNC else "sync"
    if slime.max_staleness is None and (slime.schedule or found["slime", "schedule"]) != "sync":
        found["slime", "max_staleness"] = 1
    if slime.rollout_num_gpus is None:
        found["slime", "rollout_num_gpus"] = _engine_devices(slime)
    if slime.offload:
        found["slime", "offload_train"] = not slime.no_offload_train
        found["slime", "offload_rollout"] = not slime.no_offload_rollout
    if slime.use_routing_replay or slime.use_rollout_routing_replay:
        found["megatron", "moe_enable_routing_replay"] = True
    if slime.use_rollout_routing_replay and not slime.rollout_endpoint:
        found["sglang", "enable_return_routed_experts"] = True
    return found


def _full_precision(slime: SlimeOptions, megatron: dict[str, Any], sglang: dict[str, Any]) -> bool:
    """Trainer and engines compute in float32, as far as options tell."""
    theirs = slime.rollout_endpoint or sglang.keys() & {"dtype", "quantization", "torchao_config", "kv_cache_dtype"}
    return not theirs and hardware.trainer_dtype(hardware.find().kind, megatron) == "float32"


def _saves_meanwhile(megatron: dict[str, Any]) -> bool:
    """Checkpoints are written while training continues, where they come off a GPU: its state is copied at 10 GB/s and
    more, and written at a tenth of that. On a CPU the writer would take a core from the trainer."""
    return hardware.find().kind == "cuda" and not megatron.get("optimizer_cpu_offload")


def teacher_in_rm_url(slime: SlimeOptions) -> bool:
    """``--rm-url`` is the teacher's address, as in slime's scripts: its own example of a reward function asks that."""
    other = slime.opd_teacher_url or slime.opd_teacher_load or slime.opd_type == "megatron"
    return bool(slime.use_opd and slime.rm_url and not other and "remote_rm" not in (slime.rm_type or ""))


def _one_teacher(slime: SlimeOptions) -> bool:
    return slime.use_opd and bool(slime.opd_teacher_url) != bool(slime.opd_teacher_load)


def longest(slime: SlimeOptions, prompt: int = 0) -> int:
    """Tokens that a sample can have, as far as options bound them; ``prompt`` stands in where none bounds prompts."""
    whole = (slime.rollout_max_prompt_len or prompt) + (slime.rollout_max_response_len or 0)
    return min(whole, slime.rollout_max_context_len or whole)


def _lengths(slime: SlimeOptions, found: dict[tuple[str, str], Any]) -> None:
    """A prompt leaves room for one token of an answer."""
    if slime.loss_type == "sft_loss":
        return
    together = slime.rollout_max_context_len
    if slime.rollout_max_prompt_len is None and together:
        found["slime", "rollout_max_prompt_len"] = together - 1
    bounds = [slime.rollout_max_prompt_len, (slime.eval_max_context_len or together or 0) - 1]
    if slime.eval_max_prompt_len is None and (given := [bound for bound in bounds if bound and bound > 0]):
        found["slime", "eval_max_prompt_len"] = min(given)


def _batch(slime: SlimeOptions, megatron: dict[str, Any], found: dict) -> None:
    """rollout_batch_size x n_samples_per_prompt = global_batch_size x num_steps_per_rollout: three give the fourth."""
    prompts = slime.rollout_batch_size
    group = slime.n_samples_per_prompt
    steps = slime.num_steps_per_rollout
    batch = megatron.get("global_batch_size")
    if slime.num_rollout == 0 and prompts is None and batch is None:  # nothing is trained: any that the ranks divide
        prompts = slime.actor_num_nodes * slime.actor_num_gpus_per_node * megatron.get("micro_batch_size", 1)
        found["slime", "rollout_batch_size"] = prompts
    if any(number is not None and number < 1 for number in (prompts, group, steps, batch)):
        return
    if prompts and batch is None:
        if prompts * group % (steps or 1) == 0:
            found["megatron", "global_batch_size"] = prompts * group // (steps or 1)
            found["slime", "num_steps_per_rollout"] = steps or 1
    elif prompts and batch and steps is None and prompts * group % batch == 0:
        found["slime", "num_steps_per_rollout"] = prompts * group // batch
    elif prompts is None and batch and batch * (steps or 1) % group == 0:
        found["slime", "rollout_batch_size"] = batch * (steps or 1) // group
        found["slime", "num_steps_per_rollout"] = steps or 1
    if ("slime", "rollout_batch_size") in found and slime.over_sampling_batch_size is None:
        found["slime", "over_sampling_batch_size"] = found["slime", "rollout_batch_size"]


def _engine_devices(slime: SlimeOptions) -> int:
    """As many as the trainer has when colocated; none when nothing is generated here; else one engine's."""
    if slime.rollout_endpoint:
        return 0
    if slime.load_debug_rollout_data or slime.debug_train_only:
        return 0
    if slime.loss_type == "sft_loss" and not (slime.eval_prompt_data or slime.eval_config):
        return 0
    if slime.colocate:
        return slime.actor_num_nodes * slime.actor_num_gpus_per_node
    return slime.rollout_num_gpus_per_engine
