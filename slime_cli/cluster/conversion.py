"""Carries out a conversion on Megatron's ranks, one process each, on this machine.

:func:`run` is what :mod:`slime_cli.convert.convert` is given. The ranks (:mod:`.conversion_rank`) read ``job.json``,
say what they do in ``phases`` and leave an error meant for the user in ``RANK.error.json``; none outlives the call.
"""

import json
import os
import pathlib
import subprocess
import tempfile
import time
from typing import Any

from slime_cli import addresses, errors, processes
from slime_cli.convert.convert import Say
from slime_cli.errors import EngineError, SlimeError

LAST_LINES = 12
SAID_LATER = 0.3
"""Seconds: the first rank to die may not be the first to be seen; the cause is the one that said something."""


def run(job: dict[str, Any], say: Say) -> None:
    """Runs ``job`` on all its ranks. Raises what a rank raised, or EngineError with the last lines of the first that
    died."""
    world = job["tensor"] * job["pipeline"] * job["expert"]
    with tempfile.TemporaryDirectory(prefix="slime-convert-") as name:
        folder = pathlib.Path(name)
        (folder / "job.json").write_text(json.dumps(job))
        say(f"starting {world} Megatron process{'es' if world > 1 else ''}")
        port = addresses.free_port()
        ranks: list[subprocess.Popen] = []
        try:
            for rank in range(world):
                ranks.append(_start(folder, rank, world, port))
            _wait(ranks, folder, say)
        finally:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
                process.wait()


def _start(folder: pathlib.Path, rank: int, world: int, port: int) -> subprocess.Popen:
    environment = processes.environment() | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": addresses.LOOPBACK,
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // world)),
        "PYTHONWARNINGS": "ignore",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = processes.python("slime_cli.cluster.conversion_rank", str(folder), str(os.getpid()))
    with open(folder / f"{rank}.log", "wb") as log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
        )


def _wait(ranks: list[subprocess.Popen], folder: pathlib.Path, say: Say) -> None:
    said = 0
    while True:
        codes = [process.poll() for process in ranks]
        phases = (folder / "phases").read_text().splitlines() if (folder / "phases").exists() else []
        for phase in phases[said:]:
            say(phase)
        said = len(phases)
        for rank, code in enumerate(codes):
            if code:
                time.sleep(SAID_LATER)
                raise _failure(folder, rank, code)
        if all(code == 0 for code in codes):
            return
        time.sleep(0.05)


def _failure(folder: pathlib.Path, rank: int, code: int) -> SlimeError:
    said = sorted(folder.glob("*.error.json"))
    if said:
        found = json.loads(said[0].read_text())
        return getattr(errors, found["kind"])(found["message"], found["fix"])
    lines = [line for line in (folder / f"{rank}.log").read_text(errors="replace").splitlines() if line.strip()]
    last = "\n  ".join(lines[-LAST_LINES:]) or "(it wrote nothing)"
    how = f"signal {-code}" if code < 0 else f"status {code}"
    return EngineError(
        f"Megatron process {rank} ended with {how}; its last lines:\n  {last}",
        "the last line names the cause; `slime doctor --hf-checkpoint DIR` checks the model",
    )
