"""LoRA adapters in a layout: gradients, steps, merged weights, checkpoints. Runs in ``layout_worker.py``, on every
rank, in ``single`` first, whose results the others compare theirs with.

The adapters are filled with numbers of a generator, layer by layer, so that every layout has the same ones, B is not
zero, and what a layout shares wrongly shows.
"""

import collections
import dataclasses
import zlib
from typing import Any

import msgspec
import numpy as np
import torch
from megatron.core import dist_checkpointing, mpu
from megatron.core.utils import unwrap_model
from safetensors.torch import load_file, save_file
from transformers import Qwen3ForCausalLM

from layout_cases import (
    GRPO,
    MANIFEST,
    VOCABULARY,
    Session,
    differing,
    global_batch,
    logits_gap,
    response_logits,
    rows,
    weights,
)
from slime_cli import manifests
from slime_cli.manifests import layout
from slime_cli.training.network import checkpoint
from slime_cli.training.settings import Settings
from slime_cli.training.trainer import Trainer
from slime_cli.weights import peft

ADAPTER = manifests.Adapter(
    rank=4, alpha=6, dropout=0.0, modules=["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
)
SUPERVISED = Settings(loss_type="sft_loss", max_tokens=1024, adapter=ADAPTER)
POLICY = dataclasses.replace(GRPO, adapter=ADAPTER)
NO_CLIP = ["--clip-grad", "0"]


def everything(session: Session) -> dict[str, Any]:
    out = {"trained": trained(session), "steps": steps(session), "resumed": resumed(session)}
    if session.layout != "dp2_distributed":  # whose ranks have a part of each gradient
        out["gradients"] = gradients(session)
    return out


def _trainer(session: Session, settings: Settings, flags: list[str] | None = None) -> Trainer:
    trainer = session.trainer("untied", settings, flags or [])
    ranks, rank = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
    for chunk in trainer.policy.model:
        for layer in unwrap_model(chunk).decoder.layers:
            for name, parameter in layer.named_parameters():
                if ".adapter." not in name:
                    continue
                axis = parameter.partition_dim
                shape = list(parameter.shape)
                shape[axis] *= ranks
                generator = torch.Generator().manual_seed(zlib.crc32(f"{layer.layer_number} {name}".encode()))
                whole = torch.randn(shape, generator=generator) * 0.1
                parts = whole.chunk(2) if name.endswith("linear_fc1.adapter.linear_out.weight") else [whole]
                own = [part.chunk(ranks, axis)[rank] for part in parts]  # ranks share gate and up each
                parameter.data.copy_(torch.cat(own))
    trainer.begin()
    return trainer


def _adapters(session: Session, trainer: Trainer) -> dict[str, torch.Tensor]:
    found = session.bridge("untied").export_adapter(trainer.policy.model)
    return {name: tensor.detach().clone() for name, tensor in found}


def trained(session: Session) -> dict[str, Any]:
    """What one rollout moves, and what the optimizer has."""
    trainer = _trainer(session, POLICY)
    before = weights(trainer)
    trainer.train(global_batch())
    moved = [name for name, tensor in trainer.policy.parameters() if (before[name] != tensor).any()]
    whole = sum(tensor.numel() for name, tensor in before.items() if ".adapter." in name)
    held = [inner.optimizer.param_groups for inner in checkpoint.inner_optimizers(trainer.policy.optimizer)]
    optimized = sum(p.numel() for groups in held for group in groups for p in group["params"])
    return {
        "base_moved": [name for name in moved if ".adapter." not in name],
        "adapters": sum(".adapter." in name for name in before),
        "adapters_moved": sum(".adapter." in name for name in moved),
        "of_adapters": whole,
        "optimized": optimized,
    }


def gradients(session: Session) -> dict[str, float]:
    """The largest difference of a gradient's entry, relative to the largest entry: against float64 in ``single``, and
    against ``single`` elsewhere."""
    trainer = _trainer(session, SUPERVISED, NO_CLIP)
    at = _adapters(session, trainer)
    trainer.train(global_batch())
    for module in trainer.policy.model:
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.data.copy_(parameter.main_grad)
    got = _adapters(session, trainer)
    kept = session.folder / "lora.gradients"
    if session.layout == "single":
        torch.save(got, kept)
        want = _in_float64(session, at)
    else:
        want = torch.load(kept)
    assert got.keys() == want.keys()
    return {
        kind: max(
            float((got[name].double() - want[name]).abs().max() / want[name].abs().max())
            for name in want
            if kind in name
        )
        for kind in ("lora_A", "lora_B")
    }


FUSED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "fc1", "up_proj": "fc1"}
"""Projections that share one A."""


