"""Mixtures of experts in every layout, latent attention among them. Runs in ``layout_worker.py``, beside
``layout_cases.py``."""

import dataclasses
import pathlib
from unittest import mock

import numpy as np
import torch
import transformers

from layout_cases import GRPO, PLAIN, RECOMPUTE, REWARD_KL, SMALL, VOCABULARY, Session, global_batch
from layout_launch import IN_DENSE_LAYOUTS, IN_LAYOUTS_OF_EXPERTS, OF_EXPERTS
from slime_cli.buffer.columns import TrainBatch
from slime_cli.training.batching import packing
from slime_cli.training.network import routing
from slime_cli.training.settings import Settings
from slime_cli.training.trainer import Trainer

SHAPE = dict(
    vocab_size=VOCABULARY,
    hidden_size=48,
    intermediate_size=64,
    moe_intermediate_size=24,
    num_hidden_layers=4,
    num_attention_heads=4,
    max_position_embeddings=256,
    tie_word_embeddings=False,
    num_experts_per_tok=2,
    bos_token_id=None,
    eos_token_id=1,
    pad_token_id=None,
)
MODELS = {
    "moe": ("Qwen3Moe", SHAPE | dict(num_key_value_heads=2, head_dim=16, num_experts=8, norm_topk_prob=True)),
    "latent": (
        "DeepseekV3",
        SHAPE
        | dict(
            num_key_value_heads=4,
            q_lora_rank=24,
            kv_lora_rank=16,
            qk_nope_head_dim=8,
            qk_rope_head_dim=4,
            v_head_dim=8,
            n_routed_experts=8,
            n_shared_experts=1,
            first_k_dense_replace=1,
            routed_scaling_factor=2.5,
            n_group=1,
            topk_group=1,
        ),
    ),
}
TWO_STEPS = dataclasses.replace(GRPO, num_steps_per_rollout=2, max_tokens=4 * SMALL)
CASES = {
    "moe_grpo": ("moe", GRPO, [], "batch"),
    "moe_grpo_per_token": ("moe", GRPO, ["--calculate-per-token-loss"], "batch"),
    "moe_ppo_packed_small": (
        "moe",
        dataclasses.replace(REWARD_KL, advantage_estimator="ppo", max_tokens=SMALL, num_steps_per_rollout=2, **PLAIN),
        [],
        "batch",
    ),
    "latent_grpo": ("latent", GRPO, [], "batch"),
    "moe_replay": ("moe", dataclasses.replace(TWO_STEPS, use_routing_replay=True), [], "batch"),
    "moe_replay_recomputed": ("moe", dataclasses.replace(TWO_STEPS, use_routing_replay=True), RECOMPUTE, "batch"),
    "latent_rollout_replay": ("latent", dataclasses.replace(TWO_STEPS, use_rollout_routing_replay=True), [], "routed"),
    "latent_rollout_replay_recomputed": (
        "latent",
        dataclasses.replace(TWO_STEPS, use_rollout_routing_replay=True),
        RECOMPUTE,
        "routed",
    ),
}
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
                    tensor.normal_(
                        mean=float("norm" in key), std=0.2 if tensor.dim() < 2 or "gate.weight" in key else 0.1
                    )
        model.save_pretrained(folder / f"{name}{which}")
    return {}


def steps(session: Session) -> dict[str, list]:
    """Two rollouts of each of the layout's cases; their metrics on the rank that reports."""
    out = {}
    some = (
        CASES
        if session.layout == "single"
        else IN_LAYOUTS_OF_EXPERTS
        if session.layout in OF_EXPERTS
        else IN_DENSE_LAYOUTS
    )
    for case in some:
        name, settings, flags, which = CASES[case]
        replay = ["--moe-enable-routing-replay"] if settings.replays_routing else []
        trainer = session.trainer(name, settings, flags + replay)
        out[case] = [trainer.train(routed_batch() if which == "routed" else global_batch()) for _ in range(2)]
    return out


def routed_batch() -> TrainBatch:
    """An engine that chose experts at random."""
    batch = global_batch()
    rng = np.random.default_rng(3)
    scores_TLE = rng.random((len(batch.tokens_T), SHAPE["num_hidden_layers"], 8))
    return dataclasses.replace(batch, routed_experts_TLK=scores_TLE.argsort(-1)[..., :2].astype(np.int16))


def replay(session: Session) -> dict[str, float]:
    """How the old policy's pass differs between choosing for itself and being told: what it would choose; what it would
    not."""
    free = session.trainer("latent", TWO_STEPS, [])
    told = session.trainer(
        "latent", dataclasses.replace(TWO_STEPS, use_rollout_routing_replay=True), ["--moe-enable-routing-replay"]
    )
    batch = routed_batch()

    def log_probs(trainer: Trainer, batch: TrainBatch) -> torch.Tensor:
        parts, _ = trainer._parts(batch)
        how = routing.mode(trainer.settings.replays_routing, trainer.settings.records_routing)
        return torch.cat([found_R for _, found_R in trainer._preparation(batch, parts).log_probs(how=how)])

    own = log_probs(free, batch)
    parts, _ = told._parts(batch)
    list(told._preparation(batch, parts).log_probs(how=routing.RECORD))
    chosen_TLK = batch.routed_experts_TLK.copy()
    for mb in (mb for part in parts for mb in part):
        at = np.concatenate(
            [np.arange(n) + start for n, start in zip(batch.lengths_N[mb.positions], batch.starts_N[mb.positions])]
            or [[]]
        )
        for n, layer in enumerate(range(1, SHAPE["num_hidden_layers"])):  # the first is dense
            chosen_TLK[at.astype(int), layer] = mb.routes[0, n][: len(at)].numpy()
    same = log_probs(told, dataclasses.replace(batch, routed_experts_TLK=chosen_TLK))
    other = log_probs(told, batch)
    biases = sum(
        name.endswith("expert_bias") for name, _ in told.policy.parameters()
    )  # kept with the weights of a reference
    return {
        "biases": biases,
        "told_the_same": float((same - own).abs().max()),
        "told_another": float((other - own).abs().max()),
    }


def balance(session: Session) -> dict[str, float]:
    """Gradient norms of a step whose rewards teach nothing: the load-balancing loss alone moves it, in either way of
    averaging. On one rank also with the batch split as it is for two: that loss is of each part by itself."""
    batch = dataclasses.replace(global_batch(), rewards_N=np.zeros(len(global_batch())))
    flags = ["--moe-aux-loss-coeff", "0.01", "--moe-z-loss-coeff", "0.001"]
    settings = Settings(max_tokens=1024)
    found = {}
    for name, more in (("by_sample", []), ("by_token", ["--calculate-per-token-loss"])):
        metrics = session.trainer("moe", settings, flags + more).train(batch)
        found[name] = metrics and metrics["grad_norm"]
    if session.world_size == 1:
        whole = packing.schedule
        with mock.patch.object(packing, "schedule", lambda *given, **by: whole(*given, **by | {"multiple": 2})):
            metrics = session.trainer("moe", settings, flags).train(batch)
        found["in_two"] = metrics and metrics["grad_norm"]
    return found
