"""Multi-token prediction (MTP) in every layout, against float64 autograd over transformers' layers, and beside a policy
that trains without it. Runs in ``layout_worker.py``, beside ``layout_cases.py``."""

import dataclasses
import json
import pathlib

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm

from layout_cases import GRPO, RECOMPUTE, SMALL, VOCABULARY, Session, global_batch, rows
from layout_launch import MTP_EVERYWHERE
from slime_cli.training.settings import Settings
from slime_cli.training.trainer import Trainer

DEPTHS = 2
HIDDEN = 64
FACTOR = 0.3
MTP = ["--mtp-num-layers", str(DEPTHS), "--mtp-loss-scaling-factor", str(FACTOR)]
TRAINED = dataclasses.replace(GRPO, use_kl_loss=False, enable_mtp_training=True)
CASES = {
    "mtp": ("mimo", TRAINED, MTP, "batch"),
    "mtp_tied": ("mimo_tied", TRAINED, MTP, "batch"),
    "mtp_packed_small": ("mimo", dataclasses.replace(TRAINED, max_tokens=SMALL), MTP, "batch"),
    "mtp_recomputed": ("mimo", TRAINED, MTP + RECOMPUTE, "batch"),
    "mtp_sft": ("mimo", Settings(loss_type="sft_loss", max_tokens=1024, enable_mtp_training=True), MTP, "batch"),
    "no_mtp": ("mimo", dataclasses.replace(TRAINED, enable_mtp_training=False), MTP, "batch"),
}
"""As ``layout_cases.CASES``."""
PREFIX = "model.mtp_layers."


def make(folder: pathlib.Path) -> dict:
    """A MiMo with untied and with tied embeddings, and the losses and gradients of its MTP layers in float64."""
    for seed, (name, tied) in enumerate([("mimo", False), ("mimo_tied", True)]):
        config = Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            intermediate_size=96,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            tie_word_embeddings=tied,
            initializer_range=0.08,
            dtype="float32",
            eos_token_id=1,
            bos_token_id=None,
        )
        torch.manual_seed(40 + seed)
        model = Qwen2ForCausalLM(config)
        layers = {
            f"{PREFIX}{depth}.{key}": t for depth in range(DEPTHS) for key, t in Depth(config).state_dict().items()
        }
        with torch.no_grad():
            for key, tensor in [*model.named_parameters(), *layers.items()]:
                tensor.normal_(mean=float("norm" in key), std=0.2 if tensor.dim() < 2 else 0.08)
        model.save_pretrained(folder / name)
        file = folder / name / "model.safetensors"
        save_file(load_file(file) | {key: t.contiguous() for key, t in layers.items()}, file, metadata={"format": "pt"})
        path = folder / name / "config.json"
        told = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": DEPTHS}
        path.write_text(json.dumps(json.loads(path.read_text()) | told))
        expected(folder / name, config)
    return {}


class Depth(torch.nn.Module):
    """One MTP layer by its description: two norms, a projection of both halves, a decoder layer, a norm."""

    def __init__(self, config: Qwen2Config) -> None:
        super().__init__()
        config._attn_implementation = "eager"
        layer = Qwen2DecoderLayer(config, 0)
        self.input_layernorm, self.self_attn = layer.input_layernorm, layer.self_attn
        self.post_attention_layernorm, self.mlp = layer.post_attention_layernorm, layer.mlp
        self.token_layernorm, self.hidden_layernorm, self.final_layernorm = (
            Qwen2RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(3)
        )
        self.input_proj = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden_1TH: torch.Tensor, embedded_1TH: torch.Tensor, angles: tuple) -> torch.Tensor:
        x = self.input_proj(torch.cat([self.hidden_layernorm(hidden_1TH), self.token_layernorm(embedded_1TH)], -1))
        mask = torch.full((x.size(1), x.size(1)), -torch.inf, dtype=x.dtype).triu(1)[None, None]
        x = x + self.self_attn(self.input_layernorm(x), position_embeddings=angles, attention_mask=mask)[0]
        return self.final_layernorm(x + self.mlp(self.post_attention_layernorm(x)))


