"""What the trainer may be told besides an estimator: frozen parameters, forgotten moments, gradients that are not
finite, hooks, a teacher, a critic that trains alone, resuming with one. Runs on every rank of a layout, beside
``layout_cases.py``.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

from layout_cases import (
    CASES,
    GRPO,
    MANIFEST,
    PLAIN,
    REWARD_KL,
    SAMPLES,
    VOCABULARY,
    Session,
    differing,
    global_batch,
    rows,
    weights,
)
from layout_launch import POLICY
from slime_cli.buffer.columns import TrainBatch
from slime_cli.errors import DataError, EngineError, UsageError
from slime_cli.training.algorithm import advantages, objective
from slime_cli.training.batching.microbatch import MicroBatch
from slime_cli.training.network import heads, model
from slime_cli.training.network.residence import PARTS, Residence
from slime_cli.training.settings import Settings
from slime_cli.training.trainer import Trainer


def moved(
    session: Session, settings: Settings, batch: TrainBatch | None = None, flags: Sequence[str] = ()
) -> dict[str, bool]:
    """Parameter -> whether one rollout changed it."""
    trainer = session.trainer("untied", settings, list(flags))
    before = weights(trainer)
    trainer.train(batch or global_batch())
    return {name: bool((before[name] != tensor).any()) for name, tensor in trainer.policy.parameters()}


def said(kind: type[Exception], attempt: Callable[[], object]) -> str:
    """What an attempt fails with; nothing when it does not fail."""
    try:
        attempt()
    except kind as error:
        return str(error)
    return ""


def frozen(session: Session) -> dict:
    only = moved(session, dataclasses.replace(GRPO, only_train_params_name_list=(r"mlp\.linear_fc1",)))
    freeze = moved(session, dataclasses.replace(GRPO, freeze_params_name_list=(r"embedding", r"layernorm")))
    misspelt = dataclasses.replace(GRPO, freeze_params_name_list=("embeding",))
    return {"only": only, "freeze": freeze, "typo": said(UsageError, lambda: session.trainer("untied", misspelt, []))}


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


def offloaded(session: Session) -> dict:
    """Policy and critic whose memory is given away between two rollouts, part by part, against two that stay."""
    name, settings, flags, _ = CASES["ppo"]
    stays, goes = (session.trainer(name, settings, flags) for _ in range(2))
    assert goes.critic is not None
    networks = [goes.policy, goes.critic]
    residence = Residence(networks, moves=True)
    for trainer in (stays, goes):
        trainer.train(global_batch())
    held = {part: sum(storage.nbytes() for storage in residence._storages(part)) for part in PARTS}
    freed = {"state": residence.offload(("gradients", "optimizer"))}
    kept = sum(storage.nbytes() for storage in residence._storages("weights"))
    freed["weights"] = residence.offload(("weights",))
    left = sum(storage.nbytes() for part in PARTS for storage in residence._storages(part))
    refused = [
        said(RuntimeError, lambda: residence.require("training")),
        said(RuntimeError, lambda: residence.offload(("weights",))),
    ]
    residence.onload(("weights",))
    refused.append(said(RuntimeError, lambda: residence.onload(("weights",))))
    residence.require("publishing", ("weights",))
    residence.onload(("gradients", "optimizer"))
    for trainer in (stays, goes):
        trainer.train(global_batch())
    still = Residence(networks)
    still.offload(PARTS)
    return {
        "held": held,
        "freed": freed,
        "kept": kept,
        "left": left,
        "refused": refused,
        "differing": differing(weights(stays), weights(goes)),
        "on_a_cpu": sum(storage.nbytes() for part in PARTS for storage in still._storages(part)),
    }


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
    out = {
        "skipped": None if metrics is None else metrics["skipped_steps"],
        "moved": differing(before, weights(skipping)),
    }
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
        shape = advantages.Shape(rollout_data["response_lengths"], rollout_data["loss_mask"])
        rollout_data["advantages"], _ = advantages.compute(
            args, rollout_data["rewards"], rollout_data["group_index"], shape
        )

    def loss(args, batch, logits, sum_of_sample_mean):
        from slime_cli.training.network.logprobs import token_log_probs

        return sum_of_sample_mean(-token_log_probs(logits, batch["targets_R"], 1.0)), {"answer": 42}

    def constant(args, batch, logits, sum_of_sample_mean):
        return sum_of_sample_mean(logits.detach().sum(-1)), {}

    out = {}
    plain = session.trainer("untied", GRPO, [])
    custom = session.trainer("untied", GRPO, [], hooks={"advantage": advantage})
    plain.train(global_batch()), custom.train(global_batch())
    out["advantage"] = differing(weights(plain), weights(custom))
    sft = session.trainer("untied", Settings(loss_type="sft_loss", max_tokens=1024), [])
    custom = session.trainer("untied", GRPO, [], hooks={"loss": loss})
    sft.train(global_batch())
    metrics = custom.train(global_batch())
    out["loss"] = max(float((a - b).abs().max()) for a, b in zip(weights(sft).values(), weights(custom).values()))
    out["reported"] = None if metrics is None else metrics["answer"]
    flat = session.trainer("untied", GRPO, [], hooks={"loss": constant})
    out["refused"] = []
    for name, wrong in (
        ("advantages", lambda x: x[1:]),
        ("returns", lambda x: x[1:]),
        ("returns", lambda x: x * math.nan),
    ):

        def spoilt(args, rollout_data, name=name, wrong=wrong):
            advantage(args, rollout_data)
            rollout_data[name] = wrong(rollout_data["advantages"])

        trainer = session.trainer("untied", GRPO, [], hooks={"advantage": spoilt})
        out["refused"].append(said(UsageError, lambda trainer=trainer: trainer.train(global_batch())))
    return out | {"constant": said(RuntimeError, lambda: flat.train(global_batch()))}


def watched(session: Session) -> dict:
    """Functions that look on change nothing and see each model, pass and step; masks that one sets are the batch's."""
    seen = []

    def build(pre_process: bool, post_process: bool, vp_stage: int | None = None) -> torch.nn.Module:
        seen.append(("model", pre_process, post_process, vp_stage))
        return model.provider(pre_process, post_process, vp_stage)

    def first_is_masked(args: object, rollout_id: int, rollout_data: dict) -> None:
        seen.append(("data", rollout_id, sorted(rollout_data)))
        for mask in rollout_data["loss_masks"]:
            mask[:1] = 0

    def refused(change: Callable[[dict], object]) -> str:
        hooks = {"data_postprocess": lambda args, rollout_id, rollout_data: change(rollout_data)}
        trainer = session.trainer("untied", GRPO, [], hooks=hooks)
        return said(UsageError, lambda: trainer.train(global_batch()))

    looking = {
        "model_provider": build,
        "before_log_prob": lambda args, model, store_prefix: seen.append(("log_prob", store_prefix, len(model))),
        "before_train_step": lambda args, rollout_id, step_id, *of_policy: seen.append(("step", rollout_id, step_id)),
    }
    settings = dataclasses.replace(GRPO, num_steps_per_rollout=2, use_kl_loss=True, kl_loss_coef=0.1)
    plain = session.trainer("untied", settings, [])
    custom = session.trainer("untied", settings, [], hooks=looking)
    for trainer in (plain, custom):
        for _ in range(2):
            trainer.train(global_batch())
    out = {"looking": differing(weights(plain), weights(custom)), "seen": list(seen)}
    seen.clear()
    batch = global_batch()
    mask_R = batch.loss_mask_R.copy()
    mask_R[batch.response_starts_N[batch.response_lengths_N > 0]] = 0
    plain = session.trainer("untied", settings, [])
    custom = session.trainer("untied", settings, [], hooks={"data_postprocess": first_is_masked})
    plain.train(dataclasses.replace(batch, loss_mask_R=mask_R)), custom.train(batch)
    pairs = zip(weights(plain).values(), weights(custom).values())
    out |= {"masked": max(float((a - b).abs().max()) for a, b in pairs), "data": list(seen)}
    wrong = {
        "tokens": lambda data: data["rewards"].reverse(),
        "short": lambda data: data["loss_masks"].pop(),
        "nothing": lambda data: [mask.zero_() for mask in data["loss_masks"]],
    }
    return out | {"refused": {name: refused(change) for name, change in wrong.items()}}


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


