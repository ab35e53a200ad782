"""Layouts of four and eight ranks against one process: ``make layouts``, half an hour on 2 cores.

Each row trains one model with one estimator, on genuine Megatron over gloo in float32, as jobs of
``tests/training/layout_worker.py``: the runner, the models and the batch of the tests. ``runs/layouts.json`` has one
JSON line a row, appended as it ends; a row that is there is not run again (delete the file after a change). Ends with
an error where a row is off by more than :data:`BOUND`. Also known here, to tests and page: which rows there are.
"""

import dataclasses
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from slime_cli.options.estimators import ESTIMATORS

ROOT = pathlib.Path(__file__).parents[1]
WORKER = ROOT / "tests" / "training" / "layout_worker.py"
MEASURED = pathlib.Path("runs") / "layouts.json"
BOUND = 1e-5
SINGLE = "single"
SAVING, WHOLE = "saving", "whole"
TENSOR = "--tensor-model-parallel-size"
PIPELINE = ["--pipeline-model-parallel-size", "2"]
INTERLEAVED = ["--num-layers-per-virtual-pipeline-stage", "1"]
CONTEXT = ["--context-parallel-size", "2"]
TENSOR_2 = [TENSOR, "2", "--sequence-parallel"]
EXPERT_2 = ["--expert-model-parallel-size", "2", "--expert-tensor-parallel-size", "1"]
EXPERT_4 = ["--expert-model-parallel-size", "4", "--expert-tensor-parallel-size", "1"]
DISTRIBUTED = ["--use-distributed-optimizer"]
OF_TWO = {"tp2": TENSOR_2, "pp2": PIPELINE, "cp2": CONTEXT}
"""Layouts of two ranks that the tests run with every estimator; no rows here."""
OF_FOUR = {
    "tp4": [TENSOR, "4", "--sequence-parallel"],
    "pp4": ["--pipeline-model-parallel-size", "4"],
    "cp4": ["--context-parallel-size", "4"],
    "tp2_pp2": [*TENSOR_2, *PIPELINE],
    "tp2_vpp2": [*TENSOR_2, *PIPELINE, *INTERLEAVED],
    "pp2_cp2": [*PIPELINE, *CONTEXT],
    "ep4": ["--expert-model-parallel-size", "4", *DISTRIBUTED],
    "tp2_ep2_pp2": [*TENSOR_2, *EXPERT_2, *PIPELINE],
}
"""Layouts of four ranks -> Megatron's flags. An ``ep`` is of models with experts only."""
OF_EIGHT = {"tp2_cp2_pp2": [*TENSOR_2, *CONTEXT, *PIPELINE]}
OF_EIGHT |= {f"{name}_dp2": [*flags, *DISTRIBUTED] for name, flags in OF_FOUR.items()}
MORE = {
    "vpp2_cp2": (4, [*PIPELINE, *INTERLEAVED, *CONTEXT]),
    "pp2_cp2_ep2": (4, [*PIPELINE, *CONTEXT, *EXPERT_2]),
    "tp4_pp2": (8, [*OF_FOUR["tp4"], *PIPELINE]),
    "tp4_cp2": (8, [*OF_FOUR["tp4"], *CONTEXT]),
    "tp2_pp4": (8, [*TENSOR_2, *OF_FOUR["pp4"]]),
    "pp2_cp4": (8, [*PIPELINE, *OF_FOUR["cp4"]]),
    "ep8": (8, ["--expert-model-parallel-size", "8", *DISTRIBUTED]),
    "tp2_etp2_ep2": (4, [*TENSOR_2, "--expert-model-parallel-size", "2", "--expert-tensor-parallel-size", "2"]),
    "vpp2_ep2": (4, [*PIPELINE, *INTERLEAVED, *EXPERT_2]),
    "tp2_ep4": (4, [*TENSOR_2, *EXPERT_4]),
    "cp2_ep4": (4, [*CONTEXT, *EXPERT_4]),
    "pp2_ep4": (8, [*PIPELINE, *EXPERT_4]),
    "pp4_ep2": (8, [*OF_FOUR["pp4"], *EXPERT_2]),
}
"""Further combinations that runs use; ``make test`` runs ``tp2_etp2_ep2`` alone of them."""
LAYOUTS = {
    name: (ranks, flags) for ranks, some in ((2, OF_TWO), (4, OF_FOUR), (8, OF_EIGHT)) for name, flags in some.items()
} | MORE
"""Name -> (ranks, flags)."""
MODELS = ("dense", "experts", "latent")
COMPARED = ("loss", "grad_norm", "value_loss", "critic_grad_norm")
"""Metrics of each rollout that are compared; ppo alone has the last two."""
RESUMED = (
    ("tp4", "pp4", "dense", "grpo"),
    ("ep4", "tp2_ep2_pp2", "experts", "ppo"),
    ("tp2_pp2_dp2", "cp4_dp2", "dense", "ppo"),
    ("tp2_vpp2", "tp4_dp2", "dense", "gspo"),
    ("tp2_cp2_pp2", SINGLE, "latent", "grpo"),
    (SINGLE, "tp2_cp2_pp2", "experts", "cispo"),
    ("ep4_dp2", "tp2_pp2_dp2", "latent", "reinforce_plus_plus"),
    ("tp2_ep2_pp2_dp2", "ep4", "latent", "reinforce_plus_plus_baseline"),
    ("pp4_dp2", "tp2_vpp2", "experts", "grpo"),
    (SINGLE, "ep4", "experts", "grpo"),
)
"""(saved in, resumed in, model, estimator), all with the distributed optimizer."""
RESUMED_WHOLE = (
    ("tp2_ep2_pp2", "tp2_pp2", "latent", "ppo"),
    ("pp4", "tp2_ep2_pp2", "experts", "gspo"),
)
"""The same with the other optimizer, which every data-parallel rank has whole."""
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """A row before it runs. Its jobs are named LAYOUT:MODEL_ESTIMATOR, and behind an @ what else they do."""

    layout: str
    model: str
    estimator: str
    saved: str = ""
    """The layout whose checkpoint it resumes from; nothing where it begins with the model."""
    whole: bool = False
    """Saved and resumed without the distributed optimizer."""

    @property
    def name(self) -> str:
        return f"{self.saved} -> {self.layout}{', whole' * self.whole}" if self.saved else self.layout

    @property
    def ranks(self) -> int:
        """The most that run at once."""
        return max(LAYOUTS[layout][0] for layout in (self.layout, self.saved) if layout not in ("", SINGLE))

    def _job(self, layout: str, *how: str) -> str:
        return "@".join([f"{layout}:{self.model}_{self.estimator}", *how, *([WHOLE] if self.whole else [])])

    @property
    def job(self) -> str:
        return self._job(self.layout, *filter(None, [self.saved]))

    @property
    def alone(self) -> str:
        """One process; where a checkpoint is resumed, one that is not interrupted."""
        return self._job(SINGLE, *([SAVING] if self.saved else []))

    @property
    def before(self) -> tuple[str, ...]:
        """Jobs that must have run."""
        return (self.alone, self._job(self.saved, SAVING)) if self.saved else (self.alone,)

    def row(self, found: list[dict[str, Any]], alone: list[dict[str, Any]], seconds: float) -> Row:
        good = found and alone
        fields = {"layout": self.name, "ranks": self.ranks, "model": self.model, "estimator": self.estimator}
        return fields | {"max_rel_diff": max_rel_diff(found, alone) if good else None, "seconds": seconds}

    def is_in(self, rows: Sequence[Row]) -> bool:
        fields = (self.name, self.model, self.estimator)
        return any((row["layout"], row["model"], row["estimator"]) == fields for row in rows)


