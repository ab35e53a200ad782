"""What every layout runs: bridge round trips, training steps, checkpoints. Runs in ``layout_worker.py``, on every rank.

One fixed global batch with all that could go wrong in it, two checkpoints (tied and untied) and a reference policy,
made by :func:`make` with transformers, which also takes the first step in float64 with nothing but autograd.
"""

import collections
import dataclasses
import pathlib

import numpy as np
import torch
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

import rounding
from layout_launch import OVER_FOUR
from slime_cli import manifests
from slime_cli.buffer.columns import TrainBatch
from slime_cli.hardware.device import Device
from slime_cli.manifests import checkpoints, layout
from slime_cli.models import architecture
from slime_cli.options.estimators import ESTIMATORS
from slime_cli.tracing.spans import Tracer
from slime_cli.training.algorithm import advantages
from slime_cli.training.network import heads, megatron
from slime_cli.training.settings import Settings
from slime_cli.training.trainer import Trainer
from slime_cli.weights.bridge import Bridge

SAMPLES = 16
VOCABULARY = 96
GRPO = Settings(
    max_tokens=1024,
    use_kl_loss=True,
    kl_loss_coef=0.1,
    kl_loss_type="low_var_kl",
    entropy_coef=0.01,
    eps_clip=0.05,
    eps_clip_high=0.1,
)
PER_TOKEN = ["--calculate-per-token-loss"]
RECOMPUTE = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
SELECTIVE = ["--recompute-granularity", "selective"]
OFF = dataclasses.replace(GRPO, use_rollout_logprobs=True, use_unbiased_kl=True, kl_loss_type="k3", eps_clip_c=1.5)
"""The engine's log-probabilities are the old ones, so ratios are far from 1."""
REWARD_KL = Settings(
    max_tokens=1024, kl_coef=0.05, kl_loss_type="k1", normalize_advantages=True, eps_clip=0.05, eps_clip_high=0.1
)
PLAIN = {"normalize_advantages": False, "value_clip": 0.05}
SMALL = 64
"""A cap that makes many packs of the batch, where 1024 makes one."""
BALANCED = dataclasses.replace(GRPO, max_tokens=SMALL, balance_data=True, balance_by_flops=True)
CASES = {
    "grpo": ("tied", GRPO, [], "batch"),
    "grpo_packed_small": ("tied", dataclasses.replace(GRPO, max_tokens=SMALL), [], "batch"),
    "grpo_per_token": ("tied", GRPO, PER_TOKEN, "batch"),
    "grpo_untied": ("untied", GRPO, [], "batch"),
    "grpo_fanned_out_balanced": ("untied", BALANCED, [], "fanned_out"),
    "grpo_two_steps_a_rollout": ("untied", dataclasses.replace(GRPO, num_steps_per_rollout=2), [], "batch"),
    "grpo_shared_prompts": ("untied", GRPO, [], "shared_prompts"),
    "sft": ("untied", Settings(loss_type="sft_loss", max_tokens=1024), [], "batch"),
    "grpo_recomputed": ("tied", GRPO, RECOMPUTE, "batch"),
    "gspo": ("tied", dataclasses.replace(OFF, advantage_estimator="gspo", use_opsm=True, opsm_delta=0.05), [], "batch"),
    "cispo": (
        "untied",
        dataclasses.replace(OFF, advantage_estimator="cispo", eps_clip=0.3, eps_clip_high=0.3),
        [],
        "batch",
    ),
    "reinforce_plus_plus": (
        "tied",
        dataclasses.replace(REWARD_KL, advantage_estimator="reinforce_plus_plus", gamma=0.95),
        [],
        "batch",
    ),
    "reinforce_plus_plus_baseline": (
        "untied",
        dataclasses.replace(
            REWARD_KL,
            advantage_estimator="reinforce_plus_plus_baseline",
            use_tis=True,
            tis_level="geometric",
            use_rs=True,
            rs_lower_bound=0.1,
            rs_upper_bound=3.0,
            tis_batch_normalize=True,
        ),
        [],
        "batch",
    ),
    "ppo": (
        "tied",
        dataclasses.replace(REWARD_KL, advantage_estimator="ppo", lambd=0.9, num_steps_per_rollout=2, **PLAIN),
        [],
        "batch",
    ),
}
"""Name -> (checkpoint, settings, Megatron flags, which batch), run in every layout."""
MORE = {
    "grpo_static": ("tied", dataclasses.replace(GRPO, max_tokens=None), ["--micro-batch-size", "2"], "batch"),
    "grpo_fanned_out": ("untied", GRPO, [], "fanned_out"),
    "grpo_fanned_out_two_steps": ("untied", dataclasses.replace(GRPO, num_steps_per_rollout=2), [], "fanned_out"),
    "grpo_fanned_out_two_steps_balanced": (
        "untied",
        dataclasses.replace(BALANCED, num_steps_per_rollout=2),
        [],
        "fanned_out",
    ),
    "grpo_shared_prompts_packed_small": (
        "untied",
        dataclasses.replace(GRPO, max_tokens=SMALL),
        [],
        "shared_prompts",
    ),
    "grpo_recomputed_selectively": ("tied", GRPO, SELECTIVE, "batch"),
    "grpo_oversize_isolated": ("tied", dataclasses.replace(GRPO, max_tokens=20), [], "batch"),
    "grpo_per_token_packed_small": ("tied", dataclasses.replace(GRPO, max_tokens=SMALL), PER_TOKEN, "batch"),
    "grpo_chunks_of_a_row": ("tied", dataclasses.replace(GRPO, log_probs_chunk_size=1), [], "batch"),
    "grpo_rollout_log_probs": ("untied", dataclasses.replace(GRPO, use_rollout_logprobs=True), [], "batch"),
    "grpo_rollout_log_probs_nan_where_masked": (
        "untied",
        dataclasses.replace(GRPO, use_rollout_logprobs=True),
        [],
        "poisoned",
    ),
    "sft_fanned_out": ("untied", Settings(loss_type="sft_loss", max_tokens=1024), [], "fanned_out"),
    "sft_packed_small": ("untied", Settings(loss_type="sft_loss", max_tokens=SMALL), [], "batch"),
    **{
        f"{case}_packed_small": (name, dataclasses.replace(settings, max_tokens=SMALL), flags, which)
        for case, (name, settings, flags, which) in CASES.items()
        if case in ESTIMATORS[1:]
    },
    "reinforce_plus_plus_baseline_nan_where_masked": (*CASES["reinforce_plus_plus_baseline"][:3], "poisoned"),
}
"""Run in the layouts ``single`` and ``dp2`` only."""
REFERENCES = ("grpo", "grpo_per_token", "grpo_untied", "grpo_rollout_log_probs", "sft", "grpo_fanned_out_balanced")
REFERENCES += ("grpo_shared_prompts", "sft_fanned_out")
"""Cases whose first step is taken in float64 too."""