def expected(folder: pathlib.Path, config: Qwen2Config) -> None:
    """Each depth's loss over the batch, and the gradient of their scaled mean, one sequence at a time: ``mtp.pt``."""
    model = Qwen2ForCausalLM.from_pretrained(folder).double()
    weights = load_file(folder / "model.safetensors")
    depths = []
    for depth in range(DEPTHS):
        at = f"{PREFIX}{depth}."
        layer = Depth(config)
        layer.load_state_dict({key.removeprefix(at): t for key, t in weights.items() if key.startswith(at)})
        depths.append(layer.double())
    batch = global_batch()
    trajectories = len(set(batch.sample_index_N.tolist()))
    losses = [torch.zeros((), dtype=torch.float64) for _ in range(DEPTHS)]
    for row in rows(batch):
        tokens, mask = row["tokens"], row["mask"]
        n, first = len(tokens), len(tokens) - row["response"]
        with torch.no_grad():
            hidden = model.model(tokens[None]).last_hidden_state
            angles = model.model.rotary_emb(hidden, torch.arange(n)[None])
        for depth, layer in enumerate(depths):
            ahead = torch.cat([tokens, tokens.new_zeros(depth + 1)])[depth + 1 :]
            embedded = model.model.embed_tokens(ahead)[None].detach()
            hidden = layer(hidden, embedded, angles)
            log_p = torch.nn.functional.linear(hidden[0], model.lm_head.weight.detach()).log_softmax(-1)
            at = [t for t in range(first, n) if mask[t - first] and t - 2 - depth >= 0]
            picked = log_p[[t - 2 - depth for t in at], tokens[at]] if at else log_p.new_zeros(0)
            losses[depth] = losses[depth] - picked.sum() / (max(int(mask.sum()), 1) * trajectories)
    (FACTOR * sum(losses) / DEPTHS).backward()
    gradients = {f"{PREFIX}{d}.{key}": p.grad for d, layer in enumerate(depths) for key, p in layer.named_parameters()}
    torch.save({"losses": [float(loss.detach()) for loss in losses], "gradients": gradients}, folder / "mtp.pt")


# -- a rank ------------------------------------------------------------------------------------------------------------


def steps(session: Session) -> dict[str, list]:
    """Two rollouts of each case; their metrics on the rank that reports."""
    out = {}
    for case in CASES if session.layout == "single" else MTP_EVERYWHERE[: 1 if session.world_size == 4 else None]:
        name, settings, flags, _ = CASES[case]
        trainer = session.trainer(name, settings, flags)
        out[case] = [trainer.train(global_batch()) for _ in range(2)]
    return out


def gradients(session: Session, case: str) -> tuple[Trainer, dict[str, torch.Tensor]]:
    """Of the first step, by Megatron's names."""
    name, settings, flags, _ = CASES[case]
    trainer = session.trainer(name, settings, flags)
    batch = global_batch()
    parts, _ = trainer._parts(batch)
    trainer._preparation(batch, parts).run()
    head, loss = trainer._objective()
    trainer.policy.backward(parts[0], head, lambda mb, out: (loss(settings, mb, out)[0], {}))
    found = {key: p.main_grad.clone() for module in trainer.policy.model for key, p in module.named_parameters()}
    return trainer, found


def alone(session: Session) -> dict:
    """The policy's gradient with and without MTP, bit for bit; the MTP layers' own against float64."""
    out = {}
    for case in ("mtp", "mtp_tied"):
        trainer, beside = gradients(session, case)
        name, settings, flags, _ = CASES[case]
        CASES["off"] = (name, dataclasses.replace(settings, enable_mtp_training=False), flags, "batch")
        _, without = gradients(session, "off")
        want = torch.load(session.folder / name / "mtp.pt")
        for module in trainer.policy.model:  # its weights become its gradients, and the bridge names them
            for key, parameter in module.named_parameters():
                parameter.data.copy_(beside[key])
        got = dict(session.bridge(name).export(trainer.policy.model))
        gaps = {key: float((got[key] - g).abs().max() / g.abs().max()) for key, g in want["gradients"].items()}
        out[case] = {
            "policy": sorted(key for key in without if not torch.equal(without[key], beside[key])),
            "more": sorted(set(beside) - set(without)),
            "moves": sum(bool(beside[key].any()) for key in without),
            "gaps": gaps,
            "losses": want["losses"],
        }
    del CASES["off"]
    return out
