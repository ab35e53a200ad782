"""One rank of a conversion: ``python -m slime_cli.cluster.conversion_rank FOLDER OWNER``, started by
:mod:`.conversion`.

Reads ``FOLDER/job.json``; rank 0 appends what it does to ``FOLDER/phases``; an error meant for the user goes to
``FOLDER/RANK.error.json``. Ends when its owner does.
"""

import json
import logging
import os
import pathlib
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from slime_cli import disk
from slime_cli.convert.convert import Say
from slime_cli.errors import SlimeError
from slime_cli.processes import die_with

Job = dict[str, Any]


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    owner = int(sys.argv[2])
    die_with(owner)
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


def convert(job: Job, rank: int, say: Say) -> None:
    works = {"hf_to_dist": to_dist, "dist_to_hf": to_hf, "dist_to_adapter": to_adapter}
    with_model(job, rank, say, works[job["kind"]])


def with_model(job: Job, rank: int, say: Say, work: Callable[..., None]) -> None:
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
    import msgspec
    from megatron.core.enums import ModelType
    from megatron.training.training import get_model

    from slime_cli import manifests
    from slime_cli.training.network import lora, megatron
    from slime_cli.training.network.model import provider
    from slime_cli.weights.bridge import Bridge

    base = megatron.always(device, job["argv"])
    args = megatron.parse(argv(base, job), rank, job["tensor"] * job["pipeline"] * job["expert"])
    megatron.initialise(args, device)
    megatron.begin_phase(args)
    say("building the model, importing megatron-bridge")
    adapter = msgspec.convert(job.get("adapter"), manifests.Adapter | None)
    model = get_model(lora.of(provider, adapter), ModelType.encoder_or_decoder, wrap_with_ddp=False)
    bridge = Bridge(job["hf"], args.params_dtype)
    with torch.no_grad():
        work(job, args, model, bridge, say)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def argv(base: list[str], job: Job) -> list[str]:
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


def to_dist(job: Job, args: Any, model: list[Any], bridge: Any, say: Say) -> None:
    import msgspec

    from slime_cli import manifests
    from slime_cli.training.network import checkpoint

    say(f"reading the weights of {job['hf']}")
    bridge.load(model)
    say("writing the torch_dist checkpoint")
    manifest = msgspec.convert(job["manifest"], manifests.Checkpoint)
    checkpoint.save(args, job["target"], 0, model, None, None, manifest)


def to_hf(job: Job, args: Any, model: list[Any], bridge: Any, say: Say) -> None:
    import torch

    from slime_cli.convert import origin
    from slime_cli.manifests import layout
    from slime_cli.training.network import checkpoint
    from slime_cli.weights import publish

    if job["adapter"]:
        say(f"reading the base of its adapter, {job['hf']}")
        bridge.load(model)
    say(f"reading {job['load']}")
    iteration = checkpoint.load(args, job["load"], model, None, None, weights_only=True)
    source = pathlib.Path(job["hf"])
    dtypes = origin.dtypes(source)

    def named() -> Iterator[tuple[str, torch.Tensor]]:
        missing = set(dtypes)
        copied: set[str] = set()
        for name, tensor in bridge.export(model):
            repeated = origin.copies(name, missing, args.num_layers)  # some bridges know them, and give them too
            for same in (name, *repeated) if name not in copied else ():
                missing.discard(same)
                dtype = str(_DTYPES.get(dtypes.get(same, ""), job["hf_dtype"]))
                yield same, tensor.to(getattr(torch, dtype))
            copied.update(repeated)
        yield from origin.kept(source, missing, args.num_layers, say)

    say("writing safetensors")
    target = pathlib.Path(job["target"])
    publish.write(
        named(),
        target,
        hf_checkpoint=job["hf"],
        version=layout.version_name(iteration),
        step=iteration,
        run=job["load"],
    )


def to_adapter(job: Job, args: Any, model: list[Any], bridge: Any, say: Say) -> None:
    import msgspec

    from slime_cli import manifests
    from slime_cli.training.network import checkpoint
    from slime_cli.weights import peft

    say(f"reading {job['load']}")
    checkpoint.load(args, job["load"], model, None, None, weights_only=True)
    say("writing the adapter")
    adapter = msgspec.convert(job["adapter"], manifests.Adapter)
    peft.write(bridge.export_adapter(model), pathlib.Path(job["target"]), adapter, job["hf"])


_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Safetensors' names, and torch's. Quantised weights are written in the config's dtype."""


if __name__ == "__main__":
    main()
