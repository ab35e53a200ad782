"""Transformer Engine's layers beside Megatron's local ones on one GPU: whether they are right, how fast, and whether
each resumes the other's checkpoints.

``python -m ci.gpu.transformer_engine [--seconds 500] [--small]``, on a machine that has Transformer Engine, prints
JSON lines. ``layers``: log-probabilities of each kind against the same weights in float32, and its gradient against the
local layers'. ``step``: seconds, MFU (as :mod:`ci.gpu.step` counts it) and memory, equal and mixed lengths. ``bare``:
slime's step over Megatron's own loop with the same packs. ``resume``: two steps after a checkpoint of one kind was
loaded by another, against the kind that wrote it. Every kind is a process of its own; ``none`` has no Transformer
Engine to import.
"""

import argparse
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ci.gpu import step as steps
from ci.gpu.step import batch, say, timed

if TYPE_CHECKING:
    from slime_cli.training.trainer import Trainer

ENGINE = ["--transformer-impl", "transformer_engine"]
KINDS = {
    "local": ["--transformer-impl", "local"],
    "transformer_engine": ENGINE,
    "fp8 blockwise": [*ENGINE, "--fp8-format", "e4m3", "--fp8-recipe", "blockwise"],
    "none": [],
}
PACK = 32768
"""Tokens of a pack. With 16,384 Transformer Engine's kernels end before the next ones are launched."""
BATCHES = [batch([10] * 16, [20 + i] * 16, 2048) for i in range(3)]
"""Batches of the three steps: one before a checkpoint, two after it."""
FUSED = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
"""A norm's name in local layers -> in Transformer Engine's."""
SAVE = ("local", "transformer_engine", "none")
"""Kinds whose checkpoints each of them loads."""


def without_engine(environment: dict[str, str]) -> dict[str, str]:
    """No entry of PYTHONPATH that has the package."""
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    kept = [path for path in paths if not (pathlib.Path(path or ".") / "transformer_engine").exists()]
    return {**environment, "PYTHONPATH": os.pathsep.join(kept)}


def children(work: str, kinds: Sequence[str], folder: pathlib.Path, *more: str, seconds: float = 200) -> None:
    """A process of each kind, at the same time; their lines come out as they are written."""
    started = {}
    for kind in kinds:
        environment = without_engine(dict(os.environ)) if kind == "none" else dict(os.environ)
        command = [sys.executable, "-m", __spec__.name, "--child", work, "--kind", kind, "--folder", str(folder), *more]
        started[kind] = subprocess.Popen(command, env=environment)
    end = time.monotonic() + seconds
    for kind, process in started.items():
        try:
            if code := process.wait(timeout=max(1.0, end - time.monotonic())):
                say(work, kind=kind, error=f"exit code {code}")
        except subprocess.TimeoutExpired:
            process.kill()
            say(work, kind=kind, error=f"took longer than {seconds:.0f} s")


# -- one kind ----------------------------------------------------------------------------------------------------------


def measure(kind: str, folder: pathlib.Path, small: bool) -> None:
    """Log-probabilities, gradient, seconds and MFU of a kind."""
    import torch
    import transformers

    from slime_cli.hardware import peak

    model: Any = transformers.Qwen3ForCausalLM
    loaded = model.from_pretrained(folder, dtype=torch.float32)
    trainer = steps.made(folder, 512 if small else PACK, KINDS[kind])
    config = json.loads((folder / "config.json").read_text())
    bench = steps.Bench(trainer, config, small, math.inf)
    accuracy(kind, bench, loaded.to(next(trainer.policy.model[0].parameters()).device).eval(), folder)
    del loaded
    for name, given in bench.batches().items():
        torch.cuda.empty_cache()
        peak.forget()
        seconds = statistics.median(timed(lambda: bench.trainer.train(given), 2 if small else 5)[1:])
        tokens = int(given.lengths_N.sum())
        mfu = bench.mfu(tokens, seconds)
        say(
            "step",
            kind=kind,
            batch=name,
            seconds=seconds,
            mfu=mfu,
            tokens_per_s=tokens / seconds,
            peak_gb=peak.most() / 1e9,
        )
    if kind == "transformer_engine":
        steps.bare(bench)