def global_batch(poisoned: bool = False) -> TrainBatch:
    """Groups of 4, ragged; a fifth of the tokens masked, two samples wholly, two samples without a response."""
    rng = np.random.default_rng(7)
    prompts = rng.integers(1, 21, SAMPLES)
    responses = rng.integers(1, 25, SAMPLES)
    responses[[9, SAMPLES - 1]] = 0  # the last one too: its place is the end of the columns
    prompts[3], responses[3] = 1, 1
    lengths = prompts + responses
    mask = (rng.random(responses.sum()) > 0.2).astype(np.uint8)
    owners = np.repeat(np.arange(SAMPLES), responses)
    mask[np.isin(owners, [5, 10])] = 0
    log_probs = rng.normal(-4.6, 0.5, responses.sum()).astype(np.float32)
    rewards = rng.integers(0, 3, SAMPLES).astype(float)
    rewards[8:12] = 0.1  # a group without spread
    tokens = rng.integers(0, VOCABULARY, lengths.sum())
    if poisoned:
        log_probs[mask == 0] = rng.choice([np.nan, np.inf, -np.inf], int((mask == 0).sum()))
    return TrainBatch(
        sample_index_N=np.arange(SAMPLES),
        group_index_N=np.arange(SAMPLES) // 4,
        lengths_N=lengths,
        response_lengths_N=responses,
        rewards_N=rewards,
        truncated_N=np.zeros(SAMPLES, bool),
        tokens_T=tokens,
        loss_mask_R=mask,
        rollout_log_probs_R=log_probs,
    )


def fanned_out() -> TrainBatch:
    """The same samples, of trajectories that fanned out: alone, in pairs, in threes, a wholly masked sibling, siblings
    apart."""
    trajectories = np.array([0, 0, 1, 2, 4, 4, 4, 5, 9, 8, 8, 8, 12, 13, 12, 13])
    return dataclasses.replace(global_batch(), sample_index_N=trajectories)