def prepared(trainer: Trainer, batch: TrainBatch) -> tuple[list[MicroBatch], dict[str, float]]:
    """The micro-batches of a rollout as they are before its first step, and what was found out about them."""
    parts, _ = trainer._parts(batch)
    found = trainer._preparation(batch, parts).run()
    return [mb for part in parts for mb in part if len(mb.rows_R)], found


def versioned(batch: TrainBatch, versions: np.ndarray | int) -> TrainBatch:
    """The batch with the step of the version that wrote each token."""
    return dataclasses.replace(batch, versions_R=np.broadcast_to(versions, len(batch.loss_mask_R)).astype(np.int32))


def log_probs(trainer: Trainer, batch: TrainBatch) -> dict[int, float]:
    """Row of the batch -> log-probability under the present weights; nothing on ranks without logits."""
    now = versioned(batch, trainer.step)
    parts, _ = trainer._parts(now)
    found = trainer._preparation(now, parts).log_probs()
    return {int(row): value for mb, own_R in found for row, value in zip(mb.rows_R, own_R.double().tolist())}


def by_row(mbs: list[MicroBatch], column: Callable[[MicroBatch], torch.Tensor]) -> dict[int, float]:
    """Row of the batch -> its value in a column of these micro-batches."""
    return {int(row): value for mb in mbs for row, value in zip(mb.rows_R, column(mb).tolist())}


