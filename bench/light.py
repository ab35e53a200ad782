"""Benchmarks that need no engine: start-up, the journal, a span, what a disk takes."""

import os
import pathlib
import statistics
import subprocess
import sys
import time

from slime_cli.buffer.journal import Journal
from slime_cli.buffer.types import PromptRow, Sample, Status
from slime_cli.tracing.spans import Tracer


def command_seconds(*words: str) -> float:
    """Median wall time of five runs of ``slime WORDS``, after one to warm the file cache."""
    times = []
    for _ in range(6):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "slime_cli", *words], check=True, capture_output=True)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def journal_rate(folder: pathlib.Path, rollouts: int = 20, groups: int = 128, size: int = 8) -> float:
    """Trajectories a second through all their fates, each generation kept before its reward (one durable commit a
    rollout)."""
    row = PromptRow("1 + 1", "2", {}, "bench", 1)
    start = time.perf_counter()
    with Journal(folder / "journal.sqlite") as journal:
        for r in range(rollouts):
            first = r * groups
            leases = [(g, row, 0, list(range(g * size, (g + 1) * size))) for g in range(first, first + groups)]
            samples = [
                Sample(
                    i,
                    g,
                    "1 + 1",
                    [1, 2, 3, 4],
                    "2",
                    2,
                    reward=1.0,
                    rollout_log_probs=[-0.1, -0.2],
                    status=Status.COMPLETED,
                )
                for g, _, _, indices in leases
                for i in indices
            ]
            indices = [s.index for s in samples]
            journal.lease(leases, {"position": first}, r)
            journal.generated(samples)
            journal.finish(samples)
            journal.batched(indices, r)
            journal.commit(steps=[(r + 1, r, "v", indices)], checkpoint="c")
    return rollouts * groups * size / (time.perf_counter() - start)


def span_microseconds(folder: pathlib.Path, count: int = 20000) -> dict[str, float]:
    """The cost of a span that is recorded, and of one where tracing is off."""
    found = {}
    for name, tracer in (("on", Tracer(folder, "on")), ("off", Tracer(folder, "off", enabled=False))):
        start = time.perf_counter()
        for i in range(count):
            with tracer.span("generate", group=i):
                pass
        found[name] = (time.perf_counter() - start) / count * 1e6
        tracer.close()
    return found


def disk_rate(folder: pathlib.Path, size: int = 256 * 2**20) -> float:
    """Bytes a second that ``dd`` writes there, synced."""
    target = folder / "dd"
    start = time.perf_counter()
    subprocess.run(
        ["dd", "if=/dev/zero", f"of={target}", "bs=4M", f"count={size >> 22}", "conv=fsync"],
        check=True,
        capture_output=True,
    )
    seconds = time.perf_counter() - start
    os.unlink(target)
    return size / seconds


def publish_rate(folder: pathlib.Path, hf_checkpoint: str, size: int = 256 * 2**20) -> float:
    """Bytes a second of a published version, checksums and manifest included, synced file by file as ``dd`` does."""
    import torch

    from slime_cli.weights import publish

    count = 16
    tensors = [(f"t{i}", torch.rand(size // count // 4)) for i in range(count)]
    start = time.perf_counter()
    publish.write(tensors, folder / "v", hf_checkpoint=hf_checkpoint, version="v", step=0, run="bench")
    for file in (folder / "v").iterdir():
        with open(file, "rb") as written:
            os.fsync(written.fileno())
    return size / (time.perf_counter() - start)


def grader_rate() -> float:
    """Judged pairs (tests/rewards/judged) a second of processor time that one reward worker grades, programs left out:
    those take what their tests take."""
    from tests.rewards import judged_pairs

    pairs = [pair for pair in judged_pairs.PAIRS if not pair["rm_type"].startswith("code")]
    judged_pairs.verdict(pairs[0])
    start = time.process_time()
    for pair in pairs:
        judged_pairs.verdict(pair)
    return len(pairs) / (time.process_time() - start)
