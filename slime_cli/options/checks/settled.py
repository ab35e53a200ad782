"""Options of slime's launch scripts that have one meaning here (``own.py``, group launch-script).

Where nothing follows from them that is said; where they ask for anything else they are refused. And the name of
exports.
"""

from collections.abc import Iterator
from typing import Any

from slime_cli.options import own
from slime_cli.options.checks.common import Problem, no_effect
from slime_cli.options.checks.functions import of_user
from slime_cli.options.resolve import Resolved

ROLLOUTS = {
    "slime.rollout.sglang_rollout.generate_rollout": ("policy_loss", "custom_loss"),
    "slime.rollout.sft_rollout.generate_rollout": ("sft_loss",),
}
"""slime's own function for a whole rollout -> losses with which this slime does the same."""


def settled(r: Resolved) -> Iterator[Problem | str]:
    s = r.slime
    yield from _vocabulary(r.megatron)
    yield from _rollout_function(r)
    for name in ("debug_train_only", "compute_advantages_and_returns"):
        other = getattr(s, name) != own.by_dest()[name].default
        if other and s.loss_type != "sft_loss":
            fix = "it goes with --loss-type sft_loss: leave it out"
            yield f"{own.flag(name)} with --loss-type {s.loss_type}", fix
    if kept := [own.flag(name) for name in ("no_offload_train", "no_offload_rollout") if getattr(s, name)]:
        yield no_effect(kept, "here: nothing is offloaded")


def _vocabulary(megatron: dict[str, Any]) -> Iterator[Problem]:
    """Megatron would pad the embedding to a multiple; slime does not, so that engines can take its rows as they are."""
    value = megatron.get("make_vocab_size_divisible_by")
    rows = megatron.get("vocab_size")
    multiple = (value or 1) * megatron.get("tensor_model_parallel_size", 1)
    if value is not None and (rows is None or multiple < 1 or rows % multiple):
        fix = "leave it out: the embedding keeps the rows that the checkpoint has"
        yield f"--make-vocab-size-divisible-by {value} has no effect here", fix


def _rollout_function(r: Resolved) -> Iterator[Problem | str]:
    s = r.slime
    path = s.rollout_function_path
    if path is None or s.loss_type in ROLLOUTS.get(path, ()):
        return
    if path in ROLLOUTS:
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


def exports(r: Resolved) -> Iterator[Problem | str]:
    given = r.slime.save_hf
    try:
        folders = [given.format(rollout_id=rollout_id) for rollout_id in (0, 1)] if given else []
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        yield (
            f"--save-hf {given}: {error!r}",
            "only {rollout_id} stands for something in it: {rollout_id}, {rollout_id:04d}",
        )
        return
    if "{" in (given or "") and folders[0] == folders[1]:
        yield f"--save-hf {given} is {folders[0]} for every rollout", "write {rollout_id} in it, in single braces"


TRAIN = (settled, exports)