def of_shared_prompts() -> TrainBatch:
    """The same responses, to prompts that the last two groups have in common, one each."""
    batch = global_batch()
    first = np.arange(SAMPLES)
    first[8:] -= first[8:] % 4
    prompts_N = (batch.lengths_N - batch.response_lengths_N)[first]
    tokens = []
    for i, n in enumerate(prompts_N):
        begin, end = batch.starts_N[first[i]], batch.starts_N[i] + batch.lengths_N[i]
        tokens += [batch.tokens_T[begin : begin + n], batch.tokens_T[end - batch.response_lengths_N[i] : end]]
    lengths_N = prompts_N + batch.response_lengths_N
    return dataclasses.replace(batch, lengths_N=lengths_N, tokens_T=np.concatenate(tokens))


def batch_of(which: str) -> TrainBatch:
    if which == "shared_prompts":
        return of_shared_prompts()
    return fanned_out() if which == "fanned_out" else global_batch(which == "poisoned")


# -- the reference -----------------------------------------------------------------------------------------------------


def make(folder: pathlib.Path) -> dict:
    """Checkpoints ``tied``, ``untied`` and a reference policy for each; transformers' logits; the first step in
    float64."""
    for seed, (name, tied) in enumerate(
        [("tied", True), ("untied", False), ("tied_reference", True), ("untied_reference", False)]
    ):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=VOCABULARY,
                hidden_size=64,
                intermediate_size=96,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=32,
                max_position_embeddings=256,
                rope_theta=1e6,
                tie_word_embeddings=tied,
                initializer_range=0.08,
                dtype="float32",
                eos_token_id=1,
                bos_token_id=None,
                pad_token_id=None,
            )
        )
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if "norm" in key:  # all ones would hide a norm put in another's place
                    parameter.add_(torch.randn_like(parameter) * 0.2)
        model.save_pretrained(folder / name)
    for name in ("tied", "untied"):
        model = Qwen3ForCausalLM.from_pretrained(folder / name, attn_implementation="eager")
        with torch.no_grad():
            torch.save(
                torch.cat([response_logits(model, row) for row in rows(global_batch())]), folder / f"{name}.logits"
            )
    return {case: first_step(folder, case) for case in REFERENCES}


def rows(batch: TrainBatch) -> list[dict]:
    """The batch sample by sample, by plain slicing."""
    out = []
    t = 0
    r = 0
    for n, m in zip(batch.lengths_N.tolist(), batch.response_lengths_N.tolist()):
        out.append(
            {
                "tokens": torch.tensor(batch.tokens_T[t : t + n]),
                "response": m,
                "mask": torch.tensor(batch.loss_mask_R[r : r + m]).bool(),
                "rollout": torch.tensor(batch.rollout_log_probs_R[r : r + m]).double(),
            }
        )
        t = t + n
        r = r + m
    return out


def response_logits(model, row):
    n = len(row["tokens"])
    m = row["response"]
    return model(row["tokens"][None]).logits[0, n - m - 1 : n - 1]


def first_step(folder: pathlib.Path, case: str) -> dict[str, float]:
    """Loss, its parts and the gradient norm of the first step, in float64, one sequence at a time."""
    name, s, flags, which = (CASES | MORE)[case]
    batch = batch_of(which)
    trained = collections.Counter(
        np.repeat(batch.sample_index_N, batch.response_lengths_N)[batch.loss_mask_R == 1].tolist()
    )
    trajectories = len(set(batch.sample_index_N.tolist()))

    def load(which):
        return Qwen3ForCausalLM.from_pretrained(folder / which, attn_implementation="eager").double()

    policy = load(name)
    reference = load(f"{name}_reference")
    advantages_N = advantages.grpo(batch.rewards_N, batch.group_index_N, batch.sample_index_N).tolist()
    tokens = int(batch.loss_mask_R.sum())
    sums = {"pg_loss": 0.0, "kl_loss": 0.0}
    entropies = 0.0
    total = 0.0
    for row, advantage, trajectory in zip(rows(batch), advantages_N, batch.sample_index_N.tolist()):
        targets = row["tokens"][len(row["tokens"]) - row["response"] :]
        mask = row["mask"]
        if not mask.any():
            continue
        log_p = response_logits(policy, row).log_softmax(-1)
        now = log_p.gather(1, targets[:, None])[:, 0][mask]
        weight = 1 / tokens if flags else 1 / (trained[trajectory] * trajectories)
        if s.policy:
            with torch.no_grad():
                log_q = response_logits(reference, row).log_softmax(-1).gather(1, targets[:, None])[:, 0][mask]
            ratio = (now - (row["rollout"][mask] if s.use_rollout_logprobs else now.detach())).exp()
            pg = torch.maximum(-ratio * advantage, -ratio.clamp(1 - s.eps_clip, 1 + s.eps_clip_high) * advantage)
            kl = ((log_q - now).exp() - 1 - (log_q - now)).clamp(max=10)
            entropy = -(log_p.exp() * log_p).sum(-1)[mask]
            loss = pg + s.kl_loss_coef * kl - s.entropy_coef * entropy
            sums["pg_loss"] += float(pg.sum()) * weight
            sums["kl_loss"] += float(kl.sum()) * weight
            entropies += float(entropy.sum())
        else:
            loss = -now
        total = total + loss.sum() * weight
    total.backward()
    norm = sum(float(p.grad.square().sum()) for p in policy.parameters()) ** 0.5
    out = {"loss": float(total), "grad_norm": norm}
    return out | sums | {"entropy": entropies / tokens} if s.policy else out