def endpoint(session: Session) -> dict:
    """A teacher's column in the batch, poisoned where masked: the advantages that a float64 formula gives, and its
    metrics."""
    batch = global_batch()
    rng = np.random.default_rng(11)
    mask = batch.loss_mask_R.astype(bool)
    teacher_R = rng.normal(-4.6, 0.5, len(mask)).astype(np.float32)
    given = dataclasses.replace(batch, teacher_log_probs_R=np.where(mask, teacher_R, np.nan))
    settings = Settings(max_tokens=64, use_opd=True, opd_type="sglang", opd_kl_coef=0.7)
    trainer = session.trainer("tied", settings, [])
    old = log_probs(trainer, batch)
    mbs, found = prepared(trainer, given)
    base_N = advantages.grpo(batch.rewards_N, batch.group_index_N)
    owner_R = np.repeat(np.arange(len(batch)), batch.response_lengths_N)
    worst = 0.0
    for mb in mbs:
        for row, got in zip(mb.rows_R, mb.advantages_R.double().tolist()):
            want = base_N[owner_R[row]] - 0.7 * (old[row] - float(teacher_R[row])) if mask[row] else 0.0
            worst = max(worst, abs(got - want))
    out = {
        "worst": worst,
        "rows": sum(len(mb.rows_R) for mb in mbs),
        "found": found,
        "teacher": float(teacher_R[mask].astype(float).mean()),
    }
    out["old"] = sum(v for row, v in old.items() if mask[row])
    out["trained"] = trainer.train(given)
    return out | {"missing": said(DataError, lambda: trainer.train(batch))}


def old_actor(session: Session) -> dict:
    """A second rollout of the weights that generated the first: ratios to those weights, or none that are called
    on-policy."""
    batch = versioned(global_batch(), 0)
    out = {}
    settings = dataclasses.replace(GRPO, use_kl_loss=False, kl_loss_coef=0.0, entropy_coef=0.0, max_tokens=64)
    for kept in (True, False):
        trainer = session.trainer("untied", dataclasses.replace(settings, keep_old_actor=kept), [])
        if kept:
            trainer.keep("old_actor")
        generating = log_probs(trainer, batch)
        first = trainer.train(batch)
        before = weights(trainer)
        present = log_probs(trainer, batch)
        mbs, _ = prepared(trainer, batch)
        name = "kept" if kept else "not_kept"
        out[name] = {
            "measured": sorted({bool(v) for mb in mbs for v in mb.measured_R[mb.mask_R]}),
            "moved": differing(before, weights(trainer)),
            "gap": (
                max((abs(v - generating[r]) for r, v in by_row(mbs, lambda mb: mb.old_log_probs_R).items()), default=0)
                if kept
                else [mb.old_log_probs_R for mb in mbs].count(None) == len(mbs)
            ),
            "far": max((abs(present[r] - generating[r]) for r in present), default=0.0),
        }
        second = trainer.train(batch)
        if first is not None:
            diff = "train_rollout_logprob_abs_diff"
            out[name] |= {
                "first": first.get(diff),
                "second": second.get(diff),
                "ppo_kl": second["ppo_kl"],
                "pg_loss": second["pg_loss"],
            }
        out[name]["want"] = by_hand(batch, settings, present, generating if kept else present)
    return out


