"""Mixtures of experts in every layout, latent attention among them. Runs in ``layout_worker.py``, beside ``layout_cases.py``."""

import dataclasses
import pathlib

import torch
import transformers
from layout_cases import GRPO, PLAIN, REWARD_KL, SMALL, VOCABULARY, Session, global_batch

SHAPE = dict(
    vocab_size=VOCABULARY, hidden_size=48, intermediate_size=64, moe_intermediate_size=24, num_hidden_layers=4, num_attention_heads=4,
    max_position_embeddings=256, tie_word_embeddings=False, num_experts_per_tok=2, bos_token_id=None, eos_token_id=1, pad_token_id=None,
)  # fmt: skip
MODELS = {
    "moe": ("Qwen3Moe", SHAPE | dict(num_key_value_heads=2, head_dim=16, num_experts=8, norm_topk_prob=True)),
    "latent": (
        "DeepseekV3",
        SHAPE | dict(
            num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8,
            n_routed_experts=8, n_shared_experts=1, first_k_dense_replace=1, routed_scaling_factor=2.5, n_group=1,
            topk_group=1,
        ),
    ),
}  # fmt: skip
CASES = {
    "moe_grpo": ("moe", GRPO, [], "batch"),
    "moe_grpo_per_token": ("moe", GRPO, ["--calculate-per-token-loss"], "batch"),
    "moe_ppo_packed_small": (
        "moe", dataclasses.replace(REWARD_KL, advantage_estimator="ppo", max_tokens=SMALL, num_steps_per_rollout=2, **PLAIN), [], "batch",
    ),
    "latent_grpo": ("latent", GRPO, [], "batch"),
}  # fmt: skip
"""As ``layout_cases.CASES``."""


def make(folder: pathlib.Path) -> dict:
    """A checkpoint and a reference policy of each model."""
    for seed, (name, which) in enumerate((n, w) for n in MODELS for w in ("", "_reference")):
        kind, fields = MODELS[name]
        torch.manual_seed(20 + seed)
        model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**fields)).float()
        with torch.no_grad():
            for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if not key.endswith("inv_freq"):
                    tensor.normal_(mean=float("norm" in key), std=0.2 if tensor.dim() < 2 or "gate.weight" in key else 0.1)
        model.save_pretrained(folder / f"{name}{which}")
    return {}


def steps(session: Session) -> dict[str, list]:
    """Two rollouts of every case; their metrics on the rank that reports."""
    out = {}
    for case, (name, settings, flags, _) in CASES.items():
        trainer = session.trainer(name, settings, flags)
        out[case] = [trainer.train(global_batch()) for _ in range(2)]
    return out
