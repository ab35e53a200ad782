"""One rank of a conversion: ``python -m slime_cli.convert.rank FOLDER OWNER``, started by
:mod:`slime_cli.convert.convert`.

Reads ``FOLDER/job.json``; rank 0 appends what it does to ``FOLDER/phases``; an error meant for the user goes to
``FOLDER/RANK.error.json``. Ends when its owner does.
"""

import json
import logging
import os
import pathlib
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from slime_cli import disk
from slime_cli.errors import DataError, SlimeError
from slime_cli.models import tensors
from slime_cli.process_signals import die_with_parent

Say = Callable[[str], None]


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    owner = int(sys.argv[2])
    die_with_parent()
    if os.getppid() != owner:
        sys.exit(1)
    rank = int(os.environ["RANK"])

    def say(text: str) -> None:
        if rank == 0:
            with open(folder / "phases", "a") as file:
                file.write(text + "\n")

    try:
        job = json.loads((folder / "job.json").read_text())
        with disk.naming(job["target"]):
            convert(job, rank, say)
    except SlimeError as error:
        told = {"kind": type(error).__name__, "message": error.message, "fix": error.fix}
        (folder / f"{rank}.error.json").write_text(json.dumps(told))
        sys.exit(error.exit_code)


def convert(job: dict[str, Any], rank: int, say: Say) -> None:
    with_model(job, rank, say, {"hf_to_dist": _to_dist, "dist_to_hf": _to_hf}[job["kind"]])


def with_model(job: dict[str, Any], rank: int, say: Say, work: Callable[..., None]) -> None:
    """Calls ``work(job, args, model, bridge, say)`` on a model of the job's architecture and layout."""
    say("importing Megatron")
    warnings.filterwarnings("ignore")
    logging.getLogger().setLevel(logging.ERROR)
    import torch

    from slime_cli.hardware import device as hardware
    from slime_cli.hardware import transformer_engine

    device = hardware.prepare_trainer()
    if problem := transformer_engine.problem(device.kind):
        say(f"warning: {problem}")
    from megatron.core.enums import ModelType
    from megatron.training.training import get_model

    from slime_cli.training.network import megatron
    from slime_cli.training.network.model import provider
    from slime_cli.weights.bridge import Bridge

    base = megatron.always(device, transformer_engine=transformer_engine.problem(device.kind) is None)
    args = megatron.parse(argv(base, job), rank, job["tensor"] * job["pipeline"] * job["expert"])
    megatron.initialise(args, device)
    megatron.begin_stage(args)
    say("building the model, importing megatron-bridge")
    model = get_model(provider, ModelType.encoder_or_decoder, wrap_with_ddp=False)
    bridge = Bridge(job["hf"], args.params_dtype)
    with torch.no_grad():
        work(job, args, model, bridge, say)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def argv(base: list[str], job: dict[str, Any]) -> list[str]:
    """Megatron's command line for a job: ``base`` is what every run has."""
    if job["dtype"] == "float32":
        base = [word for word in base if word != "--bf16"]
    layout = [
        "--tensor-model-parallel-size",
        str(job["tensor"]),
        "--pipeline-model-parallel-size",
        str(job["pipeline"]),
    ]
    layout += ["--expert-model-parallel-size", str(job["expert"])]
    if job["expert"] > 1:
        layout += ["--expert-tensor-parallel-size", "1"]
    if job["tensor"] > 1 and "--num-experts" in job["argv"]:
        layout.append("--sequence-parallel")  # without it Megatron refuses to train experts on tensor parallel ranks
    weights = [
        "--global-batch-size",
        str(job["expert"]),
        "--no-save-optim",
        "--no-save-rng",
        "--no-load-optim",
        "--no-load-rng",
    ]
    return base + job["argv"] + layout + weights


def _to_dist(job, args, model, bridge, say) -> None:
    import msgspec

    from slime_cli import manifests
    from slime_cli.training.network import checkpoint

    say(f"reading the weights of {job['hf']}")
    bridge.load(model)
    say("writing the torch_dist checkpoint")
    manifest = msgspec.convert(job["manifest"], manifests.Checkpoint)
    checkpoint.save(args, job["target"], 0, model, None, None, manifest)


def _to_hf(job, args, model, bridge, say) -> None:
    import torch

    from slime_cli.training.network import checkpoint
    from slime_cli.weights import publish

    say(f"reading {job['load']}")
    no_optimizer = types.SimpleNamespace(reload_model_params=lambda: None)
    iteration = checkpoint.load(args, job["load"], model, no_optimizer, None, weights_only=True)
    source = pathlib.Path(job["hf"])
    dtypes = _dtypes(source)

    def named() -> Iterator[tuple[str, torch.Tensor]]:
        missing = set(dtypes)
        for name, tensor in bridge.export(model):
            missing.discard(name)
            yield name, tensor.to(getattr(torch, _DTYPES.get(dtypes.get(name), job["hf_dtype"])))
        yield from _kept(source, missing, args.num_layers, say)

    say("writing safetensors")
    target = pathlib.Path(job["target"])
    publish.write(
        named(), target, hf_checkpoint=job["hf"], version=f"v{iteration:06d}", step=iteration, run=job["load"]
    )


_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Of safetensors. Quantised weights are written in the config's dtype."""


def _dtypes(folder: pathlib.Path) -> dict[str, str]:
    """The dtype of every tensor that the model came with: a router's bias may be float32 in a bfloat16 model."""
    from safetensors import safe_open

    out = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="numpy") as file:
            out |= {name: file.get_slice(name).get_dtype() for name in file.keys()}
    return out


def _kept(source: pathlib.Path, missing: set[str], layers: int, say: Say) -> Iterator[tuple[str, Any]]:
    """Tensors of the model's origin that Megatron's model has no place for and that are still right, unchanged.

    These are the layers that predict further tokens, which are not trained. Raises DataError when others are missing,
    but for what
    can be computed anew: rotary frequencies, scales of weights that were quantised, a tied output weight.
    """
    from safetensors import safe_open

    further = {name for name in missing if tensors.further(name, layers)}
    lost = sorted(name for name in missing - further if not tensors.computed(name) and not name.endswith("_scale_inv"))
    if lost:
        what = f"Megatron's model has no place for {len(lost)} tensors, the first: {lost[0]}"
        raise DataError(f"{source}: {what}", "this variant of the architecture is not supported")
    if any(name.endswith("_scale_inv") for name in further):
        say("the quantised layers that predict further tokens are left out")
    elif further:
        say(f"{len(further)} tensors of layers that predict further tokens are those of {source}")
        for path in sorted(source.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                for name in sorted(further & set(file.keys())):
                    yield name, file.get_tensor(name)


if __name__ == "__main__":
    main()