def mixed_versions(session: Session) -> dict:
    """Tokens of three versions and of nobody, side by side, after a rollout of two steps: whose log-probabilities are
    measured, corrected and called old, against float64 sums over the batch's rows."""
    out = {}
    rng = np.random.default_rng(3)
    plain = dataclasses.replace(GRPO, num_steps_per_rollout=2, max_tokens=64)
    ways = {
        "truncate": {"use_tis": True, "tis_mode": "truncate"},
        "mask": {"use_tis": True, "tis_mode": "mask", "tis_clip_low": 0.7, "tis_clip": 1.4},
        "kept": {"use_tis": True, "keep_old_actor": True},
        "engines": {"use_rollout_logprobs": True},
    }
    for way, more in ways.items():
        settings = dataclasses.replace(plain, untold_version="unknown", **more)
        trainer = session.trainer("untied", settings, [])
        trainer.keep("old_actor")
        size = len(global_batch().loss_mask_R)
        batch = versioned(global_batch(), rng.choice([0, 2] if way == "kept" else [-1, 0, 1, 2], size))
        generating = log_probs(trainer, batch)
        trainer.train(versioned(global_batch(), 0))
        present = log_probs(trainer, batch)
        mbs, _ = prepared(trainer, batch)
        trained = trainer.train(batch)
        out[way] = checked_versions(batch, settings, mbs, present, generating) | {"metrics": trained}
    refused = session.trainer("untied", dataclasses.replace(plain, keep_old_actor=True), [])
    refused.keep("old_actor")
    refused.train(versioned(global_batch(), 0))
    out["refused"] = said(UsageError, lambda: refused.train(versioned(global_batch(), 1)))
    out["present"] = said(UsageError, lambda: refused.train(versioned(global_batch(), 2)))
    return out


def checked_versions(
    batch: TrainBatch, s: Settings, mbs: list[MicroBatch], present: dict[int, float], generating: dict[int, float]
) -> dict[str, float]:
    """How far this rank's micro-batches are from what the versions of their tokens say, and the sums of the measured
    difference. The trainer is at step 2; where it keeps weights, they are of step 0."""
    out = {"old": 0.0, "weights": 0.0, "strange": 0, "sum": 0.0, "count": 0, "max": 0.0, "off_policy": 0}
    measured_mbs = [mb for mb in mbs if mb.measured_R is not None]
    measured = by_row(measured_mbs, lambda mb: mb.measured_R)
    weight = by_row(mbs, lambda mb: mb.correction_R) if s.use_tis else {}
    for row, old in by_row(mbs, lambda mb: mb.old_log_probs_R.double()).items():
        if not batch.loss_mask_R[row]:
            continue
        version = int(batch.versions_R[row])
        engines = float(batch.rollout_log_probs_R[row])
        kept = s.keep_old_actor and version == 0
        want = engines if s.use_rollout_logprobs else generating[row] if kept else present[row]
        out["old"] = max(out["old"], abs(old - want))
        if s.use_tis:
            out["weights"] = max(out["weights"], abs(weight[row] - tis_weight(s, math.exp(want - engines))))
        if row in measured:
            counts = version == 2 or kept
            out["strange"] += measured[row] != counts
            gap = abs((present[row] if s.use_rollout_logprobs else want) - engines)
            out |= {"sum": out["sum"] + gap * counts, "count": out["count"] + counts}
            out["max"] = max(out["max"], gap * counts)
            out["off_policy"] += not counts
    return out | {"steps_measured": len(measured_mbs) / len(mbs)}


def tis_weight(s: Settings, ratio: float) -> float:
    if s.tis_mode == "truncate":
        return min(ratio, s.tis_clip)
    if s.tis_mode == "mask":
        return ratio if s.tis_clip_low <= ratio <= s.tis_clip else 0.0
    return min(max(ratio, s.tis_clip_low), s.tis_clip)


