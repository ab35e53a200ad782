"""Starts ``layout_worker.py`` once a test session and hands out what its ranks found. Imports nothing heavy."""

import atexit
import contextlib
import functools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile

from bench import layouts as matrix

WORKER = pathlib.Path(__file__).parent / "layout_worker.py"
LAYOUTS = ("single", "tp2", "pp2", "vpp2", "cp2", "tp2_cp2", "dp2", "dp2_distributed")
OF_EXPERTS = ("ep2", "tp2_ep2", "cp2_ep2", "pp2_ep2")
"""Layouts of mixtures of experts only."""
OVER_FOUR = ("grpo", "grpo_recomputed", "grpo_per_token", "gspo", "ppo")
"""Cases of ``layout_cases.CASES`` that layouts of four ranks run: two cores take their time for those."""
IN_DENSE_LAYOUTS = ("moe_grpo", "latent_rollout_replay_recomputed")
IN_LAYOUTS_OF_EXPERTS = (
    "moe_grpo",
    "moe_grpo_per_token",
    "moe_ppo_packed_small",
    "latent_grpo",
    "moe_replay_recomputed",
    IN_DENSE_LAYOUTS[1],
)
"""Cases of ``moe_cases.CASES``; one process runs all."""
OF_FAMILIES = ("single", "tp2", "pp2", "vpp2", "cp2", "tp2_cp2", "dp2")
"""Layouts that run ``family_cases.py``; where gradients are whole on every rank. Besides them ep2 and tp2_ep2."""
RESUMING = ("tp2", "dp2_distributed")
"""Layouts in which each family is resumed."""
OF_LORA = ("single", "tp2", "pp2", "cp2", "dp2", "dp2_distributed")
"""Layouts that run ``lora_cases.py``."""
MTP_EVERYWHERE = ("mtp", "mtp_tied", "mtp_packed_small")
"""Cases of ``mtp_cases.CASES`` that every layout runs; one of four ranks the first alone."""
POLICY = {
    "single": (
        "frozen",
        "forgotten",
        "hooked",
        "watched",
        "taught",
        "endpoint",
        "old_actor",
        "mixed_versions",
        "current_versions",
        "user_weights",
        "nucleus",
        "critic",
        "missing",
        "far_out",
        "offloaded",
        "not_finite",
    ),
    "dp2": (
        "forgotten",
        "watched",
        "endpoint",
        "mixed_versions",
        "current_versions",
        "user_weights",
        "critic",
        "offloaded",
        "not_finite",
    ),
    "tp2": ("frozen", "hooked", "old_actor", "nucleus", "critic"),
}
"""Layout -> functions of ``policy_cases.py`` that it runs."""
SAVING = ("single", "dp2_distributed")
OTHER = "single:other"
"""One process again, some cases, in :data:`OTHER_PROCESSOR`."""
OTHER_PROCESSOR = {
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "MKL_CBWR": "COMPATIBLE",
    "OMP_NUM_THREADS": "2",
    "OMP_WAIT_POLICY": "PASSIVE",
}
"""What makes torch, oneDNN and MKL compute as on the oldest processor that they run on, in another number of threads
(which do not take cores from the tests beside them while they wait)."""
IN_OTHER = ("grpo", "grpo_per_token", "grpo_packed_small", "sft", "gspo", "ppo")
MATRIX = [
    case
    for case in matrix.cases()
    if case.ranks == 4 and (case.layout not in matrix.MORE or case.layout == "tp2_etp2_ep2")
]
"""Rows of ``make layouts`` that run with the tests: those of four ranks, some seconds each."""
JOBS = ("make", *LAYOUTS, *OF_EXPERTS, *(f"{layout}:resume" for layout in SAVING), "single:reshard", OTHER)
JOBS += tuple(matrix.jobs(MATRIX))


def doing(function: str) -> list[str]:
    """Layouts that run this function of ``policy_cases.py``."""
    return [layout for layout, functions in POLICY.items() if function in functions]


@functools.cache
def start() -> tuple[pathlib.Path, subprocess.Popen]:
    """Begins all jobs; ``conftest.py`` calls it before the session's first test, so that they run beside the others."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="slime-layouts-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    environment = os.environ | {
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    with open(folder / "log", "w") as log:
        command = [sys.executable, str(WORKER), str(folder), *JOBS]
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    atexit.register(_end, process)
    return folder, process


def _end(process: subprocess.Popen) -> None:
    """Its own session: the worker, its ranks, and the helpers that Megatron's checkpoint writer leaves behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@functools.cache
def _folder() -> pathlib.Path:
    folder, process = start()
    try:
        process.wait(timeout=1500)
    finally:
        _end(process)
    return folder


def ranks(job: str) -> list[dict]:
    """What every rank of ``job`` returned. Fails with the first rank's traceback."""
    folder = _folder()
    found = sorted(folder.glob(f"{job}.[0-9].json"))
    if (folder / f"{job}.failed").exists() or not found:
        errors = sorted(folder.glob(f"{job}.[0-9].error"), key=lambda p: p.stat().st_mtime)
        raise AssertionError(errors[0].read_text() if errors else (folder / "log").read_text()[-4000:])
    return [json.loads(p.read_text()) for p in found]


def reported(layout: str) -> dict[str, list[dict]]:
    """Metrics of every case and rollout, from the one rank that reports them."""
    (steps,) = [r["steps"] for r in ranks(layout) if None not in next(iter(r["steps"].values()))]
    return steps