def accuracy(kind: str, bench: steps.Bench, exact: Any, folder: pathlib.Path) -> None:
    import torch

    lengths = [40, 7, 90, 33] if bench.small else [1500, 132, 3000, 612, 64, 900]
    given = batch([10 if bench.small else 50] * len(lengths), np.asarray(lengths), bench.config["vocab_size"])
    want_R = steps.exact_log_probs(exact, given)
    log_probs_R, gradients, found = steps.answers(bench.trainer, given)
    names = [name for name, _ in bench.trainer.policy.model[0].named_parameters()]
    mine = {fused(name): gradient.bfloat16().cpu() for name, gradient in zip(names, gradients, strict=True)}
    kept = folder / "gradients.pt"
    if kind == "local":
        torch.save(mine, kept)
    theirs = torch.load(kept)
    gap = math.sqrt(sum(float((mine[n].float() - theirs[n].float()).square().sum()) for n in theirs))
    size = math.sqrt(sum(float(g.float().square().sum()) for g in theirs.values()))
    diff_R = (log_probs_R - want_R).abs()
    say(
        "layers",
        kind=kind,
        mean_abs_diff=float(diff_R.mean()),
        max_abs_diff=float(diff_R.max()),
        gradient_relative_to_local=gap / size,
        gradient_norm=math.sqrt(sum(float(g.square().sum()) for g in gradients)),
        parameters_alike=mine.keys() == theirs.keys(),
        **found,
    )


def fused(name: str) -> str:
    for local, engines in FUSED.items():
        name = name.replace(local, engines)
    return name


# -- checkpoints -------------------------------------------------------------------------------------------------------


def trainer_of(kind: str, folder: pathlib.Path, distributed: bool) -> "Trainer":
    options = ["--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"] if distributed else []
    return steps.made(folder, 512, [*KINDS[kind], *options, "--lr", "1e-3"])


def name(kind: str, distributed: bool) -> str:
    return f"{kind} distributed" if distributed else kind


def save(kind: str, folder: pathlib.Path) -> None:
    """A checkpoint after one step, with either optimizer, and the two steps that follow."""
    from slime_cli.models import describe

    for distributed in (False, True):
        trainer = trainer_of(kind, folder, distributed)
        trainer.train(BATCHES[0])
        told = describe.checkpoint_manifest(folder, iteration=trainer.step, dtype="float32", layout={})
        trainer.save(str(folder / name(kind, distributed)), told)
        go_on(trainer, saved_by=kind, loaded_by="(not loaded)", distributed=distributed)


def load(kind: str, folder: pathlib.Path) -> None:
    """The same two steps, from every kind's checkpoint."""
    for saved_by in SAVE:
        for distributed in (False, True):
            with steps.guarded("resume", f"{saved_by} by {kind}, distributed {distributed}"):
                trainer = trainer_of(kind, folder, distributed)
                trainer.load(str(folder / name(saved_by, distributed) / "iter_0000001"), weights_only=False)
                go_on(trainer, saved_by=saved_by, loaded_by=kind, distributed=distributed)


def go_on(trainer: "Trainer", **fields: Any) -> None:
    found: list[dict[str, float]] = [trainer.train(given) or {} for given in BATCHES[1:]]
    total = float(sum(p.detach().double().abs().sum() for p in trainer.policy.model[0].parameters()))
    say("resume", norms=[each["grad_norm"] for each in found], sum=total, **fields)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--child")
    parser.add_argument("--kind", default="local")
    parser.add_argument("--folder", type=pathlib.Path)
    options = parser.parse_args()
    if options.child:
        one(options)
        return
    end = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as name:
        large, little = pathlib.Path(name) / "large", pathlib.Path(name) / "little"
        subprocess.run([sys.executable, "-m", __spec__.name, "--child", "models", "--folder", name], check=True)
        for work in ("save", "load"):
            children(work, SAVE, little)
        small = ["--small"] if options.small else []
        for kind in ("local", "transformer_engine", "fp8 blockwise"):  # one after the other: they are timed
            children("measure", [kind], little if options.small else large, *small, seconds=end - time.monotonic())
    say("end", seconds=options.seconds - (end - time.monotonic()))


def one(options: argparse.Namespace) -> None:
    """Does a child's work; an error is a line of its own."""
    from slime_cli.hardware import device as hardware

    try:
        if options.child == "models":
            steps.checkpoint(options.folder / "large", steps.SHAPE)
            steps.checkpoint(options.folder / "little", steps.SMALL)
            return
        hardware.prepare_trainer()
        if options.child == "measure":
            measure(options.kind, options.folder, options.small)
        else:
            {"save": save, "load": load}[options.child](options.kind, options.folder)
    except BaseException as error:
        trace = traceback.format_exc()[-1800:]
        say(options.child, kind=options.kind, error=repr(error)[:400], trace=trace)
    sys.stdout.flush()
    os._exit(0)  # NCCL's threads and Megatron's helpers are not waited for


if __name__ == "__main__":
    main()
