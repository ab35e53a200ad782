"""What the trainer is told besides Megatron's own options. Torch-free: made by the loop, sent to every rank."""

import argparse
import dataclasses
import types
from collections.abc import Mapping
from typing import Any, Literal

from slime_cli import manifests
from slime_cli.options import adapters
from slime_cli.options.estimators import GROUP_RELATIVE
from slime_cli.options.groups import SlimeOptions


@dataclasses.dataclass(frozen=True)
class Settings:
    """The algorithm of one phase. Fields are named as slime's options are, except those that :meth:`from_options`
    derives."""

    loss_type: str = "policy_loss"
    num_steps_per_rollout: int = 1
    max_tokens: int | None = None
    """Tokens of a micro-batch (``--max-tokens-per-gpu`` with dynamic batching); None for static micro-batches."""
    oversize: str = "isolate"
    balance_data: bool = False
    balance_by_flops: bool = False
    alone: bool = False
    """Nothing is generated while a rollout is trained, so that the ranks may use every core of a CPU."""
    rollout_temperature: float = 1.0
    log_probs_chunk_size: int | None = None

    advantage_estimator: str = "grpo"
    rewards_normalization: bool = True
    grpo_std_normalization: bool = True
    normalize_advantages: bool = False
    gamma: float = 1.0
    lambd: float = 1.0
    custom_advantage_function_path: str | None = None

    eps_clip: float = 0.2
    eps_clip_high: float = 0.2
    eps_clip_c: float | None = None
    kl_coef: float = 0.0
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.0
    kl_loss_type: str = "low_var_kl"
    use_unbiased_kl: bool = False
    entropy_coef: float = 0.0
    use_opsm: bool = False
    opsm_delta: float = 1e-4
    custom_loss_function_path: str | None = None
    custom_pg_loss_reducer_function_path: str | None = None

    use_rollout_logprobs: bool = False
    keep_old_actor: bool = False
    untold_version: Literal["present", "kept", "unknown"] = "present"
    """Which weights a token counts as written by where nobody tells (a custom generate function's): the ``present``
    ones, as where every rollout begins with the trainer's weights and ends before they change; those that
    ``--keep-old-actor`` has ``kept``, which are what the engines hold; else ``unknown`` ones, and nothing is measured.
    """
    get_mismatch_metrics: bool = False
    use_tis: bool = False
    tis_level: str = "token"
    tis_mode: str = "clip"
    tis_clip: float = 2.0
    tis_clip_low: float = 0.0
    tis_batch_normalize: bool = False
    custom_tis_function_path: str | None = None
    use_rs: bool = False
    rs_level: str = "token"
    rs_lower_bound: float = 0.5
    rs_upper_bound: float = 2.0
    rs_veto_threshold: float | None = None

    use_routing_replay: bool = False
    use_rollout_routing_replay: bool = False
    use_top_p_replay: bool = False
    use_opd: bool = False
    opd_type: str | None = None
    opd_kl_coef: float = 1.0

    value_clip: float = 0.2
    num_critic_only_steps: int = 0

    only_train_params_name_list: tuple[str, ...] = ()
    freeze_params_name_list: tuple[str, ...] = ()
    enable_mtp_training: bool = False
    reset_optimizer_states: bool = False
    use_stateless_adam: bool = False
    on_nan_gradient: str = "fail"

    save_debug_train_data: str | None = None

    rollout_data_postprocess_path: str | None = None
    custom_model_provider_path: str | None = None
    custom_megatron_init_path: str | None = None
    custom_megatron_before_log_prob_hook_path: str | None = None
    custom_megatron_before_train_step_hook_path: str | None = None

    adapter: manifests.Adapter | None = None
    """The LoRA adapter that is trained; None: whole weights are."""
    custom: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What ``--custom-config-path`` holds for users' functions alone."""

    @classmethod
    def from_options(cls, slime: SlimeOptions, custom: Mapping[str, Any] = types.MappingProxyType({})) -> "Settings":
        """From slime's resolved options by dest."""
        names = {field.name for field in dataclasses.fields(cls)} & vars(slime).keys()
        taken = {name: getattr(slime, name) for name in names}
        if taken["eps_clip_high"] is None:
            taken["eps_clip_high"] = taken["eps_clip"]
        for name in ("only_train_params_name_list", "freeze_params_name_list"):
            taken[name] = tuple(taken[name] or ())
        if slime.advantage_estimator in GROUP_RELATIVE and not slime.custom_advantage_function_path:
            taken["kl_coef"] = 0.0  # nothing reads it then, and no reference is kept for it
        taken["rewards_normalization"] &= not slime.custom_reward_post_process_path  # it has made them what they are
        taken["use_top_p_replay"] &= slime.rollout_top_k > 0  # else nothing is cut
        taken["num_steps_per_rollout"] = slime.num_steps_per_rollout or 1
        return cls(
            **taken,
            untold_version=_untold_version(slime),
            adapter=_adapter(slime),
            alone=slime.loss_type == "sft_loss" or slime.schedule == "sync",
            custom=dict(custom),
            max_tokens=slime.max_tokens_per_gpu if slime.use_dynamic_batch_size else None,
        )

    def for_users(self, args: argparse.Namespace) -> types.SimpleNamespace:
        """What a user's function gets as ``args``: Megatron's arguments, over them these settings and ``custom``."""
        return types.SimpleNamespace(**(vars(args) | vars(self) | dict(self.custom)))

    @property
    def policy(self) -> bool:
        return self.loss_type != "sft_loss"

    @property
    def critic(self) -> bool:
        """A value model is trained beside the policy."""
        return self.policy and self.advantage_estimator == "ppo"

    @property
    def corrected(self) -> bool:
        """The old policy's log-probabilities are compared with the engine's: to correct, to reject, or to measure."""
        return self.policy and (self.use_tis or self.use_rs or self.get_mismatch_metrics)

    @property
    def columns(self) -> tuple[str, ...]:
        """Fields that every sample of a policy's batch must have: engines fill them in, or a custom generate function
        does."""
        wanted = {
            "rollout_log_probs": self.use_rollout_logprobs or self.corrected,
            "rollout_top_p_token_ids": self.use_top_p_replay,
            "rollout_routed_experts": self.use_rollout_routing_replay,
            "teacher_log_probs": self.use_opd and self.opd_type == "sglang",
        }
        return tuple(name for name, needed in wanted.items() if needed and self.policy)

    @property
    def replays_routing(self) -> bool:
        """The policy's steps follow experts that were chosen before."""
        return self.policy and (self.use_routing_replay or self.use_rollout_routing_replay)

    @property
    def records_routing(self) -> bool:
        """The old policy's pass chooses them, not the engine."""
        return self.use_routing_replay and not self.use_rollout_routing_replay

    @property
    def reference(self) -> bool:
        """A reference policy is kept."""
        return self.policy and (self.use_kl_loss or self.kl_coef != 0)


def _adapter(slime: SlimeOptions) -> manifests.Adapter | None:
    if slime.lora_rank is None:
        return None
    modules = adapters.modules(slime.lora_target_modules or [adapters.ALL])
    return manifests.Adapter(rank=slime.lora_rank, alpha=slime.lora_alpha, dropout=slime.lora_dropout, modules=modules)


def _untold_version(slime: SlimeOptions) -> Literal["present", "kept", "unknown"]:
    """What :attr:`Settings.untold_version` says. Surplus groups of over-sampling wait until the weights are others."""
    if slime.keep_old_actor:
        return "kept"
    no_surplus = slime.over_sampling_batch_size in (None, slime.rollout_batch_size)
    in_step = slime.schedule == "sync" and slime.update_weights_interval == 1 and not slime.partial_rollout
    return "present" if in_step and no_surplus else "unknown"