def _in_float64(session: Session, at: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The gradient of the supervised loss at these adapters, with transformers and autograd, a sequence at a time."""
    path = session.folder / "untied"
    model = Qwen3ForCausalLM.from_pretrained(path, attn_implementation="eager").double().requires_grad_(False)
    leaves = {name: tensor.double().requires_grad_() for name, tensor in at.items()}
    merged = {}
    for name in leaves:
        if name.endswith(".lora_B.weight"):
            module = name.removesuffix(".lora_B.weight")
            weight = model.get_parameter(f"{module}.weight")
            scaled = ADAPTER.alpha / ADAPTER.rank * leaves[name] @ leaves[f"{module}.lora_A.weight"]
            merged[f"{module}.weight"] = weight + scaled
    batch = global_batch()
    mask = batch.loss_mask_R == 1
    counted = collections.Counter(np.repeat(batch.sample_index_N, batch.response_lengths_N)[mask].tolist())

    def forward(tokens: torch.Tensor) -> Any:
        return torch.func.functional_call(model, merged, (tokens,))

    total: Any = 0.0
    for row, sample in zip(rows(batch), batch.sample_index_N.tolist(), strict=True):
        targets = row["tokens"][len(row["tokens"]) - row["response"] :]
        log_p = response_logits(forward, row).log_softmax(-1).gather(1, targets[:, None])[:, 0]
        if row["mask"].any():
            total = total - log_p[row["mask"]].sum() / (counted[sample] * len(batch))
    total.backward()
    found = {name: leaf.grad for name, leaf in leaves.items()}
    sums: dict[str, torch.Tensor] = {}
    for name in [name for name in found if "lora_A" in name]:
        module, last = name.removesuffix(".lora_A.weight").rsplit(".", 1)
        key = f"{module}.{FUSED.get(last, last)}"
        sums[key] = sums.get(key, 0) + found[name]
    for name in [name for name in found if "lora_A" in name]:
        module, last = name.removesuffix(".lora_A.weight").rsplit(".", 1)
        found[name] = sums[f"{module}.{FUSED.get(last, last)}"]
    return found


def steps(session: Session) -> dict[str, Any]:
    """Two rollouts of GRPO with the base for a reference; then logits with the adapter against those of the merged
    weights in transformers, and the merged weights against those of ``single``."""
    trainer = _trainer(session, dataclasses.replace(POLICY, use_kl_loss=False))
    metrics = [trainer.train(global_batch()) for _ in range(2)]
    merged = {name: tensor.clone() for name, tensor in session.bridge("untied").export(trainer.policy.model)}
    kept = session.folder / "lora.merged"
    if session.layout == "single":
        save_file(merged, kept)
    folder = session.folder / f"lora.{session.layout}.{session.rank}"
    folder.mkdir()
    model = Qwen3ForCausalLM.from_pretrained(session.folder / "untied", attn_implementation="eager")
    model.load_state_dict(merged)
    with torch.no_grad():
        torch.save(torch.cat([response_logits(model, row) for row in rows(global_batch())]), folder / "untied.logits")
        tokens = peft.probe(VOCABULARY, 48)
        log_p = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
        want = log_p.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()
    probed = trainer.log_probs(tokens)
    single = load_file(kept)
    return {
        "metrics": metrics,
        "probed": sorted(probed),
        "probe": max((abs(value - want[place - 1]) for place, value in probed.items()), default=0.0),
        "logits": logits_gap(dataclasses.replace(session, folder=folder), trainer, "untied"),
        "merged": max(float((merged[name] - single[name]).abs().max()) for name in single),
    }


def resumed(session: Session) -> dict[str, Any]:
    """A checkpoint of two rollouts: what is in it, and two more rollouts from it against going on."""
    trainer = _trainer(session, POLICY)
    trainer.policy.keep("reference")
    for _ in range(2):
        trainer.train(global_batch())
    root = session.folder / f"{session.layout}_lora"
    trainer.save(str(root), msgspec.structs.replace(MANIFEST, adapter=ADAPTER))
    at_two = weights(trainer)
    on = [trainer.train(global_batch()) for _ in range(2)]
    again = _trainer(session, POLICY)
    again.policy.keep("reference")
    again.load(str(layout.checkpoint(root, 2)), weights_only=False)
    out = {"differing_at_two": differing(at_two, weights(again))}
    out["metrics_equal"] = [again.train(global_batch()) for _ in range(2)] == on
    out["differing_at_four"] = differing(weights(trainer), weights(again))
    keys = dist_checkpointing.load_tensors_metadata(str(layout.checkpoint(root, 2)))
    out["others"] = sorted(key for key in keys if ".adapter." not in key and "rng" not in key)
    out["elsewhere"] = _elsewhere(session, trainer)
    out["kept"] = sorted({".adapter." in name for name in trainer.policy._kept["reference"]})
    return out


def _elsewhere(session: Session, trainer: Trainer) -> float:
    """The checkpoint of ``single`` loaded here: the largest difference of its adapters from that one's."""
    kept = session.folder / "lora.adapters"
    if session.layout == "single":
        trainer.load(str(layout.checkpoint(session.folder / "single_lora", 2)), weights_only=True)
        torch.save(_adapters(session, trainer), kept)
    want = torch.load(kept)
    other = _trainer(session, POLICY)
    other.load(str(layout.checkpoint(session.folder / "single_lora", 2)), weights_only=True)
    got = _adapters(session, other)
    return max(float((got[name] - want[name]).abs().max()) for name in want)
