"""Checkpoints beyond a plain resume: from one layout into another, written while training goes on, of an optimizer
without moments. Runs on every rank of a layout, beside ``layout_cases.py``."""

import collections
import contextlib
import dataclasses
import functools
import os
import shutil
import time
import types
from collections.abc import Callable

import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async

from layout_cases import (
    CHECKPOINTED,
    GRPO,
    MANIFEST,
    PLAIN,
    RECOMPUTE,
    REWARD_KL,
    SELECTIVE,
    Session,
    differing,
    global_batch,
    weights,
)
from slime_cli.errors import SlimeError
from slime_cli.manifests import checkpoints
from slime_cli.manifests import layout as paths
from slime_cli.training.network import chained, checkpoint

DISTRIBUTED = ["--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"]
RESHARDED = {"single": [], "tp2": [], "pp2": [], "dp2_distributed": DISTRIBUTED}
"""Layout that saved -> Megatron flags of the one process that loads it."""
PPO = dataclasses.replace(REWARD_KL, advantage_estimator="ppo", **PLAIN)


def gap(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest difference between two sets of weights, relative to the largest weight of each tensor."""
    assert a.keys() == b.keys()
    return max(float((a[k] - b[k]).abs().max() / b[k].abs().max()) for k in a)


def reshard(session: Session) -> dict:
    """One process goes on where each layout saved: steps 3 and 4, beside what that layout itself did in them."""
    out = {}
    for layout, flags in RESHARDED.items():
        kept = [torch.load(path) for path in sorted(session.folder.glob(f"{layout}.[0-9].kept"))]
        trainer = session.trainer("tied", CHECKPOINTED, flags, load=False)
        iteration = trainer.load(paths.checkpoint(session.folder / f"{layout}_checkpoints", 2), weights_only=False)
        metrics = [trainer.train(global_batch()) for _ in range(2)]
        exported = dict(session.bridge("tied").export(trainer.policy.model))
        (theirs,) = [k["metrics"] for k in kept if k["metrics"][0]]
        out[layout] = {
            "iteration": iteration,
            "metrics": metrics,
            "their_metrics": theirs,
            "weights_gap": gap(exported, kept[0]["exported"]),
        }
    return out


def refusals(session: Session) -> dict[str, str]:
    """What is said where training cannot go on, or cannot begin."""
    root = session.folder / "refusals"
    root.mkdir(exist_ok=True)
    whole = paths.checkpoint(session.folder / "single_checkpoints", 2)
    cut = shutil.copytree(whole, session.folder / "cut" / whole.name, dirs_exist_ok=True)
    with open(max(cut.glob("*.distcp"), key=lambda p: p.stat().st_size), "r+b") as file:
        file.truncate(100)
    without = session.trainer("tied", CHECKPOINTED, ["--no-save-optim"])
    for _ in range(2):
        without.train(global_batch())
    path = without.save(str(root), MANIFEST)
    distributed = paths.checkpoint(session.folder / "dp2_distributed_checkpoints", 2)
    stateless = dataclasses.replace(CHECKPOINTED, use_stateless_adam=True)
    found = {
        "no_save_optim": _refused(
            lambda: session.trainer("tied", CHECKPOINTED, [], load=False).load(path, weights_only=False)
        ),
        "distributed": _refused(
            lambda: session.trainer("tied", CHECKPOINTED, [], load=False).load(distributed, weights_only=False)
        ),
        "cut": _refused(lambda: session.trainer("tied", CHECKPOINTED, [], load=False).load(cut, weights_only=False)),
        "layout": _layouts_refused(_arguments(1), _arguments(2), "dp_reshardable"),
        "layers": _layouts_refused(_arguments(1), _arguments(1, "transformer_engine"), "dp_reshardable"),
        "any layers": _layouts_refused(_arguments(1), _arguments(2, "transformer_engine"), "fully_reshardable"),
        "offload": _refused(lambda: session.trainer("tied", stateless, ["--optimizer-cpu-offload"])),
    }
    weights_alone = session.trainer("tied", CHECKPOINTED, [], load=False)
    weights_alone.load(path, weights_only=True)
    return found | {"no_save_optim_weights_differing": differing(weights(weights_alone), weights(without))}


def _arguments(tensor: int, layers: str = "local") -> types.SimpleNamespace:
    return types.SimpleNamespace(
        tensor_model_parallel_size=tensor, pipeline_model_parallel_size=1, transformer_impl=layers
    )


def _layouts_refused(ours: types.SimpleNamespace, theirs: types.SimpleNamespace, kind: str) -> str:
    metadata = {"distrib_optim_sharding_type": kind}
    return _refused(lambda: checkpoint._check_layout(ours, theirs, metadata, paths.checkpoint("there", 2)))


def _refused(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except SlimeError as error:
        return f"{type(error).__name__}: {error.message} | {error.fix}"
    return ""


def resharded_stateless(session: Session) -> dict:
    """Without moments the distributed optimizer's checkpoint fits other data parallel sizes."""
    trainer = session.trainer(
        "tied", dataclasses.replace(CHECKPOINTED, use_stateless_adam=True), DISTRIBUTED, load=False
    )
    trainer.load(paths.checkpoint(session.folder / "dp2_distributed_stateless", 2), weights_only=False)
    return {"metrics": trainer.train(global_batch())}


def recomputed(session: Session) -> dict[str, dict[str, int]]:
    """How often the first layer and its core attention were called in one rollout: flags -> part -> calls."""
    out = {}
    for name, flags in {"plain": [], "full": RECOMPUTE, "selective": SELECTIVE}.items():
        trainer = session.trainer("tied", GRPO, flags)
        calls = collections.Counter()
        layer = dict(trainer.policy.model[0].named_modules())["module.decoder.layers.0"]
        layer.register_forward_hook(lambda *_, calls=calls: calls.update(["layer"]))
        layer.self_attention.core_attention.register_forward_hook(
            lambda *_, calls=calls: calls.update(["core_attention"])
        )
        trainer.train(global_batch())
        out[name] = dict(calls)
    return out


def after_the_layouts(session: Session) -> dict:
    return {
        "reshard": reshard(session),
        "refusals": refusals(session),
        "resharded_stateless": resharded_stateless(session),
    }


def everything(session: Session) -> dict:
    out = {"recomputed": recomputed(session)} if session.layout == "single" else {}
    out |= {"stateless": stateless(session)} if session.layout in ("single", "dp2", "dp2_distributed") else {}
    return out | ({"async": saved_while_training(session)} if session.layout in ("single", "dp2") else {})


def saved_while_training(session: Session) -> dict:
    """With --async-save the files are written only after steps 3 and 4 were taken, and hold step 2 to the last bit."""
    flags = ["--async-save"]
    root = session.folder / f"{session.layout}_async"
    root.mkdir(exist_ok=True)
    trainer = session.trainer("tied", PPO, flags)
    for _ in range(2):
        trainer.train(global_batch())
    with _disk_that_waits_for(root / "go"):
        path = trainer.save(str(root), MANIFEST)
    at_two = weights(trainer)
    complete = [checkpoints.damage(path)]
    polls = [trainer.saved(wait=False)]
    metrics = [trainer.train(global_batch()) for _ in range(2)]
    complete.append(checkpoints.damage(path))
    at_four = weights(trainer)
    (root / "go").touch()
    polls.append(trainer.saved(wait=True))
    out = {"polls": polls, "damage": [*complete, checkpoints.damage(path)]}

    resumed = session.trainer("tied", PPO, flags, load=False)
    out["step"] = resumed.load(str(path), weights_only=False)
    out["differing_at_two"] = differing(weights(resumed), at_two)
    out["metrics_equal"] = [resumed.train(global_batch()) for _ in range(2)] == metrics
    out["differing_at_four"] = differing(weights(resumed), at_four)
    return out


@contextlib.contextmanager
def _disk_that_waits_for(file):
    """Writers that are forked in here write nothing before ``file`` is there; their parent goes on."""
    parent = os.getpid()
    write = filesystem_async._write_item

    @functools.wraps(write)
    def late(*args, **kwargs):
        while os.getpid() != parent and not file.exists():
            time.sleep(0.05)
        return write(*args, **kwargs)

    filesystem_async._write_item = late
    try:
        yield
    finally:
        filesystem_async._write_item = write


def stateless(session: Session) -> dict:
    """Three rollouts without moments: metrics, what the optimizer holds, and a resume after the second one."""
    settings = dataclasses.replace(CHECKPOINTED, use_stateless_adam=True)
    trainer = session.trainer("tied", settings, [])
    root = session.folder / f"{session.layout}_stateless"
    root.mkdir(exist_ok=True)
    metrics = [trainer.train(global_batch()) for _ in range(2)]
    path = trainer.save(str(root), MANIFEST)
    metrics.append(trainer.train(global_batch()))
    held = sum(
        t.numel()
        for inner in chained.inner_optimizers(trainer.policy.optimizer)
        for s in inner.optimizer.state.values()
        for t in s.values()
    )
    resumed = session.trainer("tied", settings, [], load=False)
    resumed.load(str(path), weights_only=False)
    again = resumed.train(global_batch())
    return {
        "metrics": metrics,
        "held": held,
        "tensors": len(list(trainer.policy.parameters())),
        "metrics_equal": again == metrics[-1],
        "differing": differing(weights(trainer), weights(resumed)),
    }