def current_versions(session: Session) -> dict:
    """Batches whose versions are all the present one, rollout by rollout, against batches that tell none."""
    out = {}
    for way, more in {
        "tis": {"use_tis": True, "num_steps_per_rollout": 2},
        "one_step": {},
        "engines": {"use_rollout_logprobs": True, "num_steps_per_rollout": 2},
        "kept": {"keep_old_actor": True},
    }.items():
        settings = dataclasses.replace(GRPO, max_tokens=64, **more)
        told, untold = (session.trainer("untied", settings, []) for _ in range(2))
        found = []
        for _ in range(2):
            told.keep("old_actor")
            now = versioned(global_batch(), told.step)
            found.append((told.train(now), untold.train(global_batch())))
        out[way] = {
            "metrics_equal": all(a == b for a, b in found),
            "differing": differing(weights(told), weights(untold)),
            "measured": None if found[0][0] is None else found[1][0].get("train_rollout_logprob_abs_diff"),
        }
    return out


def by_hand(batch: TrainBatch, s: Settings, now: dict[int, float], old: dict[int, float]) -> float:
    """GRPO's clipped loss over this rank's samples in plain floats."""
    advantage_N = advantages.grpo(batch.rewards_N, batch.group_index_N)
    total = 0.0
    row = 0
    for n, size in enumerate(batch.response_lengths_N.tolist()):
        rows = [r for r in range(row, row + size) if batch.loss_mask_R[r]]
        row += size
        for r in rows:
            if r in now:
                ratio = math.exp(now[r] - old[r])
                clipped = min(max(ratio, 1 - s.eps_clip), 1 + s.eps_clip_high)
                total += max(-ratio * advantage_N[n], -clipped * advantage_N[n]) / len(rows) / len(batch)
    return total


def nucleus(session: Session) -> dict:
    """What sampling left, ragged and for some tokens nothing: log-probabilities among it, chunk by chunk, against the
    logits."""
    batch = global_batch()
    rng = np.random.default_rng(5)
    targets = [t for row in rows(batch) for t in row["tokens"][len(row["tokens"]) - row["response"] :].tolist()]
    kept = [
        [] if rng.random() < 0.2 else sorted({t, *rng.integers(0, VOCABULARY, rng.integers(0, 9)).tolist()})
        for t in targets
    ]
    columns = {
        "kept_ids_K": np.array([i for ids in kept for i in ids], np.int64),
        "kept_counts_R": np.array(list(map(len, kept)), np.int64),
    }
    cut = dataclasses.replace(batch, **columns)
    settings = dataclasses.replace(GRPO, use_top_p_replay=True, max_tokens=64, log_probs_chunk_size=3)
    trainer = session.trainer("untied", settings, [])
    parts, _ = trainer._parts(cut)

    def whole(mb, **given):
        return gather_from_tensor_model_parallel_region(heads.logits(mb, **given))

    worst = 0.0
    count = 0
    all_logits = [out for part in parts for out in trainer.policy.forward(part, whole)]
    for (mb, got_R), logits_RV in zip(trainer._preparation(cut, parts).log_probs(), all_logits):
        for row, got, logits_V in zip(mb.rows_R, got_R.double().tolist(), logits_RV.double()):
            among_V = logits_V[kept[row]] if kept[row] else logits_V
            worst = max(worst, abs(got - float(logits_V[targets[row]] - among_V.logsumexp(0))))
            count = count + 1
    out = {
        "worst": worst,
        "count": count,
        "cut": trainer.train(cut),
        "whole": session.trainer("untied", GRPO, []).train(batch),
    }
    return out | {"missing": said(DataError, lambda: trainer.train(batch))}


