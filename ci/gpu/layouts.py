"""Parallel layouts on as many GPUs as there are: whether each trains as one GPU does, and how fast the usual ones are.

``python -m ci.gpu.layouts FOLDER [--ranks N] [--seconds 300] [--small]`` (a new folder) prints JSON lines: ``layout``
for each row of ``bench/layouts.py`` that fits N ranks, in float32 over NCCL against one process on one GPU; ``speed``
for the three most usual layouts of N ranks, in bfloat16 with a Qwen3 of the 4B shape: step seconds, MFU, peak memory.
What there is no time for is said. Ends with exit code 1 where a row is off by more than its bound, or a rank failed.
``--small`` is for trying it out, on a CPU over gloo as well: a small shape, and one row a layout.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench import layouts
from ci.gpu import common, shapes, step
from slime_cli.addresses import free_port

SMALL = step.SMALL | {"num_hidden_layers": 4}
SAMPLES, LENGTH = 256, 612
TIMES = 3
"""Steps; the first warms up."""


def usual(ranks: int) -> dict[str, list[str]]:
    """The three layouts that runs of one host mostly have, by name."""
    distributed = layouts.DISTRIBUTED
    return {
        f"dp{ranks}": distributed,
        f"tp2_dp{ranks // 2}": [*layouts.TENSOR_2, *distributed],
        f"tp2_pp2_dp{ranks // 4}" if ranks >= 4 else "pp2": (
            [*layouts.TENSOR_2, *layouts.PIPELINE, *distributed] if ranks >= 4 else layouts.PIPELINE
        ),
    }


# -- a rank ------------------------------------------------------------------------------------------------------------


def rank(folder: pathlib.Path, place: int, world: int, small: bool, flags: Sequence[str]) -> dict[str, Any]:
    """One rank's steps: seconds of each, and peak memory."""
    from slime_cli.hardware import device as hardware
    from slime_cli.hardware import peak

    hardware.prepare_trainer()
    trainer = step.made(folder, 512 if small else 16384, ["--transformer-impl", "local", *flags], place, world)
    rng = np.random.default_rng(0)
    lengths = rng.integers(10, 50, 32) if small else [LENGTH - 100] * SAMPLES
    vocabulary = trainer.args.vocab_size
    given = step.batch([10 if small else 100] * len(lengths), lengths, vocabulary)
    seconds = step.timed(lambda: trainer.train(given), TIMES)
    return {"seconds": seconds, "peak_gib": peak.most() / 2**30, "tokens": int(given.lengths_N.sum())}


def ranks(folder: pathlib.Path, world: int, small: bool, flags: Sequence[str], limit: float) -> list[dict[str, Any]]:
    """All ranks in processes of their own; what each found. Raises TimeoutExpired or CalledProcessError."""
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world)}
    environment |= {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "ci.gpu.layouts", str(folder), *(["--small"] if small else [])]
    started = []
    for place in range(world):
        one = environment | {"RANK": str(place), "LOCAL_RANK": str(place)}
        with open(folder / f"rank{place}.log", "w") as log:
            command = [*words, "--rank", str(place), "--ranks", str(world), f"--flags={' '.join(flags)}"]
            started.append(subprocess.Popen(command, env=one, stdout=log, stderr=log))
    try:
        deadline = time.monotonic() + limit
        for process in started:
            if process.wait(max(deadline - time.monotonic(), 0.1)):
                raise subprocess.CalledProcessError(process.returncode, process.args)
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [json.loads((folder / f"rank{place}.json").read_text()) for place in range(world)]


# -- what is measured --------------------------------------------------------------------------------------------------


def right(folder: pathlib.Path, world: int, small: bool, end: float) -> bool:
    """``layout`` lines; whether there are any, and all are within the bound."""
    wanted = [case for case in layouts.cases() if case.ranks <= world]
    if world == 2:
        wanted = [layouts.Case(name, "dense", "grpo") for name in ("tp2", "pp2", "cp2")]
    elif small:
        wanted = [case for case in wanted if case.model == "experts"]
    held = True
    found = []
    (folder / "rows").mkdir(exist_ok=True)
    for row in layouts.run(folder / "rows", wanted, gpus=common.gpus() > 0, until=end):
        found.append(row["layout"])
        good = row["max_rel_diff"] is not None and row["max_rel_diff"] <= layouts.BOUND
        common.say("layout", **row, held=good)
        held = held and good
    if len(found) < len(wanted):
        common.say("layout", left_out=f"{len(wanted) - len(found)} rows: no time")
    return held and bool(found)


def speed(folder: pathlib.Path, world: int, small: bool, end: float) -> bool:
    """``speed`` lines; whether all layouts ran."""
    import torch

    shape = SMALL if small else shapes.QWEN3_4B
    step.checkpoint(folder, shape)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    ran = True
    for name, flags in usual(world).items():
        left = end - time.monotonic()
        if left < 40:
            common.say("speed", layout=name, left_out="no time")
            continue
        try:
            found = ranks(folder, world, small, flags, left)
        except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
            logs = [(folder / f"rank{place}.log").read_text()[-600:] for place in range(world)]
            common.say("speed", layout=name, error=repr(error)[:300], logs=logs)
            ran = False
            continue
        seconds = statistics.median(max(times) for times in list(zip(*(one["seconds"] for one in found)))[1:])
        flops = 6 * step.parameters(shape) * found[0]["tokens"] / seconds
        peaks = [one["peak_gib"] for one in found]
        common.say(
            "speed",
            layout=name,
            ranks=world,
            seconds=seconds,
            tokens_per_s=found[0]["tokens"] / seconds,
            mfu=flops / (world * step.FLOPS),
            peak_gib=max(peaks),
            least_peak_gib=min(peaks),
        )
    return ran


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--ranks", type=int, help="GPUs to use: 2, 4 or 8; as many as there are")
    parser.add_argument("--seconds", type=float, default=300, help="for both parts together")
    parser.add_argument("--small", action="store_true", help="a small shape; fewer rows")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--flags", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if args.rank is not None:
        try:
            found = rank(folder, args.rank, args.ranks, args.small, args.flags.split())
            (folder / f"rank{args.rank}.json").write_text(json.dumps(found))
            code = 0
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # NCCL's threads and Megatron's helpers are not waited for
    started = time.monotonic()
    world = args.ranks or common.gpus() or 2
    common.say("machine", gpus=common.gpus(), ranks=world)
    held = right(folder, world, args.small, started + args.seconds / 2)
    ran = speed(folder, world, args.small, started + args.seconds)
    common.say("result", held=held, ran=ran, seconds=time.monotonic() - started)
    return 0 if held and ran else 1


if __name__ == "__main__":
    sys.exit(main())
