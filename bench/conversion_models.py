"""Tiny random checkpoints of every model family, for :mod:`bench.conversions`: what transformers makes, saves and
computes of them."""

import json
import pathlib
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

LENGTHS = [5, 1, 17, 9, 3, 13]
"""Lengths of the sequences whose logits are compared, in one pack; together a multiple of every tensor parallel
size."""
DENSE: dict[str, Any] = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    tie_word_embeddings=False,
    rms_norm_eps=1e-6,
    bos_token_id=None,
    eos_token_id=1,
    pad_token_id=None,
)
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=24)
ROUTED = EXPERTS | dict(
    n_routed_experts=8, n_shared_experts=1, first_k_dense_replace=1, routed_scaling_factor=2.5, n_group=1, topk_group=1
)
LATENT = dict(
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=6,
    num_key_value_heads=4,
    head_dim=4,
)
DEEPSEEK = {k: v for k, v in (DENSE | ROUTED | LATENT).items() if k != "head_dim"} | {"num_hidden_layers": 4}


def _yarn(**more: float) -> dict[str, Any]:
    return {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale": 1.0,
    } | more


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
DELTA = dict(
    rms_norm_eps=0.1,  # else the norm behind the delta rule magnifies roundings where that is near 0, transformers' too
    num_hidden_layers=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    mtp_num_hidden_layers=1,
)
GATED_EXPERTS = dict(num_experts=8, shared_expert_intermediate_size=24)
VISION = {"vision": True}
"""As published: the language model is a part of one that takes images, and experts are packed."""
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3": ("Qwen3", DENSE),
    "Qwen3, tied": ("Qwen3", DENSE | {"tie_word_embeddings": True}),
    "Qwen2.5": ("Qwen2", DENSE),
    "Llama 3": ("Llama", DENSE | {"rope_parameters": LLAMA3}),
    "MiMo": ("MiMo", DENSE | {"num_nextn_predict_layers": 1}),
    "Qwen3-MoE": ("Qwen3Moe", DENSE | EXPERTS | {"num_experts": 8, "norm_topk_prob": True}),
    "DeepSeek-V3": (
        "DeepseekV3",
        DEEPSEEK
        | dict(num_nextn_predict_layers=1)
        | dict(num_experts_per_tok=4, n_group=4, topk_group=2, rope_parameters=_yarn(mscale_all_dim=1.0)),
    ),
    "Kimi-K2": ("DeepseekV3", DEEPSEEK | dict(rope_parameters=_yarn(mscale_all_dim=1.0, beta_fast=1.0, beta_slow=1.0))),
    "Moonlight": ("DeepseekV3", DEEPSEEK | {"q_lora_rank": None, "n_shared_experts": 2}),
    "GLM-4.5": (
        "Glm4Moe",
        DENSE | ROUTED | dict(num_hidden_layers=4, attention_bias=True, use_qk_norm=True, num_nextn_predict_layers=1),
    ),
    "GLM-4.7-Flash": ("Glm4MoeLite", DEEPSEEK | dict(num_nextn_predict_layers=1)),
    "GLM-5": ("GlmMoeDsa", DEEPSEEK | {"index_topk": 8, "index_head_dim": 8, "index_n_heads": 2}),
    "GLM-4": ("Glm4", DENSE),
    "MiniMax-M2": (
        "MiniMaxM2",
        DENSE
        | {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 24, "rotary_dim": 4}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5}},
    ),
    "Qwen3-Next": ("Qwen3Next", DENSE | DELTA | EXPERTS | GATED_EXPERTS),
    "Qwen3.5": ("Qwen3_5", DENSE | DELTA),
    "Qwen3.5-MoE": ("Qwen3_5Moe", DENSE | DELTA | EXPERTS | GATED_EXPERTS),
    "Qwen3.5, with vision": ("Qwen3_5", DENSE | DELTA | VISION),
    "Qwen3.5-MoE, with vision": ("Qwen3_5Moe", DENSE | DELTA | EXPERTS | GATED_EXPERTS | VISION),
}
"""Family -> prefix of transformers' classes, and fields of its config."""


