"""Runs that train nothing or generate nothing: evaluation alone, and the debug options."""

from collections.abc import Iterator

from slime_cli.options import own
from slime_cli.options.checks.common import Problem, no_effect
from slime_cli.options.checks.functions import of_user
from slime_cli.options.declare import POLICY
from slime_cli.options.resolve import Resolved

OF_THE_TRAINER = ("load", "ref_load", "save", "save_hf", "save_debug_train_data")
OF_ENGINES = ("rollout_endpoint", "eval_interval", "eval_prompt_data", "eval_config", "sglang_server_concurrency")


def halves(r: Resolved) -> Iterator[Problem | str]:
    s = r.slime
    if not POLICY.met(s):
        if s.debug_rollout_only:
            yield f"--debug-rollout-only with --loss-type {s.loss_type}: nothing is generated", "leave one of them out"
        return
    if s.debug_rollout_only and s.debug_train_only:
        yield "--debug-rollout-only with --debug-train-only or --load-debug-rollout-data", "leave one of the two out"
    elif s.debug_train_only and not s.load_debug_rollout_data:
        yield (
            f"--debug-train-only with --loss-type {s.loss_type}: there is nothing to train on",
            "give --load-debug-rollout-data PATH, with {rollout_id} in it",
        )
    for dest, idle in (("debug_rollout_only", OF_THE_TRAINER), ("debug_train_only", OF_ENGINES)):
        flags = [own.flag(name) for name in idle if getattr(s, dest) and r.origins[f"slime.{name}"] == "flag"]
        if flags:
            part = "trainer" if idle is OF_THE_TRAINER else "engine"
            yield no_effect(flags, f"with {own.flag(dest)}: there is no {part}")


def evaluation_alone(r: Resolved) -> Iterator[Problem | str]:
    s = r.slime
    if s.num_rollout != 0:
        return
    if not POLICY.met(s):
        yield "--num-rollout 0 with --loss-type sft_loss: nothing is trained"
    elif s.debug_train_only or not (s.eval_prompt_data or s.eval_config or of_user(s.eval_function_path)):
        yield (
            "--num-rollout 0: nothing is trained, and there is nothing to evaluate",
            "give --eval-prompt-data or --eval-config, or a number of rollouts",
        )


TRAIN = (halves, evaluation_alone)
