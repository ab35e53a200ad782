"""Options of slime's launch scripts that have one meaning here (``own.py``, group launch-script).

Where nothing follows from them that is said; where they ask for anything else they are refused. And the name of
exports.
"""

from collections.abc import Iterator
from typing import Any

from slime_cli.options import own
from slime_cli.options.checks.common import Problem, no_effect
from slime_cli.options.checks.functions import of_user
from slime_cli.options.derive import FULLY_ASYNC
from slime_cli.options.resolve import Resolved

POLICIES = ("policy_loss", "custom_loss")
ROLLOUTS = {
    "slime.rollout.sglang_rollout.generate_rollout": POLICIES,
    "slime.rollout.sft_rollout.generate_rollout": ("sft_loss",),
    FULLY_ASYNC: POLICIES,
}
"""slime's own function for a whole rollout -> losses with which this slime does the same."""
IDLE = {
    "use_gated_attention": "here: which layers have what attention follows from config.json of --hf-checkpoint",
    "qwen_gdn_backend": "here: linear attention is computed in torch, whatever is installed",
    "model_name": "beside --hf-checkpoint: its config.json says which model it is",
    "loss_mask_type": "here: the chat template itself says which tokens are an assistant's, whatever its kind; see "
    "--on-rewritten-turns and --opened-thinking for one that drops or opens thinking",
}
"""Option -> why it has no effect, as the warning says it. Whoever builds what it is about takes its line out."""
PLUGINS = {
    "qwen3_5_vl": "Qwen3.5-VL with its images",
    "glm5": "GLM-5, a model with sparse attention",
}
"""Module of ``slime_plugins.models`` -> the model that it builds, where that is not trained here."""
KNOWN_PLUGINS = ("qwen3_5", "qwen3_next", "glm4", "minimax_m2")
"""Those whose models follow from config.json here."""


def settled(r: Resolved) -> Iterator[Problem | str]:
    s = r.slime
    yield from _vocabulary(r.megatron)
    yield from _spec(r.megatron.get("spec"))
    yield from _rollout_function(r)
    if not s.compute_advantages_and_returns and s.loss_type != "sft_loss":
        fix = "it goes with --loss-type sft_loss: leave it out"
        yield f"{own.flag('compute_advantages_and_returns')} with --loss-type {s.loss_type}", fix
    for why in dict.fromkeys(IDLE.values()):
        names = [name for name, reason in IDLE.items() if reason == why and getattr(s, name)]
        if flags := [own.flag(name) for name in names if not (name == "loss_mask_type" and s.loss_type in POLICIES)]:
            yield no_effect(flags, why)


def _vocabulary(megatron: dict[str, Any]) -> Iterator[Problem]:
    """Megatron would pad the embedding to a multiple; slime does not, so that engines can take its rows as they are."""
    value = megatron.get("make_vocab_size_divisible_by")
    rows = megatron.get("vocab_size")
    multiple = (value or 1) * megatron.get("tensor_model_parallel_size", 1)
    if value is not None and (rows is None or multiple < 1 or rows % multiple):
        fix = "leave it out: the embedding keeps the rows that the checkpoint has"
        yield f"--make-vocab-size-divisible-by {value} has no effect here", fix


def _spec(spec: list[str] | None) -> Iterator[Problem | str]:
    """slime's plugins build models that Megatron has not; nothing reads the option here."""
    module, *_ = spec or [""]
    plugin = module.removeprefix("slime_plugins.models.").partition(".")[0]
    if plugin in PLUGINS and plugin != module:
        fix = "docs/models.md lists the models that are"
        yield f"--spec {' '.join(spec or ())}: {PLUGINS[plugin]}, which is not trained here", fix
    elif plugin in KNOWN_PLUGINS and plugin != module:
        yield no_effect(
            [f"--spec {' '.join(spec or ())}"], "here: its model follows from config.json of --hf-checkpoint"
        )
    elif spec:
        fix = "leave it out: a model follows from config.json, and --custom-model-provider-path builds one of yours"
        yield f"--spec {' '.join(spec)} has no effect here", fix


def _rollout_function(r: Resolved) -> Iterator[Problem | str]:
    s = r.slime
    path = s.rollout_function_path
    if path is None:
        return
    if path == FULLY_ASYNC and s.loss_type in POLICIES:
        yield from _fully_async(r)
    elif s.loss_type in ROLLOUTS.get(path, ()):
        return
    elif path in ROLLOUTS:
        yield f"--rollout-function-path {path} with --loss-type {s.loss_type}", f"give --loss-type {ROLLOUTS[path][0]}"
    elif not of_user(path):
        fix = "leave it out: --schedule async generates all the time, and others are said by options of their own"
        yield f"--rollout-function-path {path}: slime's own function, which is not here", fix
    elif s.loss_type == "sft_loss":
        yield f"--rollout-function-path {path} with --loss-type sft_loss: nothing is generated", "leave it out"
    elif s.schedule != "sync":
        fix = "leave --schedule out"
        yield f"--rollout-function-path {path} with --schedule {s.schedule}: such a function makes whole rollouts", fix
    else:
        idle = ("dynamic_sampling_filter_path", "over_sampling_batch_size", "partial_rollout", "max_staleness")
        if flags := [own.flag(dest) for dest in idle if r.origins[f"slime.{dest}"] == "flag"]:
            yield no_effect(flags, f"with --rollout-function-path {path}")


def _fully_async(r: Resolved) -> Iterator[Problem | str]:
    s = r.slime
    if s.schedule != "async":
        yield f"--rollout-function-path {FULLY_ASYNC} with --schedule {s.schedule}", "leave one of the two out"
    elif r.origins["slime.schedule"] == "derived":
        yield (
            f"--rollout-function-path {FULLY_ASYNC} is --schedule async here, with --max-staleness {s.max_staleness}: "
            "slime has no such bound"
        )


EACH = ("save_debug_rollout_data", "save_debug_train_data")
"""Options whose file would be written over by the next rollout's without {rollout_id}."""


def templates(r: Resolved) -> Iterator[Problem | str]:
    """Paths in which {rollout_id} becomes a rollout's number."""
    for dest in ("save_hf", "load_debug_rollout_data", *EACH):
        if given := getattr(r.slime, dest):
            yield from _template(own.flag(dest), given, needed=dest in EACH and r.slime.num_rollout != 1)


def _template(flag: str, given: str, needed: bool) -> Iterator[Problem]:
    try:
        paths = [given.format(rollout_id=rollout_id) for rollout_id in (0, 1)]
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        fix = "only {rollout_id} stands for something in it: {rollout_id}, {rollout_id:04d}"
        yield f"{flag} {given}: {error!r}", fix
        return
    if (needed or "{" in given) and paths[0] == paths[1]:
        yield f"{flag} {given} is {paths[0]} for every rollout", "write {rollout_id} in it, in single braces"


TRAIN = (settled, templates)