def cases() -> Iterator[Case]:
    """Every row: each model meets the estimators in turn; then those that resume."""
    for i, layout in enumerate(name for name in LAYOUTS if name not in OF_TWO):
        for j, model in enumerate(MODELS):
            if not ("ep" in layout and model == "dense"):
                yield Case(layout, model, ESTIMATORS[(i + 2 * j) % len(ESTIMATORS)])
    for whole, resumed in ((False, RESUMED), (True, RESUMED_WHOLE)):
        yield from (Case(layout, model, estimator, saved, whole) for saved, layout, model, estimator in resumed)


def jobs(some: Sequence[Case]) -> list[str]:
    """Theirs, each behind those that it needs."""
    return list(dict.fromkeys(name for case in some for name in (*case.before, case.job)))


def max_rel_diff(found: list[dict[str, Any]], alone: list[dict[str, Any]]) -> float:
    """The largest relative difference of :data:`COMPARED` and of the weights. Both: what a job's ranks left, of a
    layout and of one process."""
    (got,) = [rank["metrics"] for rank in found if rank["metrics"]]
    (want,) = [rank["metrics"] for rank in alone]
    pairs = [(a[name], b[name]) for a, b in zip(got, want, strict=True) for name in COMPARED if name in b]
    return max(found[0]["weights_gap"], *(abs(a - b) / abs(b) for a, b in pairs))


