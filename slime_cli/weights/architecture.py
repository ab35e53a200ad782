"""Megatron's architecture options for an HF config. Torch-free.

Dense Llama-like families only so far; another architecture needs its options given by a model profile.
"""

import json
import pathlib
from typing import Any

from slime_cli.errors import DataError

DENSE = {
    "Qwen3ForCausalLM": {"qk_layernorm": True},
    "Qwen2ForCausalLM": {"add_qkv_bias": True},
    "LlamaForCausalLM": {},
}


def read_config(checkpoint: str) -> dict[str, Any]:
    """``config.json`` of an HF checkpoint folder. Raises DataError when it is missing or damaged."""
    path = pathlib.Path(checkpoint) / "config.json"
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise DataError(f"{path}: no such file", "--hf-checkpoint must be a folder with an HF model") from None
    except ValueError as error:
        raise DataError(f"{path}: not JSON ({error})", "download or export the checkpoint again") from None


def megatron_args(config: dict[str, Any]) -> dict[str, Any] | None:
    """Options by dest, e.g. ``{"num_layers": 28, ...}``; None for an architecture that is not derived here."""
    name = (config.get("architectures") or ["?"])[0]
    if name not in DENSE:
        return None
    heads = config["num_attention_heads"]
    rope = config.get("rope_parameters") or {}
    out = {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "num_attention_heads": heads,
        "group_query_attention": True,
        "num_query_groups": config.get("num_key_value_heads", heads),
        "kv_channels": config.get("head_dim") or config["hidden_size"] // heads,
        "normalization": "RMSNorm",
        "norm_epsilon": config["rms_norm_eps"],
        "swiglu": True,
        "disable_bias_linear": True,
        "position_embedding_type": "rope",
        "rotary_base": int(rope.get("rope_theta") or config.get("rope_theta", 10000)),
        "max_position_embeddings": config["max_position_embeddings"],
        "seq_length": config["max_position_embeddings"],
        "vocab_size": config["vocab_size"],
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
    }
    return out | DENSE[name]


_SPELLING = {"disable_bias_linear": "--disable-bias-linear", "add_qkv_bias": "--add-qkv-bias"}


def argv(args: dict[str, Any]) -> list[str]:
    """The same options as a command line for Megatron's parser."""
    out = []
    for dest, value in args.items():
        flag = _SPELLING.get(dest, "--" + dest.replace("_", "-"))
        if value is True:
            out.append(flag)
        elif value is not False:
            out += [flag, str(value)]
    return out
