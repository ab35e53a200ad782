"""What the trainer is told besides Megatron's own options. Torch-free: made by the conductor, sent to every rank."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Settings:
    """The algorithm of one stage."""

    loss_type: str = "policy_loss"
    """``policy_loss`` or ``sft_loss``."""
    steps_per_rollout: int = 1
    max_tokens: int | None = None
    """Tokens of a micro-batch (``--max-tokens-per-gpu`` with dynamic batching); None for static micro-batches."""
    oversize: str = "isolate"
    temperature: float = 1.0
    eps_clip: float = 0.2
    eps_clip_high: float = 0.2
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.0
    kl_loss_type: str = "low_var_kl"
    entropy_coef: float = 0.0
    normalise_rewards: bool = True
    divide_by_std: bool = True
    use_rollout_logprobs: bool = False
    advantage_estimator: str = "grpo"

    @property
    def policy(self) -> bool:
        return self.loss_type == "policy_loss"