def user_weights(session: Session) -> dict:
    """slime's hooks that weigh tokens, against slime's own ways to the same end."""

    def tis(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **kwargs):
        ratio = torch.cat([(a - b).exp() for a, b in zip(train_log_probs, rollout_log_probs)])
        return pg_loss * ratio.clamp(args.tis_clip_low, args.tis_clip), loss_masks, {"mine": ratio}

    def mean(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
        def reduce(x):
            return sum((v * m).sum() / m.sum().clamp(min=1) for v, m in zip(x.split(response_lengths), loss_masks))

        return reduce

    def thousandth(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
        return lambda x: (x * torch.cat(loss_masks)).sum() / 1000

    out = {}
    settings = dataclasses.replace(GRPO, num_steps_per_rollout=2, max_tokens=64)
    runs = {
        "plain": (settings, {}),
        "mean": (settings, {"pg_loss_reducer": mean}),
        "thousandth": (settings, {"pg_loss_reducer": thousandth}),
        "tis": (dataclasses.replace(settings, use_tis=True), {}),
        "own_tis": (dataclasses.replace(settings, use_tis=True), {"tis": tis}),
        "measured": (dataclasses.replace(settings, get_mismatch_metrics=True), {"tis": tis}),
    }
    found = {}
    for name, (s, hooks) in runs.items():
        trainer = session.trainer("untied", s, [], hooks=hooks)
        out[name], found[name] = trainer.train(global_batch()), weights(trainer)
    for a, b in (
        ("plain", "mean"),
        ("tis", "own_tis"),
        ("plain", "measured"),
        ("plain", "tis"),
        ("plain", "thousandth"),
    ):
        out[f"{a}-{b}"] = max(float((found[a][k] - found[b][k]).abs().max()) for k in found[a])
    per_token = {}
    for name, hooks in (("plain", {}), ("thousandth", {"pg_loss_reducer": thousandth})):
        per_token[name] = session.trainer("untied", settings, ["--calculate-per-token-loss"], hooks=hooks).train(
            global_batch()
        )
    return out | {"per_token": per_token}


def critic(session: Session) -> dict:
    """The critic alone first, then both; a checkpoint in between is a resume to the last bit."""
    settings = dataclasses.replace(
        REWARD_KL, advantage_estimator="ppo", num_critic_only_steps=1, num_steps_per_rollout=2, **PLAIN
    )
    trainer = session.trainer("tied", settings, [])
    root = session.folder / f"{session.layout}_critic"
    root.mkdir(exist_ok=True)
    policy = weights(trainer)
    values = {n: t.clone() for n, t in trainer.critic.parameters()}
    first = trainer.train(global_batch())
    out = {
        "policy_moved": differing(policy, weights(trainer)),
        "critic_moved": differing(values, dict(trainer.critic.parameters())),
    }
    out["first"] = first and sorted(first)
    path = trainer.save(str(root), MANIFEST)
    after = trainer.train(global_batch())
    resumed = session.trainer("tied", settings, [], load=False)
    out["step"] = resumed.load(str(path), weights_only=False)
    again = resumed.train(global_batch())
    out["metrics_equal"] = after == again
    out["differing"] = differing(weights(trainer), weights(resumed)) + differing(
        dict(trainer.critic.parameters()), dict(resumed.critic.parameters())
    )
    return out


def missing(session: Session) -> dict[str, str]:
    """What is said of samples without a column that the settings need."""
    batch = dataclasses.replace(global_batch(), rollout_log_probs_R=None)
    return {
        name: said(
            DataError, lambda: session.trainer("untied", dataclasses.replace(GRPO, **{name: True}), []).train(batch)
        )
        for name in ("use_rollout_logprobs", "use_tis", "use_top_p_replay", "use_rollout_routing_replay")
    }


def far_out(session: Session) -> dict:
    """Gradients of the policy loss where every third token is far out and left out, against those where it is an
    ordinary one."""
    batch = dataclasses.replace(global_batch(), rewards_N=np.arange(SAMPLES) % 3.0)
    plain = dataclasses.replace(GRPO, use_kl_loss=False, entropy_coef=0.0)
    trainer = session.trainer("untied", plain, [])
    (mb,) = trainer._parts(batch)[0][0]
    rng = np.random.default_rng(2)
    size = len(mb.mask_R)
    third_R = torch.arange(size) % 3 == 0
    near_R = torch.from_numpy(rng.normal(0, 0.1, size)).float()
    sign_R = torch.from_numpy(rng.choice([-1.0, 1.0], size)).float()
    mb.rollout_log_probs_R = None

    def gradients(s: Settings, gap_R, advantages_R, correction_R=None, ref_gap_R=None, entropy=0.0) -> torch.Tensor:
        out_2R = torch.stack([torch.full((size,), -1.0), torch.full((size,), entropy)]).requires_grad_()
        mb.old_log_probs_R = -1.0 - gap_R
        mb.advantages_R = advantages_R
        mb.correction_R = correction_R
        mb.ref_log_probs_R = None if ref_gap_R is None else -1.0 - ref_gap_R
        loss, _ = objective.policy(s, mb, out_2R)
        (gradient_2R,) = torch.autograd.grad(loss, out_2R)
        assert torch.isfinite(loss)
        return gradient_2R

    def rejected(far_R):
        return far_R, torch.where(third_R, -1.0, sign_R), (~third_R).float()

    cases = {
        "clipped": ({}, lambda far_R: (far_R, torch.where(third_R, 1.0, sign_R))),
        "dual_clip": ({"eps_clip_c": 3.0}, lambda far_R: (far_R, torch.where(third_R, -1.0, sign_R))),
        "no_advantage": ({}, lambda far_R: (far_R, torch.where(third_R, 0.0, sign_R))),
        "rejected": ({}, rejected),
        "rejected_cispo": ({"advantage_estimator": "cispo"}, rejected),
        "measured_kl": (
            {"use_kl_loss": True, "kl_loss_type": "k3"},
            lambda far_R: (near_R, sign_R, None, torch.where(third_R, -far_R, near_R)),
        ),
        "entropy": ({}, lambda far_R: (near_R, sign_R, None, None, float(far_R.max()))),
    }
    out = {}
    for name, (more, given) in cases.items():
        s = dataclasses.replace(plain, kl_loss_coef=0.0, **more)
        want = gradients(s, *given(torch.where(third_R, 5.0, near_R)))
        for far in (100.0, 1e4, math.inf):
            got = gradients(s, *given(torch.where(third_R, far, near_R)))
            out[f"{name} {far}"] = {"differing": int((got != want).sum()), "some": int((want != 0).sum())}
    return out | {
        "opsm": far_in_a_sample_that_opsm_leaves_out(mb, gradients, plain),
        "own_loss": own_loss_where_masked(mb),
    }


def far_in_a_sample_that_opsm_leaves_out(
    mb: MicroBatch, gradients: Callable[..., torch.Tensor], plain: Settings
) -> dict:
    """One token whose ratio overflows, in samples whose mean has gone the other way."""
    s = dataclasses.replace(plain, use_opsm=True, opsm_delta=0.1)
    first_R = torch.from_numpy(np.diff(mb.sample_R.numpy(), prepend=-1) > 0)
    dropped_R = mb.sample_R % 2 == 0
    gap_R = torch.where(dropped_R, -1000.0, 0.05)
    advantages_R = torch.where(dropped_R, -1.0, 1.0)
    want = gradients(s, gap_R, advantages_R)
    got = gradients(s, torch.where(dropped_R & first_R, 100.0, gap_R), advantages_R)
    alone_R = torch.bincount(mb.sample_R[mb.mask_R], minlength=mb.samples)[mb.sample_R] < 2
    return {"differing": int((got != want)[0, ~alone_R].sum()), "some": int((want != 0).sum())}


def own_loss_where_masked(mb: MicroBatch) -> dict:
    """A user's loss whose exponent overflows at masked tokens: neither its value nor its gradient knows of them."""

    def run(fill: float) -> tuple[float, torch.Tensor]:
        logits_RV = torch.zeros(len(mb.mask_R), 8, requires_grad=True)
        rows_RV = logits_RV * 1.0  # as a head gives them, not a leaf

        def loss(args, batch, logits_RV, sum_of_sample_mean):
            log_probs_R = logits_RV.log_softmax(-1)[:, 0]
            return sum_of_sample_mean((log_probs_R + torch.where(batch["mask_R"], 0.0, fill)).exp()), {}

        value, _ = objective.custom(loss, None, mb, rows_RV)
        return float(value), torch.autograd.grad(value, logits_RV)[0]

    (want, want_RV), (got, got_RV) = run(0.0), run(1e4)
    return {"differing": int((got_RV != want_RV).sum()) + (got != want), "some": int((want_RV != 0).sum())}


def everything(session: Session) -> dict:
    torch.manual_seed(0)
    return {name: globals()[name](session) for name in POLICY[session.layout]}