# -- a rank ------------------------------------------------------------------------------------------------------------


def argv(device: Device, hf: pathlib.Path, flags: list[str]) -> list[str]:
    model = architecture.argv(architecture.megatron_args(architecture.read_config(str(hf))))
    own = [
        "--global-batch-size",
        str(SAMPLES),
        "--lr",
        "1e-3",
        "--min-lr",
        "1e-3",
        "--clip-grad",
        "1.0",
        "--weight-decay",
        "0.1",
    ]
    own += ["--adam-eps", str(rounding.ADAM_EPSILON)]
    always = [word for word in megatron.always(device) if word != "--bf16"]  # float32 on a GPU too
    return always + model + own + flags


@dataclasses.dataclass
class Session:
    folder: pathlib.Path
    layout: str
    flags: list[str]
    rank: int
    world_size: int
    device: Device

    def trainer(
        self, name: str, settings: Settings, flags: list[str], *, load: bool = True, hooks: dict | None = None
    ) -> Trainer:
        """With the weights of checkpoint ``name``, and its reference policy if the settings want one."""
        args = megatron.parse(argv(self.device, self.folder / name, self.flags + flags), self.rank, self.world_size)
        out = Trainer(args, settings, Tracer(str(self.folder), f"trainer-{self.rank}", enabled=False), hooks)
        if settings.reference:
            self.bridge(f"{name}_reference").load(out.policy.model)
            out.policy.keep("reference")
        if load:
            self.bridge(name).load(out.policy.model)
            out.begin()
        return out

    def bridge(self, name: str) -> Bridge:
        return Bridge(str(self.folder / name), torch.float32)


def steps(session: Session, only: tuple[str, ...] = ()) -> dict[str, list]:
    """Two rollouts of every case, or of some; their metrics on the rank that reports."""
    out = {}
    cases = CASES | MORE if session.layout in ("single", "dp2") else CASES
    if session.world_size == 4:
        only = OVER_FOUR
    for case in only or cases:
        name, settings, flags, which = cases[case]
        trainer = session.trainer(name, settings, flags)
        out[case] = [trainer.train(batch_of(which)) for _ in range(2)]
    return out


def rounded(session: Session) -> list[dict]:
    """Metrics of four rollouts, as :func:`save` takes them, from weights that were each moved by at most one
    rounding."""
    trainer = session.trainer("tied", CHECKPOINTED, [])
    generator = torch.Generator().manual_seed(0)
    for _, tensor in trainer.policy.parameters():
        tensor.mul_(1 + rounding.EPSILON["float32"] * (2 * torch.rand(tensor.shape, generator=generator) - 1))
    trainer.policy.optimizer.reload_model_params()
    trainer.begin()
    return [trainer.train(global_batch()) for _ in range(4)]


def bridges(session: Session) -> dict[str, dict]:
    """HF -> Megatron -> HF, weight by weight; Megatron's logits on packs against transformers' one by one."""
    out = {}
    for name in ("tied", "untied"):
        trainer = session.trainer(name, Settings(max_tokens=128), [])
        want = load_file(session.folder / name / "model.safetensors")
        got = {key: tensor.clone() for key, tensor in session.bridge(name).export(trainer.policy.model)}
        gaps = [float((got[k] - want[k]).abs().max()) for k in want if k in got and got[k].shape == want[k].shape]
        out[name] = {
            "missing": sorted(set(want) - set(got)),
            "extra": sorted(set(got) - set(want)),
            "exact": len(gaps),
            "largest": max(gaps),
            "logits": logits_gap(session, trainer, name),
        }
    return out


