"""One trainer rank as a Ray actor: Megatron's trainer with loading, saving and publishing of weights.

Torch and Megatron are imported in the actor's process only. :class:`slime_cli.cluster.learner.Learner` calls every
method on all ranks at once.
"""

import argparse
import logging
import os
import pathlib
import shutil
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from slime_cli import disk, manifests, processes
from slime_cli.buffer.columns import TrainBatch
from slime_cli.cluster.learner import Begun, Trained
from slime_cli.hardware import peak
from slime_cli.manifests import layout
from slime_cli.training.settings import Settings
from slime_cli.weights.transport import Asked, Part, Sending, Writing

if TYPE_CHECKING:
    import torch

    from slime_cli.training.network.residence import Residence
    from slime_cli.training.trainer import Trainer
    from slime_cli.weights.sending import Sender
    from slime_cli.weights.tensor_sums import Summing

WEIGHTS = ("weights",)


class TrainerRank:
    """Wrapped by ``ray.remote`` in :mod:`slime_cli.cluster.cluster`; also usable directly, as tests do."""

    trainer: "Trainer"
    """The phase's, from :meth:`begin` on."""
    residence: "Residence"
    """The phase's too."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        run_dir: str,
        trace: bool,
        working_directory: str,
        environment: dict[str, str] | None = None,
    ) -> None:
        processes.enter(working_directory)
        os.environ.update(environment or {})
        warnings.filterwarnings("ignore")
        logging.getLogger().setLevel(logging.ERROR)
        from slime_cli.hardware import device as hardware
        from slime_cli.tracing.spans import Tracer

        self.rank = rank
        self.world_size = world_size
        self.run_dir = run_dir
        self.device = hardware.prepare_trainer()
        from slime_cli.training import trainer  # noqa: F401  (the slow import, while the engines start as well)
        from slime_cli.weights.base import Base

        for name in list(logging.root.manager.loggerDict):
            if name.startswith(("megatron", "transformers")):
                logging.getLogger(name).setLevel(logging.ERROR)
        self.tracer = Tracer(run_dir, f"trainer-{rank}", enabled=trace)
        peak.begin()
        self.saving_to = run_dir
        self.published = Base()
        self.sender: Sender | None = None
        self.summed: tuple[Asked, Summing] | None = None
        """Sums of the tensors that were sent last."""

    def address(self) -> tuple[str, int]:
        """Where rank 0 waits for the others."""
        import ray

        from slime_cli.addresses import LOOPBACK, free_port

        host = ray.util.get_node_ip_address() if self.world_size > 1 and os.environ.get("RAY_ADDRESS") else LOOPBACK
        return host, free_port(host)

    def begin(
        self,
        argv: list[str],
        settings: Settings,
        hf_checkpoint: str,
        critic_argv: list[str] | None,
        master: tuple[str, int],
    ) -> Begun:
        """Model, optimizer and scheduler of a phase, with the weights of ``hf_checkpoint``. ``critic_argv``: the
        critic's options. ``master``: rank 0's :meth:`address`."""
        import torch

        from slime_cli.hardware import kernels, transformer_engine
        from slime_cli.training.network import megatron
        from slime_cli.training.network.residence import Residence
        from slime_cli.training.trainer import Trainer
        from slime_cli.weights.bridge import Bridge

        def parsed(given: list[str]) -> argparse.Namespace:
            return megatron.parse(megatron.always(self.device, given) + given, self.rank, self.world_size)

        if self.device.kind == "cpu":
            # A core is left to engines that work meanwhile: threads that must wait for each other crawl as soon as a
            # core is shared.
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // (self.world_size + (not settings.alone))))
        args = parsed(argv)
        critic_args = None if critic_argv is None else parsed(critic_argv)
        if not torch.distributed.is_initialized():
            os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = master[0], str(master[1])
            megatron.initialise(args, self.device)
        for name in ("trainer", "residence"):
            vars(self).pop(name, None)  # frees the phase before
        processes.spare_libraries()
        hooks = self._hooks(settings)
        if "megatron_init" in hooks:
            hooks["megatron_init"](args)
        self.trainer = Trainer(args, settings, self.tracer, hooks, critic_args)
        self.hf_checkpoint = hf_checkpoint
        self.bridge = Bridge(hf_checkpoint, args.params_dtype)
        self.bridge.load(self.trainer.policy.model)
        self.trainer.begin()
        self.residence = Residence(filter(None, (self.trainer.policy, self.trainer.critic)))
        return Begun(
            parameters=sum(p.numel() for module in self.trainer.policy.model for p in module.parameters()),
            device=self.device.name,
            warning=transformer_engine.problem(self.device.kind) or "",
            kernels=kernels.found(),
        )

    def _hooks(self, settings: Settings) -> dict[str, Any]:
        """The users' functions that the settings name, by kind."""
        from slime_cli.hooks.kinds import Hook
        from slime_cli.hooks.table import KINDS

        paths = {kind: getattr(settings, found.option, None) for kind, found in KINDS.items()}
        return {kind: Hook.load(path, kind) for kind, path in paths.items() if path}

    def load(self, path: str, weights_only: bool) -> int:
        """A torch_dist checkpoint over what :meth:`begin` loaded; the trainer's step."""
        from slime_cli.models import lora

        self.residence.require("loading")
        lora.require(pathlib.Path(path), self.trainer.settings.adapter, self.hf_checkpoint)
        with self.tracer.span("load_checkpoint"):
            return self.trainer.load(path, weights_only=weights_only)

    def load_published(self, folder: str) -> None:
        """The weights of a published version, an HF folder, into the policy; the optimizer does not hear of them."""
        from slime_cli.weights.bridge import Bridge

        self.residence.require("loading", WEIGHTS)
        with self.tracer.span("load_published"):
            Bridge(folder, self.trainer.args.params_dtype).load(self.trainer.policy.model)
        self.trainer.step = manifests.read(pathlib.Path(folder) / layout.MANIFEST, manifests.Weights).training_step

    def keep(self, name: str, path: str | None = None) -> None:
        self.residence.require(f"keeping {name}", WEIGHTS)
        self.trainer.keep(name, path)

    def offload(self, parts: Sequence[str]) -> None:
        """Parts of :data:`slime_cli.training.network.residence.PARTS` leave the device's memory."""
        if self.sender is not None and "weights" in parts:
            self.sender.free()
        with self.tracer.span("offload", parts=list(parts)) as about:
            about["bytes"] = self.residence.offload(parts)
            about["held_bytes"] = peak.held()

    def onload(self, parts: Sequence[str]) -> None:
        with self.tracer.span("onload", parts=list(parts)):
            self.residence.onload(parts)

    def train(self, batch: TrainBatch) -> Trained | None:
        """On the one rank that reports: the step and the rollout's metrics."""
        from slime_cli.hooks.kinds import users_named

        self.residence.require("training")
        with self.tracer.span("train"), users_named("what a function of yours made"):
            metrics = self.trainer.train(batch)
        return None if metrics is None else Trained(self.trainer.step, metrics)

    def save(self, root: str) -> str:
        """Saves and returns the folder. Durable when every rank has returned, with ``--async-save`` when :meth:`saved`
        says so."""
        import msgspec

        from slime_cli.models.describe import checkpoint_manifest

        self.residence.require("saving")
        t = self.trainer
        layout = {
            "tensor": t.args.tensor_model_parallel_size,
            "pipeline": t.args.pipeline_model_parallel_size,
            "data": t.args.data_parallel_size,
            "context": t.args.context_parallel_size,
            "expert": t.args.expert_model_parallel_size,
        }
        dtype = str(t.args.params_dtype).removeprefix("torch.")
        manifest = checkpoint_manifest(self.hf_checkpoint, iteration=t.step, dtype=dtype, layout=layout)
        manifest = msgspec.structs.replace(manifest, adapter=t.settings.adapter)
        if depths := t.args.mtp_num_layers:
            manifest.megatron_args["mtp_num_layers"] = depths
        self.saving_to = root
        with disk.naming(root), self.tracer.span("save_checkpoint"):
            return str(t.save(root, manifest))

    def saved(self, wait: bool) -> bool:
        """Whether what was saved is durable on every rank; it can be waited for."""
        with disk.naming(self.saving_to), self.tracer.span("wait_for_checkpoint"):
            return self.trainer.saved(wait)

    def remove(self, paths: list[str]) -> None:
        """Removes checkpoints with their critics'. Rank 0 alone is asked."""
        for path in paths:
            for folder in (path, layout.critic(path)):
                shutil.rmtree(folder, ignore_errors=True)

    def prepare(self, target: str, how: Writing) -> None:
        """An empty folder for a version. Rank 0 alone is asked."""
        from slime_cli.weights import publish

        with disk.naming(target):
            alone = how.base is not None or how.encoding == "adapter"
            publish.prepare(pathlib.Path(target), self.hf_checkpoint, delta=alone)

    def publish(self, target: str, how: Writing) -> Part:
        """Writes this rank's share of the present weights, or of what has changed in them, in the format of the HF
        checkpoint; all ranks gather."""
        from slime_cli.weights import publish, quantised

        folder = pathlib.Path(target)
        prefix = f"{self.rank:05d}-" if self.world_size > 1 else ""
        self.residence.require("publishing", WEIGHTS)
        with disk.naming(target), self.tracer.span("export") as about, peak.during(about):
            if how.encoding == "adapter":
                return self._adapter(folder)
            form = quantised.publishing(self.hf_checkpoint)
            # What is converted is converted where the weights are.
            exported = self.bridge.export(self.trainer.policy.model, cpu=form is None or self.device.kind == "cpu")
            named = publish.owned(exported, self.rank, self.world_size)
            return self.published.write(named if form is None else form.through(named), folder, prefix, how)

    def _adapter(self, folder: pathlib.Path) -> Part:
        """The LoRA adapter, which rank 0 writes for all, and what this rank computes of its probe."""
        from slime_cli.weights import peft

        adapter = self.trainer.settings.adapter
        assert adapter is not None
        named = list(self.bridge.export_adapter(self.trainer.policy.model))
        tensors = {} if self.rank else peft.write(named, folder, adapter, self.hf_checkpoint)
        return Part(tensors, log_probs=self.trainer.log_probs(self._probe()))

    def _probe(self) -> list[int]:
        from slime_cli.weights import peft

        args, cap = self.trainer.args, self.trainer.settings.max_tokens
        longest = min(args.max_position_embeddings, cap or args.max_position_embeddings)
        return peft.probe(args.padded_vocab_size, longest - 1)  # an engine answers with one more

    def device_name(self) -> str:
        """MACHINE/GPU, with nothing behind the stroke on a CPU."""
        from slime_cli.hardware import device as hardware

        device = self._torch_device()
        gpu = ""
        if device.type == "cuda":
            import torch

            gpu = hardware.gpu_name(str(torch.cuda.get_device_properties(device).uuid))
        return f"{os.uname().nodename}/{gpu}"

    def send(self, how: Sending) -> dict[str, str]:
        """The present weights into engines; all ranks gather, rank 0 answers who does not have all of them."""
        from slime_cli.weights.sending import Sender

        with self.tracer.span("send"):
            self.sender = self.sender or Sender(self.rank, self._torch_device())
            parameters = (p.nbytes for module in self.trainer.policy.model for p in module.parameters())
            named = self._present(how.step)
            if how.asked is not None:
                self.summed = how.asked, self._summing(how.asked)
                named = self.summed[1].through(named)
            return self.sender.send(named, how, 2 * self.world_size * sum(parameters))

    def sums(self, asked: Asked) -> dict[str, list[frozenset[str]]]:
        """This rank's share of the sums; all ranks gather. Those of the tensors that were just sent are there."""
        with self.tracer.span("sums"):
            known, self.summed = self.summed, None
            if known is not None and known[0] == asked:
                return known[1].result()
            return self._summing(asked).all(self._present(asked.step))

    def _summing(self, asked: Asked) -> "Summing":
        from slime_cli.weights import sums
        from slime_cli.weights.tensor_sums import Summing

        names = asked.names[self.rank :: self.world_size]
        return Summing(names, asked.dtype, sums.NAMES[asked.function], asked.ranks)

    def part(self) -> None:
        """Leaves the group with engines. Rank 0 alone is asked."""
        if self.sender is not None:
            self.sender.part()

    def _present(self, step: int) -> Iterator["tuple[str, torch.Tensor]"]:
        """The policy's weights, on this rank's device. Raises EngineError when they are not those of ``step``."""
        from slime_cli.errors import EngineError

        self.residence.require("sending", WEIGHTS)
        if self.trainer.step != step:
            raise EngineError(f"the trainer is at step {self.trainer.step}, not {step}", "this is a defect: report it")
        return self.bridge.export(self.trainer.policy.model, cpu=self.device.kind == "cpu")

    def _torch_device(self) -> "torch.device":
        import torch

        return torch.device("cuda", torch.cuda.current_device()) if self.device.kind == "cuda" else torch.device("cpu")

    def seal(self, target: str, version: str, how: Writing, parts: list[Part]) -> int:
        """The manifest over the parts of all ranks; the bytes of all. Rank 0 alone is asked."""
        import msgspec

        from slime_cli.weights import peft, publish

        folder = pathlib.Path(target)
        manifest = msgspec.structs.replace(
            publish.described(version, self.trainer.step, self.run_dir),
            base=how.base,
            base_digest=how.base_digest,
            encoding=how.encoding,
        )
        with disk.naming(target):
            if how.encoding == "adapter":
                peft.seal(folder, parts, self._probe(), manifest)
            else:
                publish.seal(folder, parts, manifest)
        return sum(file.stat().st_size for pattern in ("*.safetensors", "*.patch") for file in folder.glob(pattern))
