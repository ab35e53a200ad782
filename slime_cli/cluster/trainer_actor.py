"""One trainer rank as a Ray actor: Megatron's trainer with loading, saving and publishing of weights.

Torch and Megatron are imported in the actor's process only. Every method is called on all ranks at once.
"""

import os
import pathlib
from typing import Any


class TrainerRank:
    """Wrapped by ``ray.remote`` in :mod:`slime_cli.cluster.cluster`; also usable directly, as tests do."""

    def __init__(self, rank: int, world_size: int, run_dir: str, trace: bool):
        import logging
        import warnings

        warnings.filterwarnings("ignore")
        logging.getLogger().setLevel(logging.ERROR)
        import torch

        from slime_cli.hardware import device as hardware
        from slime_cli.tracing.spans import Tracer

        self.rank, self.world_size, self.run_dir = rank, world_size, run_dir
        self.device = hardware.prepare_trainer()
        if self.device.kind == "cpu":
            # A core is left to the engines: threads that must wait for each other crawl as soon as a core is shared.
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // (world_size + 1)))
        from slime_cli.training import trainer  # noqa: F401  (the slow import, while the engines start as well)

        for name in list(logging.root.manager.loggerDict):
            if name.startswith(("megatron", "transformers")):
                logging.getLogger(name).setLevel(logging.ERROR)
        self.tracer = Tracer(run_dir, f"trainer-{rank}", enabled=trace)
        self.trainer = None

    def address(self) -> tuple[str, int]:
        """Where rank 0 waits for the others."""
        import ray

        from slime_cli.serving.process import free_port

        host = ray.util.get_node_ip_address() if self.world_size > 1 and os.environ.get("RAY_ADDRESS") else "127.0.0.1"
        return host, free_port()

    def begin_stage(self, argv: list[str], settings, hf_checkpoint: str, master: tuple[str, int]) -> dict[str, Any]:
        """Model, optimizer and scheduler of a stage, with the weights of ``hf_checkpoint``."""
        import torch

        from slime_cli.training import megatron
        from slime_cli.training.model import has_transformer_engine
        from slime_cli.training.trainer import Trainer
        from slime_cli.weights.bridge import Bridge

        argv = megatron.always(self.device, transformer_engine=has_transformer_engine()) + argv
        args = megatron.parse(argv, self.rank, self.world_size)
        if not torch.distributed.is_initialized():
            os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = master[0], str(master[1])
            megatron.initialise(args, self.device)
        self.trainer = None  # frees the stage before
        self.trainer = Trainer(args, settings, self.tracer)
        self.hf_checkpoint = hf_checkpoint
        self.bridge = Bridge(hf_checkpoint, args.params_dtype)
        self.bridge.load(self.trainer.model)
        self.trainer.optimizer.reload_model_params()
        return {"parameters": sum(t.numel() for _, t in self.trainer.parameters()), "device": self.device.name}

    def load(self, path: str, weights_only: bool) -> int:
        """A torch_dist checkpoint over what ``begin_stage`` loaded; the iteration it holds."""
        from slime_cli.training import checkpoint

        t = self.trainer
        with self.tracer.span("load_checkpoint"):
            iteration = checkpoint.load(t.args, path, t.model, t.optimizer, t.scheduler, weights_only=weights_only)
        t.step = 0 if weights_only else iteration
        return t.step

    def keep_reference(self) -> None:
        self.trainer.keep_reference()

    def train(self, batch) -> dict[str, float] | None:
        with self.tracer.span("train"):
            return self.trainer.train(batch)

    def save(self, root: str) -> str:
        """Saves and returns the folder. Durable when every rank has returned."""
        from slime_cli.training import checkpoint
        from slime_cli.weights.describe import checkpoint_manifest

        t = self.trainer
        layout = {
            "tensor": t.args.tensor_model_parallel_size, "pipeline": t.args.pipeline_model_parallel_size,
            "data": t.args.data_parallel_size, "context": t.args.context_parallel_size, "expert": t.args.expert_model_parallel_size,
        }  # fmt: skip
        dtype = str(t.args.params_dtype).removeprefix("torch.")
        manifest = checkpoint_manifest(self.hf_checkpoint, iteration=t.step, dtype=dtype, layout=layout)
        with self.tracer.span("save_checkpoint"):
            checkpoint.save(t.args, root, t.step, t.model, t.optimizer, t.scheduler, manifest)
        return str(checkpoint.folder(root, t.step))

    def prune(self, root: str, newest: int) -> None:
        from slime_cli.training import checkpoint

        if self.rank == 0:
            checkpoint.prune(root, newest)

    def publish(self, target: str, version: str) -> int:
        """Writes the present weights as a version (rank 0 writes, all ranks gather); bytes written."""
        from slime_cli.weights import publish

        named = self.bridge.export(self.trainer.model)
        with self.tracer.span("export"):
            if self.rank:
                for _ in named:
                    pass
                return 0
            folder = pathlib.Path(target)
            publish.write(named, folder, hf_checkpoint=self.hf_checkpoint, version=version, step=self.trainer.step, run=self.run_dir)
            return sum(f.stat().st_size for f in folder.glob("*.safetensors"))