def logits_gap(session: Session, trainer: Trainer, name: str) -> float | None:
    """Largest difference over this rank's response tokens; None on ranks that have no logits."""
    batch = global_batch()
    mbs, _ = trainer.splitter.micro_batches(batch, range(len(batch)))

    def whole(mb, **given):
        return gather_from_tensor_model_parallel_region(heads.logits(mb, **given))

    want_RV = torch.load(session.folder / f"{name}.logits")
    worst = None
    for mb, logits_RV in zip(mbs, trainer.policy.forward(mbs, whole)):
        if len(mb.rows_R):
            worst = max(worst or 0.0, float((logits_RV - want_RV[mb.rows_R]).abs().max()))
    return worst


# -- checkpoints -------------------------------------------------------------------------------------------------------

MANIFEST = manifests.Checkpoint(
    format="torch_dist",
    source="test",
    source_hashes={},
    architecture="Qwen3ForCausalLM",
    megatron_args={},
    tokenizer_hash="",
    chat_template_hash="",
    iteration=2,
    dtype="float32",
    layout={},
)
CHECKPOINTED = dataclasses.replace(GRPO, max_tokens=64)


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.policy.parameters()}


def save(session: Session) -> dict:
    """Steps 1 and 2, a checkpoint, steps 3 and 4, all kept for :func:`resume` and for other layouts to compare with."""
    trainer = session.trainer("tied", CHECKPOINTED, [])
    root = session.folder / f"{session.layout}_checkpoints"
    root.mkdir(exist_ok=True)
    for _ in range(2):
        trainer.train(global_batch())
    trainer.save(str(root), MANIFEST)
    at_two = weights(trainer)
    metrics = [trainer.train(global_batch()) for _ in range(2)]
    exported = {name: tensor.clone() for name, tensor in session.bridge("tied").export(trainer.policy.model)}
    kept = {"at_two": at_two, "metrics": metrics, "at_four": weights(trainer), "exported": exported}
    torch.save(kept, session.folder / f"{session.layout}.{session.rank}.kept")
    return {"metrics": metrics}


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> int:
    assert a.keys() == b.keys()
    return sum(int((a[k] != b[k]).sum()) for k in a)


def resume(session: Session) -> dict:
    """In a fresh process: the checkpoint whole, then steps 3 and 4; and its weights alone under a fresh optimizer."""
    kept = torch.load(session.folder / f"{session.layout}.{session.rank}.kept")
    root = session.folder / f"{session.layout}_checkpoints"
    path = layout.checkpoint(root, 2)
    trainer = session.trainer("tied", CHECKPOINTED, [], load=False)
    out = {"complete": checkpoints.iterations(root)}
    out["iteration"] = trainer.load(path, weights_only=False)
    out["differing_at_two"] = differing(weights(trainer), kept["at_two"])
    metrics = [trainer.train(global_batch()) for _ in range(2)]
    out["metrics_equal"] = metrics == kept["metrics"]
    out["differing_at_four"] = differing(weights(trainer), kept["at_four"])

    fresh = session.trainer("tied", CHECKPOINTED, [], load=False)
    fresh.load(path, weights_only=True)
    out["weights_only_differing"] = differing(weights(fresh), kept["at_two"])
    untouched = session.trainer("tied", CHECKPOINTED, [])
    before = weights(untouched)
    untouched.policy.keep_checkpoint("teacher", path)
    out["differing_beside_a_teacher"] = differing(before, weights(untouched))
    with untouched.policy.as_kept("teacher"):
        out["differing_teacher"] = differing(weights(untouched), kept["at_two"])
    out["first_step_beside_a_teacher_equal"] = untouched.train(global_batch()) == session.trainer(
        "tied", CHECKPOINTED, []
    ).train(global_batch())

    # A fresh optimizer's first step is the one that those weights take in an optimizer which never saw the checkpoint.
    other = session.trainer("tied", CHECKPOINTED, [], load=False)
    for name, tensor in other.policy.parameters():
        tensor.copy_(kept["at_two"][name])
    other.policy.optimizer.reload_model_params()
    first = fresh.train(global_batch())
    second = other.train(global_batch())
    out["weights_only_first_step_equal"] = first == second and differing(weights(fresh), weights(other)) == 0
    out["weights_only_is_not_a_resume"] = (
        differing(weights(fresh), kept["at_four"]) > 0 and fresh.policy.scheduler.num_steps == SAMPLES
    )
    return out
