"""HF -> torch_dist -> HF for every model family, in several parallel layouts, on tiny random checkpoints; `make
conversions`.

A case converts there in its layout and back on one rank, with the functions behind ``slime convert``, and compares
every byte; then it loads the torch_dist checkpoint in its layout and compares Megatron's logits on packed sequences,
and the embedding's gradient, with transformers' on each alone. Importing Megatron takes longer than all that, so this
process imports it once and forks the ranks of every job. Writes ``runs/conversions.json`` and, from it,
``docs/conversions.md``. ``python -m bench.conversions [FAMILY...]`` runs some families only and writes nothing.
"""

import logging
import os
import pathlib
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from bench.conversion_models import FAMILIES, LENGTHS, depths, loss_weights_TV, make, sequences
from slime_cli.errors import EngineError, SlimeError

if TYPE_CHECKING:
    pass

LAYOUTS = {
    "single": {},
    "tp2": {"tensor": 2},
    "pp2": {"pipeline": 2},
    "ep2": {"expert": 2},
    "tp2 ep2": {"tensor": 2, "expert": 2},
}
TIMEOUT = 300.0


# -- checkpoints -------------------------------------------------------------------------------------------------------


def emptied(model: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """The model in ``folder`` with weights of zero: what is copied from there, and not converted, shows."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    for file in folder.glob("*.safetensors"):
        save_file(
            {n: t if ".visual." in n else torch.zeros_like(t) for n, t in load_file(file).items()},
            file,
            metadata={"format": "pt"},
        )
    return folder


def exact(before: pathlib.Path, after: pathlib.Path) -> str | None:
    """None when both folders hold the same tensors, else the first difference."""
    import torch
    from safetensors.torch import load_file

    one, two = (
        {name: t for file in sorted(f.glob("*.safetensors")) for name, t in load_file(file).items()}
        for f in (before, after)
    )
    for name in sorted(one.keys() ^ two.keys()):
        return f"{name} is only {'before' if name in one else 'after'}"
    differing = [name for name in one if one[name].dtype != two[name].dtype or not torch.equal(one[name], two[name])]
    return f"{len(differing)} of {len(one)} tensors differ, the first: {differing[0]}" if differing else None


# -- ranks -------------------------------------------------------------------------------------------------------------


def compare(job: dict[str, Any], args: Any, model: list[Any], bridge: Any, say: Any) -> None:
    """A rank's work: writes its largest differences from transformers to ``job["result"]`` with its rank and what is
    compared."""
    import types

    import torch
    from megatron.core import mpu
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    from slime_cli.training.batching import packs
    from slime_cli.training.network import checkpoint

    def result(what: str, got: torch.Tensor, want: torch.Tensor) -> None:
        pathlib.Path(f"{job['result']}.{what}.{args.rank}").write_text(str(float((got - want).abs().max())))

    no_optimizer: Any = types.SimpleNamespace(reload_model_params=lambda: None)
    no_scheduler: Any = None
    checkpoint.load(args, job["load"], model, no_optimizer, no_scheduler, weights_only=True)
    pack = packs.pack(LENGTHS, torch.device("cpu"))
    tokens_T = torch.cat(sequences())
    positions_T = pack.positions_T
    assert positions_T is not None, "only attention has a pack without them"
    want = torch.load(pathlib.Path(job["hf"]) / "expected.pt")

    def step(iterator: Iterator[Any], model: Any) -> tuple[Any, Callable[..., Any]]:
        def last(output: torch.Tensor, non_loss_data: bool = False) -> tuple[torch.Tensor, dict[str, Any]]:
            logits_TV = gather_from_tensor_model_parallel_region(output.squeeze(0))
            result("logits", logits_TV.detach(), want["logits_TV"])
            return (logits_TV * loss_weights_TV()).sum(), {}

        return model(tokens_T[None], positions_T[None], None, packed_seq_params=pack), last

    model[0].train()
    run_pass: Any = get_forward_backward_func()
    with torch.enable_grad():
        run_pass(
            forward_step_func=step,
            data_iterator=iter([]),
            model=model,
            num_microbatches=1,
            seq_length=sum(LENGTHS),
            micro_batch_size=1,
            forward_only=False,
        )
    # A tied weight's gradient is summed over the first and the last pipeline stage by the optimizer's step, which is
    # not taken here.
    if mpu.is_pipeline_first_stage() and (args.untie_embeddings_and_output_weights or mpu.is_pipeline_last_stage()):
        (grad_VH,) = [p.grad for name, p in model[0].named_parameters() if name.endswith("word_embeddings.weight")]
        rows = want["grad_VH"].chunk(mpu.get_tensor_model_parallel_world_size())[mpu.get_tensor_model_parallel_rank()]
        result("grad", grad_VH / want["grad_VH"].abs().max(), rows / want["grad_VH"].abs().max())


def run(job: dict[str, Any], say: Any) -> None:
    """Carries out a job in forks of this process, one a rank. Raises EngineError with the traceback of the rank that
    failed first."""
    from slime_cli.addresses import free_port

    world = job["tensor"] * job["pipeline"] * job["expert"]
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        children = {}
        for rank in range(world):
            pid = os.fork()
            if pid == 0:
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                _child(job, rank, pathlib.Path(folder))
            children[pid] = rank
        failed = not _wait(children)
        said = sorted(pathlib.Path(folder).iterdir(), key=lambda p: p.stat().st_mtime)
        if failed or said:
            raise EngineError(said[0].read_text() if said else f"no end in {TIMEOUT:.0f} s", "see the traceback")


def _child(job: dict[str, Any], rank: int, folder: pathlib.Path) -> None:
    """Never returns: a forked child must not run its parent's clean-up."""
    from slime_cli.cluster import conversion_rank

    os.setsid()
    if "SLIME_TRACEBACK" not in os.environ:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
    code = 1
    try:
        kinds = {"hf_to_dist": conversion_rank.to_dist, "dist_to_hf": conversion_rank.to_hf, "compare": compare}
        conversion_rank.with_model(job, rank, lambda text: None, kinds[job["kind"]])
        code = 0
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        text = error.message if isinstance(error, SlimeError) else str(error).strip() or "no message"
        (folder / str(rank)).write_text(
            f"{type(error).__name__}: {text} ({pathlib.Path(last.filename).name}:{last.lineno})"
        )
        if os.environ.get("SLIME_TRACEBACK"):
            traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(children: dict[int, int]) -> bool:
    """True when all ended well in time. The rest of a job that failed, and what its ranks started, are killed."""
    groups = list(children)
    good = True
    deadline = time.time() + TIMEOUT
    while children and good:
        for pid in list(children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                children.pop(pid)
                good = good and status == 0
        good = good and time.time() < deadline
        time.sleep(0.02)
    time.sleep(0 if good else 0.3)  # the rank that said something may not be the first that was seen
    for pid in groups:
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    for pid in children:
        os.waitpid(pid, 0)
    return good


# -- cases -------------------------------------------------------------------------------------------------------------


def applies(family: str, layout: str) -> bool:
    """Expert parallelism is for models with experts."""
    fields = FAMILIES[family][1]
    return "ep" not in layout or any(
        name in fields for name in ("num_experts", "n_routed_experts", "num_local_experts")
    )


def case(family: str, layout: str, model: pathlib.Path, scratch: pathlib.Path) -> dict[str, Any]:
    """One line of the table."""
    from slime_cli.convert import convert
    from slime_cli.models import architecture

    out = {"family": family, "architecture": "", "layout": layout, "exact": False, "why_not": None}
    out |= {"logits_max_diff": None, "gradient_max_relative_diff": None}
    sizes = {"tensor": 1, "pipeline": 1, "expert": 1} | LAYOUTS[layout]
    try:
        config = architecture.read_config(str(model))
        out["architecture"] = architecture.name(config)
        mtp = {"mtp_num_layers": depths(config)} if depths(config) else {}
        checkpoint = convert.hf_to_dist(model, scratch / "dist", **sizes, megatron=mtp, force=True, run=run)
        convert.dist_to_hf(checkpoint, scratch / "hf", origin=emptied(model, scratch / "origin"), force=True, run=run)
        out["why_not"] = exact(model, scratch / "hf")
        out["exact"] = out["why_not"] is None
        job = {
            "kind": "compare",
            "hf": str(model),
            "load": str(checkpoint),
            "dtype": "float32",
            "result": str(scratch / "found"),
        }
        known = architecture.megatron_args(config)
        assert known is not None, "it was converted"
        run(job | sizes | {"argv": architecture.argv(known)}, None)
        for field, what in (("logits_max_diff", "logits"), ("gradient_max_relative_diff", "grad")):
            out[field] = max((float(path.read_text()) for path in scratch.glob(f"found.{what}.*")), default=None)
    except SlimeError as error:
        out["why_not"] = error.message.removeprefix(f"{model}/")
    return out


def cases(
    families: list[str], layouts: list[str], report: Callable[[dict[str, Any]], None] = lambda line: None
) -> list[dict[str, Any]]:
    """All cases of these families and layouts, each reported when it is done. Imports Megatron into this process."""
    os.environ.update(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")
    from slime_cli.hardware import device as hardware

    logging.getLogger().setLevel(logging.ERROR)
    hardware.prepare_trainer()
    import torch
    import transformers
    from megatron.bridge import AutoBridge  # noqa: F401  (before the forks, not in each of them)

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    lines = []
    with tempfile.TemporaryDirectory(prefix="slime-conversions-") as root:
        for family in families:
            model = pathlib.Path(root) / "model"
            make(family, model)
            for layout in layouts:
                if applies(family, layout):
                    scratch = pathlib.Path(root) / "scratch"
                    scratch.mkdir()
                    lines.append(case(family, layout, model, scratch))
                    report(lines[-1])
                    shutil.rmtree(scratch)
            shutil.rmtree(model)
    return lines


def main() -> None:
    from bench import conversions_page
    from slime_cli import manifests

    def report(line: dict[str, Any]) -> None:
        gaps = (line["logits_max_diff"], line["gradient_max_relative_diff"])
        logits, gradient = ("-" if gap is None else f"{gap:.1e}" for gap in gaps)
        why = (line["why_not"] or "").splitlines()
        weights = "exact" if line["exact"] else "NOT"
        found = f"{weights:6} logits {logits:8} gradient {gradient:8} {why[0] if why else ''}"
        print(f"{line['family']:14} {line['layout']:8} {found}", flush=True)

    lines = cases(sys.argv[1:] or list(FAMILIES), list(LAYOUTS), report)
    if not sys.argv[1:]:
        manifests.write_json(conversions_page.MEASURED, lines)
        conversions_page.write(lines, list(LAYOUTS))
        print(f"written: {conversions_page.MEASURED} and {conversions_page.PAGE}")


if __name__ == "__main__":
    main()