def read(path: pathlib.Path = MEASURED) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def left(folder: pathlib.Path, job: str) -> list[dict[str, Any]]:
    """The result of each rank of a job; empty where the job did not run, or failed."""
    if (folder / f"{job}.failed").exists():
        return []
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{job}.[0-9].json"))]


def run(folder: pathlib.Path, wanted: Sequence[Case], gpus: bool = False, until: float = math.inf) -> Iterator[Row]:
    """Runs the rows, one after the other, and gives each as it ends. ``folder`` keeps the models and what jobs left.

    ``gpus``: a GPU for each rank, in place of the CPU. ``until`` (of ``time.monotonic``): no row is waited for later.
    """
    of_jobs = {case.job: case for case in wanted}
    todo = [job for job in ("make", *jobs(wanted)) if job in of_jobs or not left(folder, job)]
    for job in todo:
        (folder / f"{job}.failed").unlink(missing_ok=True)
    environment = os.environ | {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    environment |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    # A process that has begun with CUDA cannot fork ranks that use it; asking the driver's library is no beginning.
    environment |= {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"} if gpus else {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(WORKER), str(folder), *todo]
    with (
        open(folder / "log", "a") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=environment, text=True) as worker,
    ):
        try:
            for line in worker.stdout or ():
                log.write(line)
                if (ended := re.fullmatch(r"(\S+): ([\d.]+) s", line.strip())) and (case := of_jobs.get(ended[1])):
                    yield case.row(left(folder, case.job), left(folder, case.alone), float(ended[2]))
                if time.monotonic() > until:
                    worker.kill()
                    return
        except BaseException:  # Ctrl-C, or the caller has enough
            worker.kill()  # its ranks die with it
            raise
    if worker.returncode:
        sys.exit(f"the worker ended with code {worker.returncode}: see {folder / 'log'}")


def main() -> None:
    folder = MEASURED.with_suffix("").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    there = read()
    wanted = [case for case in cases() if not case.is_in(there) and case.name in (sys.argv[1:] or case.name)]
    wrong = []
    for row in run(folder, wanted) if wanted else ():
        print(json.dumps(row), flush=True)
        if row["max_rel_diff"] is None or row["max_rel_diff"] > BOUND:
            wrong.append(f"{row['layout']} {row['model']} {row['estimator']}: {row['max_rel_diff']}")
        else:
            with open(MEASURED, "a") as file:
                file.write(json.dumps(row) + "\n")
    if wrong:
        sys.exit("\n".join([f"not within {BOUND} of one process; {folder} has what their ranks said:", *wrong]))


if __name__ == "__main__":
    main()
