"""The gradient of every parameter of some families, in every layout, against float64 autograd over transformers. Runs
in ``layout_worker.py``, beside ``layout_cases.py``."""

import collections
import pathlib

import msgspec
import numpy as np
import torch
import transformers
from safetensors.torch import load_file

from layout_cases import MANIFEST, RECOMPUTE, SMALL, VOCABULARY, Session, global_batch, response_logits, rows
from layout_launch import OF_EXPERTS
from mtp_cases import MTP
from slime_cli.training.settings import Settings

SHAPE = dict(
    vocab_size=VOCABULARY,
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=1,
    pad_token_id=None,
)
DELTA = dict(
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    linear_num_key_heads=4,
    linear_num_value_heads=8,
    rms_norm_eps=0.1,  # the norm behind the delta rule would else magnify roundings where that is near 0
)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=24)
MODELS = {
    "Qwen3.5": ("Qwen3_5", "Qwen3_5Text", SHAPE | DELTA),
    "Qwen3-Next": ("Qwen3Next", "Qwen3Next", SHAPE | DELTA | EXPERTS),
    "GLM-4": ("Glm4", "Glm4", SHAPE),
    "MiniMax-M2": (
        "MiniMaxM2",
        "MiniMaxM2",
        SHAPE
        | dict(num_local_experts=4, num_experts_per_tok=2, intermediate_size=24, rotary_dim=8)
        | dict(rope_parameters={"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5}),
    ),
}
"""Family -> prefixes of transformers' model and config, fields of the config."""
WITH_EXPERTS = ("Qwen3-Next", "MiniMax-M2")
"""What layouts of experts run."""


def make(folder: pathlib.Path) -> dict:
    for seed, (family, (prefix, config, fields)) in enumerate(MODELS.items()):
        torch.manual_seed(60 + seed)
        model = getattr(transformers, f"{prefix}ForCausalLM")(getattr(transformers, f"{config}Config")(**fields))
        with torch.no_grad():
            for key, tensor in [*model.float().named_parameters(), *model.named_buffers()]:
                if not key.endswith("inv_freq"):
                    around_one = "norm" in key and ("linear_num_key_heads" not in fields or "linear_attn" in key)
                    tensor.normal_(mean=float(around_one), std=0.2 if tensor.dim() < 2 or "gate.weight" in key else 0.1)
        model.save_pretrained(folder / family)
        torch.save(gradients_in_float64(folder / family, prefix), folder / family / "gradients.pt")
    return {}


def gradients_in_float64(folder: pathlib.Path, prefix: str) -> dict[str, torch.Tensor]:
    """Of the supervised loss of the batch, by the names in the checkpoint's file."""
    kind = getattr(transformers, f"{prefix}ForCausalLM")
    model = kind.from_pretrained(folder, attn_implementation="eager", experts_implementation="eager").double()
    batch = global_batch()
    owners = np.repeat(batch.sample_index_N, batch.response_lengths_N)
    trained = collections.Counter(owners[batch.loss_mask_R == 1].tolist())
    total = torch.zeros((), dtype=torch.float64)
    for row, trajectory in zip(rows(batch), batch.sample_index_N.tolist()):
        if row["mask"].any():
            targets = row["tokens"][len(row["tokens"]) - row["response"] :]
            log_p = response_logits(model, row).log_softmax(-1).gather(1, targets[:, None])[:, 0]
            total = total - log_p[row["mask"]].sum() / (trained[trajectory] * len(batch))
    total.backward()
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    model.save_pretrained(folder / "gradients")  # under the names that checkpoints have
    files = (folder / "gradients").glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def gradients(session: Session) -> dict[str, dict[str, float]]:
    """Each parameter's largest difference from float64, relative to the largest entry of its gradient."""
    out = {}
    settings = Settings(loss_type="sft_loss", max_tokens=SMALL)
    for family in WITH_EXPERTS if session.layout in OF_EXPERTS else MODELS:
        trainer = session.trainer(family, settings, RECOMPUTE if session.layout == "dp2" else [])
        batch = global_batch()
        parts, _ = trainer._parts(batch)
        head, loss = trainer._objective()
        trainer.policy.backward(parts[0], head, lambda mb, out, loss=loss: (loss(settings, mb, out)[0], {}))
        for module in trainer.policy.model:  # weights become gradients, which the bridge names and gathers
            for parameter in module.parameters():
                parameter.data.copy_(parameter.main_grad)
        want = torch.load(session.folder / family / "gradients.pt")
        got = dict(session.bridge(family).export(trainer.policy.model))
        out[family] = {
            name: float((got[name] - g).abs().max() / g.abs().max()) if g.any() else float(got[name].abs().max())
            for name, g in want.items()
            if not name.endswith("e_score_correction_bias")
        }
    return out


def resumed(session: Session) -> dict[str, list[str]]:
    """Parameters that a run which was resumed from its first step's checkpoint has otherwise than one that was not."""
    out = {}
    for family in (*MODELS, "mimo"):
        mtp = family == "mimo"
        settings = Settings(loss_type="sft_loss", max_tokens=SMALL, enable_mtp_training=mtp)
        trainer = session.trainer(family, settings, MTP if mtp else [])
        trainer.train(global_batch())
        told = msgspec.structs.replace(MANIFEST, megatron_args={"mtp_num_layers": 2} if mtp else {})
        path = trainer.save(str(session.folder / f"{family}-{session.layout}"), told)
        trainer.train(global_batch())
        other = session.trainer(family, settings, MTP if mtp else [], load=False)
        other.load(str(path), weights_only=False)
        other.train(global_batch())
        got = dict(other.policy.parameters())
        out[family] = sorted(name for name, tensor in trainer.policy.parameters() if not tensor.equal(got[name]))
    return out