def make(family: str, folder: pathlib.Path) -> None:
    """A random checkpoint of ``family`` and, beside it, its logits on the sequences and a gradient of its embedding."""
    import torch
    import transformers

    name, fields = FAMILIES[family][0], dict(FAMILIES[family][1])
    vision = fields.pop("vision", False)
    around_zero = "linear_num_key_heads" in fields
    of = (
        "Qwen2" if name == "MiMo" else name
    )  # transformers has no MiMo; but for layers that predict further tokens it is a Qwen2
    of_text = "Text" if name.startswith("Qwen3_5") else ""
    config = getattr(transformers, f"{of}{of_text}Config")(**fields)
    torch.manual_seed(11)
    model = getattr(transformers, f"{of}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if key.endswith("e_score_correction_bias") or tensor.dim() > 1 and not key.endswith("inv_freq"):
                tensor.normal_(std=0.2)
            elif not key.endswith("inv_freq"):  # norms of ones would hide a mix-up
                zero = key.endswith("bias") or around_zero and "norm" in key and "linear_attn" not in key
                tensor.normal_(mean=0.0 if zero else 1.0, std=0.2)
    logits_TV = torch.cat([model(tokens[None]).logits[0] for tokens in sequences()])
    (logits_TV * loss_weights_TV()).sum().backward()
    model.save_pretrained(folder)
    if depths(fields):
        _add_mtp(folder, config.num_hidden_layers, name)
    torch.save(
        {"logits_TV": logits_TV.detach(), "grad_VH": model.get_input_embeddings().weight.grad}, folder / "expected.pt"
    )
    if vision:
        _put_into_vision(folder, name)
    if of != name:
        path = folder / "config.json"
        text = json.loads(path.read_text()) | {"architectures": [f"{name}ForCausalLM"], "model_type": name.lower()}
        path.write_text(json.dumps(text))


def _add_mtp(folder: pathlib.Path, layers: int, name: str) -> None:
    """A multi-token-prediction (MTP) layer, as the last layer is; transformers makes none, published checkpoints have
    one. Beside it DeepSeek's and GLM's have copies of embedding and head."""
    import torch
    from safetensors.torch import load_file

    path = folder / "model.safetensors"
    held = load_file(path)
    last = f"model.layers.{layers - 1}."
    kind = name if name in MTP else "Qwen3.5" if name.startswith("Qwen") else "DeepSeek"
    at, beside, own = MTP[kind]
    at, beside = at.format(layers), beside.format(layers)
    hidden = DENSE["hidden_size"]
    added = {at + key.removeprefix(last): torch.randn_like(t) for key, t in held.items() if key.startswith(last)}
    added |= {beside + key: torch.randn(hidden) for key in own[1:]}
    added |= {beside + own[0]: torch.randn(hidden, 2 * hidden)}
    if kind == "DeepSeek":
        added |= {f"{at}embed_tokens.weight": held["model.embed_tokens.weight"].clone()}
        added |= {f"{at}shared_head.head.weight": held["lm_head.weight"].clone()}
    _replace(path, held | added)


def _replace(path: pathlib.Path, tensors: "dict[str, torch.Tensor]") -> None:
    """Writes them in the place of the file that they may still be read from."""
    from safetensors.torch import save_file

    new = path.with_suffix(".new")
    save_file(tensors, new, metadata={"format": "pt"})
    new.replace(path)


def _put_into_vision(folder: pathlib.Path, name: str) -> None:
    """The checkpoint of a text model as the language model of one that takes images too."""
    import torch
    from safetensors.torch import load_file

    path = folder / "model.safetensors"
    held = load_file(path)
    packed: dict[str, dict[int, dict[str, torch.Tensor]]] = {}
    out = {"model.visual.patch_embed.proj.weight": torch.ones(3)}
    for key, tensor in held.items():
        key = key.replace("model.", "model.language_model.", 1)
        if found := re.fullmatch(r"(model\..*\.mlp\.experts)\.(\d+)\.(\w+)_proj\.weight", key):
            packed.setdefault(found[1], {}).setdefault(int(found[2]), {})[found[3]] = tensor
        else:
            out[key] = tensor
    for at, experts in packed.items():
        ordered = [experts[number] for number in range(len(experts))]
        out[f"{at}.gate_up_proj"] = torch.stack([torch.cat([one["gate"], one["up"]]) for one in ordered])
        out[f"{at}.down_proj"] = torch.stack([one["down"] for one in ordered])
    _replace(path, out)
    config = folder / "config.json"
    text = json.loads(config.read_text())
    kind = {"Qwen3_5": "qwen3_5", "Qwen3_5Moe": "qwen3_5_moe"}[name]
    told = {"architectures": [f"{name}ForConditionalGeneration"], "model_type": kind, "text_config": text}
    config.write_text(json.dumps(told | {"dtype": text["dtype"], "tie_word_embeddings": False, "vision_config": {}}))


MTP = {
    "MiMo": (
        "model.mtp_layers.0.",
        "model.mtp_layers.0.",
        ("input_proj.weight", "token_layernorm.weight", "hidden_layernorm.weight", "final_layernorm.weight"),
    ),
    "Qwen3.5": (
        "mtp.layers.0.",
        "mtp.",
        ("fc.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "norm.weight"),
    ),
    "DeepSeek": (
        "model.layers.{}.",
        "model.layers.{}.",
        ("eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight"),
    ),
}
"""Where an MTP layer's tensors are, where the others of MTP are, and these: a projection first, then norms."""


def depths(config: dict[str, Any]) -> int:
    """MTP layers of a model with this config."""
    return config.get("num_nextn_predict_layers") or config.get("text_config", config).get("mtp_num_hidden_layers") or 0


def sequences() -> "list[torch.Tensor]":
    import torch

    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, DENSE["vocab_size"], (length,), generator=generator) for length in LENGTHS]


def loss_weights_TV() -> "torch.Tensor":
    """The loss whose gradient is compared is the logits' sum with these weights."""
    import torch

    return torch.randn(sum(LENGTHS), DENSE["vocab_size"], generator=torch.Generator().manual_seed(4))
