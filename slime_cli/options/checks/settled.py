"""Options of slime's launch scripts that have one meaning here (``own.py``, group launch-script).

Where nothing follows from them that is said; where they ask for anything else they are refused. And the name of
exports.
"""

from collections.abc import Iterator
from typing import Any

from slime_cli.options import own
from slime_cli.options.checks.common import Problem, no_effect
from slime_cli.options.resolve import Resolved

ROLLOUTS = {
    "slime.rollout.sglang_rollout.generate_rollout": ("policy_loss", "custom_loss"),
    "slime.rollout.sft_rollout.generate_rollout": ("sft_loss",),
}
"""slime's own function for a whole rollout -> losses with which this slime does the same."""


def settled(r: Resolved) -> Iterator[Problem | str]:
    s = r.slime
    yield from _vocabulary(r.megatron)
    yield from _rollout_function(s.rollout_function_path, s.loss_type)
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


def _rollout_function(path: str | None, loss: str) -> Iterator[Problem]:
    if path is None or loss in ROLLOUTS.get(path, ()):
        return
    if path in ROLLOUTS:
        yield f"--rollout-function-path {path} with --loss-type {loss}", f"give --loss-type {ROLLOUTS[path][0]}"
    else:
        yield (
            f"--rollout-function-path {path}: a function for a whole rollout, which nothing calls here",
            "leave it out: --custom-generate-function-path generates a sample, --custom-rm-path rewards it",
        )


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
