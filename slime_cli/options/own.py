"""slime's own options: one row each, and the few native defaults that slime changes.

Names and meanings are those of slime launch scripts. Invariants (tests hold them): every option here is read by some
code, and a name that Megatron has too is in OWN_OVER_MEGATRON with the reason why slime takes it over.
"""

import functools
from dataclasses import dataclass
from typing import Any

from slime_cli.options.estimators import ESTIMATORS
from slime_cli.options.spec import Option


@dataclass(frozen=True, kw_only=True)
class OwnOption(Option):
    """An option of slime's own."""

    group: str


def _names(flag: str, action: str) -> str:
    """``--disable-x`` stores False in ``x``, so that code reads a positive."""
    name = flag.removeprefix("--")
    return (name.removeprefix("disable-") if action == "store_false" else name).replace("-", "_")


def _row(group: str, flag: str, type: str, default: Any, help: str, **more: Any) -> OwnOption:
    action = "store"
    if type == "flag":
        type = "bool"
        action = "store_false" if default else "store_true"
    return OwnOption(
        dest=_names(flag, action),
        flags=(flag,),
        action=action,
        type=type,
        default=default,
        help=help,
        group=group,
        **more,
    )


_CLUSTER = (
    ("--actor-num-nodes", "int", 1, "Machines that hold trainer ranks."),
    ("--actor-num-gpus-per-node", "int", 1, "Trainer ranks on each machine: GPUs, or processes on a CPU."),
    ("--rollout-num-gpus", "int", None, "Devices of all engines together; as many as the trainer's with --colocate."),
    ("--rollout-num-gpus-per-engine", "int", 1, "Devices of one engine, which it uses as tensor parallel ranks."),
    ("--colocate", "flag", False, "Trainer and engines take turns on the same devices."),
)
_MODEL = (
    ("--hf-checkpoint", "str", None, "Folder of the Hugging Face model: engine weights, tokenizer and chat template."),
    ("--load", "str", None, "Checkpoint folder to start or resume the trainer from."),
    (
        "--ckpt-step",
        "int",
        None,
        "Step of the checkpoint in --load to start from; the newest whole one when not given.",
    ),
    (
        "--on-damaged-checkpoint",
        "str",
        "fail",
        "What a resume does when its newest checkpoint is damaged: it ends, or goes back to the newest whole one.",
        {"choices": ("fail", "rollback")},
    ),
    ("--ref-load", "str", None, "Checkpoint of the reference model; also the start when --load holds none yet."),
    ("--save", "str", None, "Folder for the trainer's checkpoints; in it, one for each stage where there are several."),
    ("--save-interval", "int", None, "Rollout steps between two checkpoints."),
    (
        "--keep-checkpoints",
        "int",
        2,
        "Checkpoints to keep, the newest; the one that became the reference stays besides.",
    ),
    (
        "--save-hf",
        "str",
        None,
        (
            "Folder for Hugging Face exports, {rollout_id} in it becomes the rollout's number; in it, one for each"
            " stage where there are several."
        ),
    ),
)
_ROLLOUT = (
    ("--num-rollout", "int", None, "Rollout steps to run."),
    ("--num-epoch", "int", None, "Passes over the prompts, when --num-rollout is not given."),
    ("--rollout-batch-size", "int", None, "Prompts in one rollout step."),
    ("--n-samples-per-prompt", "int", 1, "Answers generated for each prompt: the group."),
    ("--rollout-temperature", "float", 1.0, "Sampling temperature; log-probabilities are scaled alike."),
    ("--rollout-top-p", "float", 1.0, "Nucleus sampling mass; 1 samples from the whole distribution."),
    ("--rollout-top-k", "int", -1, "Sample among so many most likely tokens; -1 for all."),
    ("--rollout-max-response-len", "int", None, "Tokens after which an answer is cut."),
    ("--rollout-max-prompt-len", "int", None, "Prompts of more tokens than this are left out, and counted."),
    ("--rollout-stop", "str", None, "Texts that end an answer.", {"nargs": "+"}),
    ("--rollout-stop-token-ids", "int", None, "Token ids that end an answer.", {"nargs": "+"}),
    ("--rollout-shuffle", "flag", False, "Draw the prompts of each epoch in a shuffled order."),
    ("--rollout-seed", "int", 42, "Seed of the prompt order and of procedural prompts."),
    ("--rollout-skip-special-tokens", "flag", False, "Leave special tokens out of the decoded answer."),
    (
        "--over-sampling-batch-size",
        "int",
        None,
        "Prompts to draw whenever too few groups are left; --rollout-batch-size.",
    ),
    (
        "--max-groups-without-progress",
        "int",
        128,
        (
            "Groups in a row of which none is accepted, or prompts of an evaluation, after which the run ends with the"
            " reasons."
        ),
    ),
    ("--dynamic-sampling-filter-path", "str", None, "Function that decides whether a finished group is kept."),
    (
        "--custom-generate-function-path",
        "str",
        None,
        "Function that generates a sample, or the list that it fans out into: turns, tools, agents.",
    ),
    ("--sglang-server-concurrency", "int", 512, "Requests in flight for each engine."),
    ("--sglang-router-ip", "str", "127.0.0.1", "Address that the router listens on."),
    ("--sglang-router-port", "int", None, "Port that the router listens on; any free one when not given."),
    (
        "--rollout-endpoint",
        "str",
        None,
        "endpoint.json of a running `slime serve-rollout` to use in place of own engines.",
    ),
)
_DATA = (
    ("--prompt-data", "str", None, "JSON lines or Parquet of prompts, or reasoning-gym:TASK."),
    ("--input-key", "str", "input", "Field of a row that holds the prompt."),
    ("--label-key", "str", None, "Field of a row that holds the expected answer."),
    ("--metadata-key", "str", "metadata", "Field of a row that travels with its samples."),
    ("--tool-key", "str", "tools", "Field of a row that lists tools for the chat template."),
    ("--apply-chat-template", "flag", False, "Render the prompt's messages with the tokenizer's chat template."),
    ("--apply-chat-template-kwargs", "json", {}, "JSON object of extra arguments for the chat template."),
    (
        "--special-tokens-in-data",
        "str",
        None,
        (
            "Control tokens in a row's own text: taken as text (with a chat template), refused (without), or allowed as"
            " control tokens."
        ),
        {"choices": ("text", "refuse", "allow")},
    ),
    (
        "--on-bad-row",
        "str",
        "fail",
        "Whether a row that cannot be used ends the run or is counted and passed over.",
        {"choices": ("fail", "skip")},
    ),
)
_BATCH = (
    ("--num-steps-per-rollout", "int", None, "Optimizer steps on each rollout; the global batch size follows from it."),
    ("--use-dynamic-batch-size", "flag", False, "Pack samples into micro-batches by their tokens."),
    ("--max-tokens-per-gpu", "int", None, "Tokens that one rank takes in a packed micro-batch."),
    (
        "--balance-data",
        "flag",
        False,
        "Hand micro-batches out so that data-parallel ranks have even FLOPs (Karmarkar-Karp).",
    ),
    (
        "--balance-by-flops",
        "flag",
        False,
        "Pack for even FLOPs instead of full micro-batches; --max-tokens-per-gpu still holds.",
    ),
    (
        "--log-probs-chunk-size",
        "int",
        None,
        "Response tokens projected onto the vocabulary at once; as many as fit 256 MiB.",
    ),
    (
        "--oversize",
        "str",
        "isolate",
        "A sample above the token cap goes alone, is dropped, or ends the run.",
        {"choices": ("isolate", "drop", "fail")},
    ),
)
_REWARD = (
    ("--rm-type", "str", None, "Built-in reward by name; a row's metadata can name another."),
    ("--rm-url", "str", None, "Reward service that --rm-type remote_rm asks."),
    ("--custom-rm-path", "str", None, "Function that rewards a sample, or a group with --group-rm."),
    ("--group-rm", "flag", False, "Reward the samples of a group in one call."),
    ("--reward-key", "str", None, "Entry to train on when a reward is a dict."),
    ("--eval-reward-key", "str", None, "Entry to report in evaluation; --reward-key."),
    ("--rm-timeout", "float", 10.0, "Seconds after which one reward computation is given up, and counted."),
    ("--rm-workers", "int", 2, "Processes that verify answers."),
)
_EVAL = (
    ("--eval-interval", "int", None, "Rollout steps between two evaluations."),
    ("--eval-prompt-data", "str", None, "Evaluation sets: NAME PATH, and so on in pairs.", {"nargs": "+"}),
    ("--n-samples-per-eval-prompt", "int", 1, "Answers for each evaluation prompt."),
    ("--eval-temperature", "float", None, "Temperature in evaluation; --rollout-temperature."),
    ("--eval-top-p", "float", None, "Nucleus mass in evaluation; --rollout-top-p."),
    ("--eval-max-response-len", "int", None, "Answer length in evaluation; --rollout-max-response-len."),
    ("--eval-input-key", "str", None, "Prompt field of evaluation rows; --input-key."),
    ("--eval-label-key", "str", None, "Answer field of evaluation rows; --label-key."),
    ("--skip-eval-before-train", "flag", False, "Do not evaluate before the first step."),
)
_ALGORITHM = (
    (
        "--loss-type",
        "str",
        "policy_loss",
        "Reinforcement learning, supervised training on the rows' answers, or a function of yours.",
        {"choices": ("policy_loss", "sft_loss", "custom_loss")},
    ),
    (
        "--custom-loss-function-path",
        "str",
        None,
        "Function that --loss-type custom_loss calls in the policy loss's place.",
    ),
    (
        "--stop-at-loss",
        "float",
        None,
        "End a supervised stage after the first rollout whose mean loss is not above this.",
    ),
    (
        "--advantage-estimator",
        "str",
        "grpo",
        "How rewards become advantages, and the policy loss that goes with it.",
        {"choices": ESTIMATORS},
    ),
    (
        "--custom-advantage-function-path",
        "str",
        None,
        "Function that computes advantages and returns in the estimator's place.",
    ),
    (
        "--custom-pg-loss-reducer-function-path",
        "str",
        None,
        "Function that says how the policy loss is summed over tokens.",
    ),
    ("--disable-grpo-std-normalization", "flag", True, "Do not divide a group's rewards by their spread (Dr. GRPO)."),
    ("--disable-rewards-normalization", "flag", True, "Take rewards as advantages without comparing within the group."),
    (
        "--normalize-advantages",
        "flag",
        False,
        "Whiten advantages over the global batch; always so with reinforce_plus_plus*.",
    ),
    ("--gamma", "float", 1.0, "Discount of a reward for each token before it (reinforce_plus_plus, ppo)."),
    ("--lambd", "float", 1.0, "Decay of generalised advantage estimation (ppo)."),
    ("--eps-clip", "float", 0.2, "How far the probability ratio may fall below 1."),
    ("--eps-clip-high", "float", None, "How far the ratio may rise above 1; --eps-clip."),
    (
        "--eps-clip-c",
        "float",
        None,
        "Dual clip: bound on the loss of a negative advantage, in multiples of it; above 1.",
    ),
    (
        "--kl-coef",
        "float",
        0.0,
        "Divergence from the reference that is taken off each token's reward (not for grpo, gspo, cispo).",
    ),
    ("--use-kl-loss", "flag", False, "Add the divergence from the reference model to the loss."),
    ("--kl-loss-coef", "float", 0.0, "Weight of that divergence."),
    (
        "--kl-loss-type",
        "str",
        "k1",
        "Estimator of the divergence, in the loss and in the reward.",
        {"choices": ("k1", "k2", "k3", "low_var_kl")},
    ),
    ("--use-unbiased-kl", "flag", False, "Weight that divergence by the probability ratio to the old policy."),
    ("--entropy-coef", "float", 0.0, "Weight of the entropy bonus."),
    ("--value-clip", "float", 0.2, "How far a value may move from the one before the step (ppo)."),
    ("--num-critic-only-steps", "int", 0, "Rollouts at the start that train the critic alone (ppo)."),
    (
        "--only-train-params-name-list",
        "str",
        None,
        "Patterns (regular expressions) of the parameters to train; all others are frozen.",
        {"nargs": "+"},
    ),
    (
        "--freeze-params-name-list",
        "str",
        None,
        "Patterns (regular expressions) of parameters that stay as they are.",
        {"nargs": "+"},
    ),
    ("--reset-optimizer-states", "flag", False, "Forget Adam's moments before each rollout's steps."),
    (
        "--use-stateless-adam",
        "flag",
        False,
        "Adam that keeps no moments: every step is its first, and there is no memory for them.",
    ),
    (
        "--on-nan-gradient",
        "str",
        "fail",
        "A gradient that is not finite ends the run, or its step is skipped and counted.",
        {"choices": ("fail", "skip")},
    ),
    (
        "--ref-update-interval",
        "int",
        None,
        "Rollouts after which the policy becomes its own reference; never when not given.",
    ),
    ("--megatron-config-path", "str", None, "YAML with Megatron options by role: the critic's."),
)
_OFF_POLICY = (
    ("--use-rollout-logprobs", "flag", False, "Take the engine's log-probabilities as those of the old policy."),
    (
        "--get-mismatch-metrics",
        "flag",
        False,
        "Measure how far the engine's policy is from the trainer's before the first step.",
    ),
    (
        "--max-logprob-diff",
        "float",
        None,
        (
            "Mean log-probability difference between engine and trainer, in nats a token, that ends a run; 0.5, with a"
            " generate function of yours none."
        ),
    ),
    (
        "--update-weights-interval",
        "int",
        1,
        "Rollouts after which the engines get new weights; before an evaluation and at the end, always.",
    ),
    (
        "--keep-old-actor",
        "flag",
        False,
        "Keep the weights that the engines hold, and take the old policy's log-probabilities from them.",
    ),
    (
        "--use-top-p-replay",
        "flag",
        False,
        "Take log-probabilities among the tokens that top-p and top-k left to choose from.",
    ),
    (
        "--use-opsm",
        "flag",
        False,
        "Leave out samples with a negative advantage that the policy has moved away from already.",
    ),
    ("--opsm-delta", "float", 1e-4, "Mean log-probability gap above which --use-opsm leaves a sample out."),
    ("--use-tis", "flag", False, "Weight the policy loss by the ratio of the trainer's old policy to the engine's."),
    (
        "--tis-level",
        "str",
        "token",
        "Take that ratio at a token, over the sample, or as the sample's geometric mean.",
        {"choices": ("token", "sequence", "geometric")},
    ),
    (
        "--tis-mode",
        "str",
        "clip",
        "Bound it above, within both bounds, or leave out what is outside them (IcePop).",
        {"choices": ("truncate", "clip", "mask")},
    ),
    ("--tis-clip", "float", 2.0, "Upper bound of that ratio."),
    ("--tis-clip-low", "float", 0.0, "Lower bound of that ratio."),
    ("--tis-batch-normalize", "flag", False, "Scale the weights so that their mean over the global batch is 1."),
    ("--custom-tis-function-path", "str", None, "Function that weighs the tokens in place of the options above."),
    ("--use-rs", "flag", False, "Reject what the two policies disagree about too much."),
    (
        "--rs-level",
        "str",
        "token",
        "Compare at a token, over the sample, or as the sample's geometric mean.",
        {"choices": ("token", "sequence", "geometric")},
    ),
    ("--rs-lower-bound", "float", 0.5, "Ratio below which --use-rs rejects."),
    ("--rs-upper-bound", "float", 2.0, "Ratio above which --use-rs rejects."),
    ("--rs-veto-threshold", "float", None, "Reject a whole sample when one token's ratio is below this."),
    (
        "--use-routing-replay",
        "flag",
        False,
        "Send tokens to the experts that the old policy's pass chose, in every step of the rollout.",
    ),
    (
        "--use-rollout-routing-replay",
        "flag",
        False,
        "Send tokens to the experts that the engine chose, in every pass of the policy.",
    ),
    (
        "--use-opd",
        "flag",
        False,
        "On-policy distillation: take the gap to a teacher's log-probabilities off the advantage.",
    ),
    ("--opd-kl-coef", "float", 1.0, "Weight of that gap."),
    (
        "--opd-type",
        "str",
        None,
        "What the teacher is: an SGLang endpoint, or weights in Megatron; follows from which of the two is given.",
        {"choices": ("sglang", "megatron")},
    ),
    ("--opd-teacher-load", "str", None, "Megatron checkpoint of the teacher: same architecture as the policy."),
    (
        "--opd-teacher-url",
        "str",
        None,
        "SGLang endpoint of the teacher, http://HOST:PORT/generate, or a serve-rollout's endpoint.json.",
    ),
    (
        "--opd-teacher-timeout",
        "float",
        120.0,
        "Seconds after which one request to the teacher is tried again, or given up and counted.",
    ),
)
_RUN = (
    ("--run-dir", "str", None, "Folder of the run: run.json, journal, rollouts, metrics, trace."),
    ("--trace", "str", "on", "Whether spans are recorded.", {"choices": ("on", "off")}),
    ("--keep-rollouts", "int", None, "Rollout folders to keep, the newest; all when not given."),
    (
        "--drop-rollouts",
        "int",
        None,
        "Rollout ids of batches that an interrupted run made, and that are dropped in place of being trained.",
        {"nargs": "+"},
    ),
)
_SETTLED = (
    ("--train-backend", "str", "megatron", "The trainer; Megatron is the only one.", {"choices": ("megatron",)}),
    ("--rollout-function-path", "str", None, "slime's own function for a whole rollout that goes with --loss-type."),
    ("--debug-train-only", "flag", False, "Start no engines; with --loss-type sft_loss none is started anyway."),
    ("--disable-compute-advantages-and-returns", "flag", True, "Compute no advantages; sft_loss has none anyway."),
    ("--no-offload-train", "flag", False, "Keep the trainer on its devices, where it stays anyway."),
    ("--no-offload-rollout", "flag", False, "Keep the engines on their devices, where they stay anyway."),
)
"""Options of slime's launch scripts that are taken where they ask for what is so anyway, and refused where they ask for
anything else: options/checks/settled.py decides which."""
_GROUPS = {
    "cluster": _CLUSTER,
    "model": _MODEL,
    "rollout": _ROLLOUT,
    "data": _DATA,
    "batch": _BATCH,
    "reward": _REWARD,
    "eval": _EVAL,
    "algorithm": _ALGORITHM,
    "off-policy": _OFF_POLICY,
    "run": _RUN,
    "launch-script": _SETTLED,
}

