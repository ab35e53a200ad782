"""The process behind the layout, attention and bridge tests: imports Megatron once, then forks the ranks of every job.

``python layout_worker.py FOLDER JOB...`` (see ``layout_launch.py``). Importing Megatron and megatron-bridge takes far
longer than all the steps of these tests, and a forked child is as fresh as a new process as far as torch.distributed
and Megatron go: its parent never initialises either. A job is a layout; each of its ranks leaves
``FOLDER/JOB.RANK.json``.
"""

import json
import os
import pathlib
import socket
import subprocess
import sys
import time
import traceback

sys.path[:0] = [str(pathlib.Path(__file__).parent), str(pathlib.Path(__file__).parents[2])]

from slime_cli.hardware import device as hardware  # noqa: E402
from slime_cli.processes import die_with_parent  # noqa: E402

DEVICE = hardware.prepare_trainer()

import torch  # noqa: E402
import transformers  # noqa: E402
from megatron.bridge import AutoBridge  # noqa: E402, F401  (imported before the forks, not in each of them)

import attention_cases  # noqa: E402
import checkpoint_cases  # noqa: E402
import family_cases  # noqa: E402
import layout_cases  # noqa: E402
import lora_cases  # noqa: E402
import matrix_cases  # noqa: E402
import moe_cases  # noqa: E402
import mtp_cases  # noqa: E402
import policy_cases  # noqa: E402
from bench import layouts as matrix  # noqa: E402
from layout_launch import IN_OTHER, OF_FAMILIES, OF_LORA, OTHER, OTHER_PROCESSOR, POLICY, RESUMING  # noqa: E402

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
transformers.logging.set_verbosity_error()

EXPERTS = ["--expert-model-parallel-size", "2", "--expert-tensor-parallel-size", "1"]
LAYOUTS = {
    "single": (1, []),
    "vpp2": (2, ["--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1"]),
    "tp2_cp2": (4, ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--context-parallel-size", "2"]),
    "dp2": (2, []),
    "dp2_distributed": (2, checkpoint_cases.DISTRIBUTED),
    "ep2": (2, ["--expert-model-parallel-size", "2"]),
    "tp2_ep2": (2, ["--tensor-model-parallel-size", "2", "--sequence-parallel", *EXPERTS]),
    "cp2_ep2": (2, ["--context-parallel-size", "2", "--use-distributed-optimizer", *EXPERTS]),
    "pp2_ep2": (4, ["--pipeline-model-parallel-size", "2", *EXPERTS]),
    **matrix.LAYOUTS,
}


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def in_layout(folder: pathlib.Path, job: str, layout: str, rank: int) -> dict:
    """Body of one rank."""
    from slime_cli.training.network import megatron

    world_size, flags = LAYOUTS[layout]
    some = folder / ("moe" if "ep" in layout else "tied")
    megatron.initialise(megatron.parse(layout_cases.argv(DEVICE, some, flags), rank, world_size), DEVICE)
    session = layout_cases.Session(folder, layout, flags, rank, world_size, DEVICE)
    if (case := job.partition(":")[2]).partition("@")[0] in matrix_cases.ROWS:
        return matrix_cases.row(session, case)
    if job == OTHER:
        return {
            "attention": attention_cases.every_pack(),
            "log_probs": attention_cases.log_probs(),
            "bridge": layout_cases.bridges(session),
            "steps": layout_cases.steps(session, IN_OTHER),
            "threads": torch.get_num_threads(),
            "instructions": torch.backends.cpu.get_cpu_capability(),
        }
    if job.endswith(":resume"):
        return {"resume": layout_cases.resume(session)}
    if "ep2" in layout:
        found = {"steps": moe_cases.steps(session), "balance": moe_cases.balance(session)}
        return found | {"families": family_cases.gradients(session) if layout in ("ep2", "tp2_ep2") else {}}
    if job.endswith(":reshard"):
        return checkpoint_cases.after_the_layouts(session)
    return {
        "attention": attention_cases.everything() if layout == "single" else {},
        "log_probs": attention_cases.log_probs(),
        "bridge": layout_cases.bridges(session),
        "steps": layout_cases.steps(session) | moe_cases.steps(session) | mtp_cases.steps(session),
        "mtp": mtp_cases.alone(session) if layout == "single" else {},
        "families": family_cases.gradients(session) if layout in OF_FAMILIES else {},
        "resumed": family_cases.resumed(session) if layout in RESUMING else {},
        "replay": moe_cases.replay(session) if layout == "single" else {},
        "balance": moe_cases.balance(session),
        "rounded": layout_cases.rounded(session) if layout == "single" else [],
        "saved": layout_cases.save(session) if layout in checkpoint_cases.RESHARDED else {},
        "checkpoints": checkpoint_cases.everything(session),
        "lora": lora_cases.everything(session) if layout in OF_LORA else {},
        # Last: it ends in a gradient that is not finite, which one rank alone may see while others wait for it.
        "policy": policy_cases.everything(session) if layout in POLICY else {},
    }


def child(folder: pathlib.Path, job: str, rank: int) -> None:
    """Never returns: a forked child must not run its parent's clean-up."""
    die_with_parent()
    code = 1
    try:
        if job == "make":
            out = (
                layout_cases.make(folder) | moe_cases.make(folder) | mtp_cases.make(folder) | family_cases.make(folder)
            )
        else:
            out = in_layout(folder, job, job.split(":")[0], rank)
        (folder / f"{job}.{rank}.json").write_text(json.dumps(out))
        code = 0
    except BaseException:
        (folder / f"{job}.{rank}.error").write_text(traceback.format_exc())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run(folder: pathlib.Path, job: str) -> None:
    if job == OTHER and not OTHER_PROCESSOR.items() <= os.environ.items():  # libraries read it when they are loaded
        subprocess.run([sys.executable, __file__, str(folder), job], env=os.environ | OTHER_PROCESSOR, check=False)
        return
    world_size = 1 if job == "make" else LAYOUTS[job.split(":")[0]][0]
    port = free_port()
    began = time.time()
    children = {}
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            os.environ.update(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(world_size),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
            )
            child(folder, job, rank)
        children[pid] = rank
    failed = False
    while children:
        pid, status = os.wait()
        rank = children.pop(pid)
        if status:
            print(f"{job}: rank {rank} ended with status {status}", flush=True)
            failed = True
            for other in children:  # they wait for it in a collective
                os.kill(other, 9)
    print(f"{job}: {time.time() - began:.1f} s", flush=True)
    if failed:
        (folder / f"{job}.failed").touch()


if __name__ == "__main__":
    root = pathlib.Path(sys.argv[1])
    for name in sys.argv[2:]:
        run(root, name)
