"""Native options that slime sets itself, each with the sentence that tells a user what to use in their place.

Keyed by section and dest, so that every spelling of an option is refused. Invariant (tests/options/test_managed.py
walks them all): what slime's code sets of a native option, whatever the user gave, is refused here.
"""

from slime_cli.errors import UsageError
from slime_cli.options.unread import UNREAD

_PLACED = "slime places engines and picks their addresses"
_LOOP = "slime's own loop decides when to stop: --num-rollout or --num-epoch"
_DATA = "slime feeds the trainer from its rollouts: --prompt-data"
_MEGATRON_RL = "it belongs to Megatron's own RL loop, which slime does not run"
_EVAL = "slime evaluates by generating answers: --eval-interval with --eval-prompt-data"
_WRITER = (
    "leave it out: --async-save forks Megatron's writer for each checkpoint, whose memory is the state of that moment"
)
_SAMPLING = "each request says how it samples, as log-probabilities are compared: --rollout-temperature and its kind"
_WORKERS = "slime registers its engines with the router itself"

MANAGED: dict[str, dict[str, str]] = {
    "megatron": {
        "local_rank": "slime starts the trainer ranks: --actor-num-nodes and --actor-num-gpus-per-node",
        "rank": "slime starts the trainer ranks: --actor-num-nodes and --actor-num-gpus-per-node",
        "world_size": "slime starts the trainer ranks: --actor-num-nodes and --actor-num-gpus-per-node",
        "train_iters": _LOOP,
        "train_samples": _LOOP,
        "exit_interval": _LOOP,
        "exit_duration_in_mins": _LOOP,
        "data_path": _DATA,
        "train_data_path": _DATA,
        "valid_data_path": _DATA,
        "test_data_path": _DATA,
        "data_args_path": _DATA,
        "per_split_data_args_path": _DATA,
        "mock_data": _DATA,
        "split": _DATA,
        "eval_iters": _EVAL,
        "start_eval_at_iter": _EVAL,
        "eval_global_batch_size": _EVAL,
        "eval_micro_batch_size": _EVAL,
        "save_interval": "use --save-interval, which slime counts in rollout steps",
        "mtp_detach_heads": "leave it out: with --enable-mtp-training these layers never move the policy",
        "save_retain_interval": (
            "use --keep-checkpoints: Megatron would remove the checkpoint that a killed run resumes from"
        ),
        "use_persistent_ckpt_worker": _WRITER,
        "async_strategy": _WRITER,
        "async_ckpt_cpu_priority": _WRITER,
        "async_ckpt_io_priority": _WRITER,
        "async_ckpt_use_cpu_shm": _WRITER,
    },
    "sglang": {
        "model_path": "engines load the model of --hf-checkpoint",
        "host": _PLACED,
        "port": _PLACED,
        "nccl_port": _PLACED,
        "nnodes": f"{_PLACED}: --rollout-num-gpus-per-engine",
        "node_rank": _PLACED,
        "dist_init_addr": _PLACED,
        "base_gpu_id": _PLACED,
        "gpu_id_step": _PLACED,
        "tp_size": "use --rollout-num-gpus-per-engine",
        "random_seed": "engines are seeded from --rollout-seed, each differently",
        "config": "put the options in a profile's `sglang:` section",
        "preferred_sampling_params": _SAMPLING,
        "skip_server_warmup": "leave it out: no engine makes one, for the first request of a run is as good",
        "weight_version": "leave it out: every version of the weights brings its own name",
    },
    "router": {
        "host": _PLACED,
        "port": _PLACED,
        "worker_urls": _WORKERS,
        "prefill": _WORKERS,
        "decode": _WORKERS,
        "service_discovery": _WORKERS,
        "mini_lb": "slime needs the full router: health checks and worker removal",
    },
}

GIVEN = {"megatron": frozenset({"apply_rope_fusion"})}
"""Section -> dests of flags that slime gives on every machine: they cannot be taken back."""


def refusal(section: str, dest: str) -> str:
    """Why an option may not be given, or an empty string."""
    if section == "megatron" and dest.startswith("rl_"):
        return _MEGATRON_RL
    return MANAGED.get(section, {}).get(dest, "") or (UNREAD.get(dest, "") if section == "megatron" else "")


def check_taken_back(name: str, section: str, dest: str) -> None:
    """Raises UsageError for a flag that stays given; ``name`` is how it was taken back."""
    if dest in GIVEN.get(section, ()):
        raise UsageError(f"{name} takes nothing back: slime gives this flag itself", "leave it out")


def error(name: str, section: str, dest: str) -> UsageError:
    """The error for an option with a :func:`refusal`; ``name`` is how it was given."""
    unread = section == "megatron" and dest in UNREAD
    return UsageError(f"{name} {'has no effect here' if unread else 'is set by slime'}", refusal(section, dest))