OPTIONS: tuple[OwnOption, ...] = tuple(
    _row(group, *row[:4], **(row[4] if len(row) > 4 else {})) for group, rows in _GROUPS.items() for row in rows
)

OWN_OVER_MEGATRON = {
    "--load": "slime finds the step to resume by its journal, then hands Megatron the folder",
    "--ckpt-step": "slime checks that the checkpoint is there and whole before anything starts",
    "--save": "slime commits a checkpoint together with the journal",
    "--save-interval": "slime counts rollout steps, Megatron optimizer steps",
    "--eval-interval": "slime evaluates by generating answers, Megatron by a validation loss",
}
"""Flags that Megatron has too. slime reads them; Megatron's parser does not see them."""

NATIVE_DEFAULTS: dict[str, dict[str, Any]] = {
    "megatron": {"micro_batch_size": 1, "lr": 1e-6, "dist_ckpt_optim_fully_reshardable": True},
    # A model's generation_config.json may name a temperature, a cut or a penalty. What asks for a chat completion would
    # be
    # sampled with them, and the trainer would compare its log-probabilities with those of another distribution.
    "sglang": {"sampling_defaults": "openai"},
    "router": {
        "balance_abs_threshold": 10,
        "balance_rel_threshold": 1.2,
        "log_level": "warn",
        "request_timeout_secs": 14400,
    },
}
"""Section -> dest -> value that slime gives where the user gives none; all else keeps the engine's default."""

SERVE_ROLLOUT = frozenset(
    "rollout_num_gpus rollout_num_gpus_per_engine hf_checkpoint run_dir "
    "sglang_router_ip sglang_router_port colocate actor_num_gpus_per_node rollout_seed".split()
)
READ_BY: dict[str, tuple[frozenset[str] | None, tuple[str, ...]]] = {
    "train": (None, ("megatron", "sglang", "router")),
    "serve-rollout": (SERVE_ROLLOUT, ("sglang", "router")),
}
"""Command -> (own dests that it reads, None for all; sections whose flags it takes). Other commands take everything."""


@functools.cache
def by_flag() -> dict[str, OwnOption]:
    return {flag: option for option in OPTIONS for flag in option.flags}


@functools.cache
def by_dest() -> dict[str, OwnOption]:
    return {option.dest: option for option in OPTIONS}


def flag(dest: str) -> str:
    """How an option of ours is written."""
    return by_dest()[dest].flag
