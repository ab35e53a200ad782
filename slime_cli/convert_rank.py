"""One rank of a conversion: ``python -m slime_cli.convert_rank FOLDER OWNER``, started by :mod:`slime_cli.weights.convert`.

Reads ``FOLDER/job.json``; rank 0 appends what it does to ``FOLDER/phases``; an error meant for the user goes to
``FOLDER/RANK.error.json``. Ends when its owner does.
"""

import ctypes
import json
import logging
import os
import pathlib
import signal
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from slime_cli.errors import SlimeError


def main() -> None:
    folder, owner = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != owner:
        sys.exit(1)
    rank = int(os.environ["RANK"])

    def say(text: str) -> None:
        if rank == 0:
            with open(folder / "phases", "a") as file:
                file.write(text + "\n")

    try:
        convert(json.loads((folder / "job.json").read_text()), rank, say)
    except SlimeError as error:
        told = {"kind": type(error).__name__, "message": error.message, "fix": error.fix}
        (folder / f"{rank}.error.json").write_text(json.dumps(told))
        sys.exit(error.exit_code)


def convert(job: dict[str, Any], rank: int, say: Callable[[str], None]) -> None:
    say("importing Megatron")
    warnings.filterwarnings("ignore")
    logging.getLogger().setLevel(logging.ERROR)
    import torch

    from slime_cli.hardware import device as hardware

    device = hardware.prepare_trainer()
    from megatron.core.enums import ModelType
    from megatron.training.training import get_model

    from slime_cli.training import megatron
    from slime_cli.training.model import has_transformer_engine, provider
    from slime_cli.weights.bridge import Bridge

    base = megatron.always(device, transformer_engine=has_transformer_engine())
    if job["dtype"] == "float32":
        base = [word for word in base if word != "--bf16"]
    layout = ["--tensor-model-parallel-size", str(job["tensor"]), "--pipeline-model-parallel-size", str(job["pipeline"])]
    weights = ["--global-batch-size", "1", "--no-save-optim", "--no-save-rng", "--no-load-optim", "--no-load-rng"]
    args = megatron.parse(base + job["argv"] + layout + weights, rank, job["tensor"] * job["pipeline"])
    megatron.initialise(args, device)
    megatron.begin_stage(args)
    say("building the model, importing megatron-bridge")
    model = get_model(provider, ModelType.encoder_or_decoder, wrap_with_ddp=False)
    bridge = Bridge(job["hf"], args.params_dtype)
    with torch.no_grad():
        (_to_dist if job["kind"] == "hf_to_dist" else _to_hf)(job, args, model, bridge, say)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _to_dist(job, args, model, bridge, say) -> None:
    import msgspec

    from slime_cli import manifests
    from slime_cli.training import checkpoint

    say(f"reading the weights of {job['hf']}")
    bridge.load(model)
    say("writing the torch_dist checkpoint")
    manifest = msgspec.convert(job["manifest"], manifests.Checkpoint)
    checkpoint.save(args, job["target"], 0, model, None, None, manifest)


def _to_hf(job, args, model, bridge, say) -> None:
    import torch

    from slime_cli.training import checkpoint
    from slime_cli.weights import publish

    say(f"reading {job['load']}")
    no_optimizer = types.SimpleNamespace(reload_model_params=lambda: None)
    iteration = checkpoint.load(args, job["load"], model, no_optimizer, None, weights_only=True)
    dtype = getattr(torch, job["hf_dtype"])

    def named() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in bridge.export(model):
            yield name, tensor.to(dtype)

    say("writing safetensors")
    target = pathlib.Path(job["target"])
    publish.write(named(), target, hf_checkpoint=job["hf"], version=f"v{iteration:06d}", step=iteration, run=job["load"])


if __name__ == "__main__":
    main()
