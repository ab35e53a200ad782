"""What the trainer may be told besides an estimator: frozen parameters, forgotten moments, gradients that are not finite,
hooks, a teacher, a critic that trains alone, resuming with one. Runs on every rank of a layout, beside ``layout_cases.py``."""

import dataclasses

import numpy as np
import torch
from layout_cases import GRPO, MANIFEST, PLAIN, REWARD_KL, Session, differing, global_batch, weights

from slime_cli.errors import EngineError, UsageError
from slime_cli.training.settings import Settings


def moved(session: Session, settings: Settings, batch=None, flags=()) -> dict[str, bool]:
    """Parameter -> whether one rollout changed it."""
    trainer = session.trainer("untied", settings, list(flags))
    before = weights(trainer)
    trainer.train(batch or global_batch())
    return {name: bool((before[name] != tensor).any()) for name, tensor in trainer.policy.parameters()}


def frozen(session: Session) -> dict:
    only = moved(session, dataclasses.replace(GRPO, only_train_params_name_list=(r"mlp\.linear_fc1",)))
    freeze = moved(session, dataclasses.replace(GRPO, freeze_params_name_list=(r"embedding", r"layernorm")))
    try:
        session.trainer("untied", dataclasses.replace(GRPO, freeze_params_name_list=("embeding",)), [])
        typo = ""
    except UsageError as error:
        typo = str(error)
    return {"only": only, "freeze": freeze, "typo": typo}


def forgotten(session: Session) -> dict:
    """With moments reset, the second rollout's step is that of a fresh optimizer on the same weights."""
    trainer = session.trainer("untied", dataclasses.replace(GRPO, reset_optimizer_states=True), [])
    trainer.train(global_batch())
    at_one = weights(trainer)
    trainer.train(global_batch())
    fresh = session.trainer("untied", GRPO, [])
    for name, tensor in fresh.policy.parameters():
        tensor.copy_(at_one[name])
    fresh.begin()
    fresh.train(global_batch())
    kept = session.trainer("untied", GRPO, [])
    for _ in range(2):
        kept.train(global_batch())
    return {"reset": differing(weights(fresh), weights(trainer)), "kept": differing(weights(kept), weights(trainer))}


def not_finite(session: Session) -> dict:
    """A reward model that overflowed: one advantage of 1e38 makes the gradient infinite."""
    batch = global_batch()
    rewards_N = batch.rewards_N.copy()
    rewards_N[0] = 1e300
    bad = dataclasses.replace(batch, rewards_N=rewards_N)
    settings = dataclasses.replace(GRPO, rewards_normalization=False)
    skipping = session.trainer("untied", dataclasses.replace(settings, on_nan_gradient="skip"), [])
    before = weights(skipping)
    metrics = skipping.train(bad)
    out = {"skipped": None if metrics is None else metrics["skipped_steps"], "moved": differing(before, weights(skipping))}
    skipping.train(batch)
    out["goes_on"] = differing(before, weights(skipping)) > 0
    try:
        session.trainer("untied", settings, []).train(bad)
        out["failed"] = ""
    except (EngineError, RuntimeError) as error:
        out["failed"] = f"{type(error).__name__}: {error}"
    return out


def hooked(session: Session) -> dict:
    """Hooks that do what slime does by itself change nothing; a loss without a gradient is an error."""

    def advantage(args, rollout_data):
        from slime_cli.training import advantages

        shape = advantages.Shape(rollout_data["response_lengths"], rollout_data["loss_mask"])
        rollout_data["advantages"], _ = advantages.compute(args, rollout_data["rewards"], rollout_data["group_index"], shape)

    def loss(args, batch, logits, sum_of_sample_mean):
        from slime_cli.training.logprobs import token_log_probs

        return sum_of_sample_mean(-token_log_probs(logits, batch["targets_R"], 1.0)), {"answer": 42}

    def constant(args, batch, logits, sum_of_sample_mean):
        return sum_of_sample_mean(logits.detach().sum(-1)), {}

    out = {}
    plain, custom = session.trainer("untied", GRPO, []), session.trainer("untied", GRPO, [], hooks={"advantage": advantage})
    plain.train(global_batch()), custom.train(global_batch())
    out["advantage"] = differing(weights(plain), weights(custom))
    sft, custom = session.trainer("untied", Settings(loss_type="sft_loss", max_tokens=1024), []), session.trainer("untied", GRPO, [], hooks={"loss": loss})
    sft.train(global_batch())
    metrics = custom.train(global_batch())
    out["loss"] = max(float((a - b).abs().max()) for a, b in zip(weights(sft).values(), weights(custom).values()))
    out["reported"] = None if metrics is None else metrics["answer"]
    try:
        session.trainer("untied", GRPO, [], hooks={"loss": constant}).train(global_batch())
        out["constant"] = ""
    except RuntimeError as error:
        out["constant"] = str(error)
    return out


def taught(session: Session) -> dict:
    """Equal rewards, so that the teacher alone teaches: its gap closes."""
    batch = global_batch()
    batch = dataclasses.replace(batch, rewards_N=np.ones(len(batch)), rollout_log_probs_R=None)
    settings = Settings(max_tokens=1024, use_opd=True, opd_kl_coef=1.0)
    trainer = session.trainer("tied", settings, [])
    session.bridge("tied_reference").load(trainer.policy.model)
    trainer.policy.keep("teacher")
    session.bridge("tied").load(trainer.policy.model)
    trainer.begin()
    return {"metrics": [trainer.train(batch) for _ in range(2)]}


def critic(session: Session) -> dict:
    """The critic alone first, then both; a checkpoint in between is a resume to the last bit."""
    settings = dataclasses.replace(REWARD_KL, advantage_estimator="ppo", num_critic_only_steps=1, num_steps_per_rollout=2, **PLAIN)
    trainer, root = session.trainer("tied", settings, []), session.folder / f"{session.layout}_critic"
    root.mkdir(exist_ok=True)
    policy, values = weights(trainer), {n: t.clone() for n, t in trainer.critic.parameters()}
    first = trainer.train(global_batch())
    out = {"policy_moved": differing(policy, weights(trainer)), "critic_moved": differing(values, dict(trainer.critic.parameters()))}
    out["first"] = first and sorted(first)
    path = trainer.save(str(root), MANIFEST)
    after = trainer.train(global_batch())
    resumed = session.trainer("tied", settings, [], load=False)
    out["step"] = resumed.load(str(path), weights_only=False)
    again = resumed.train(global_batch())
    out["metrics_equal"] = after == again
    out["differing"] = differing(weights(trainer), weights(resumed)) + differing(dict(trainer.critic.parameters()), dict(resumed.critic.parameters()))
    return out


def everything(session: Session) -> dict:
    torch.manual_seed(0)
    out = {"frozen": frozen(session), "forgotten": forgotten(session), "hooked": hooked(session), "taught": taught(session)}
    return out | {"critic": critic(session), "not_finite": not_finite(session)}
