"""HF folders for tests that read headers only: every tensor of an architecture, all zeros, in two shards with an
index.
"""

import json
import math
import pathlib
import struct

from slime_cli.models import tensors

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONFIG = dict(
    architectures=["Qwen3ForCausalLM"],
    model_type="qwen3",
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    rms_norm_eps=1e-6,
    max_position_embeddings=512,
    vocab_size=32,
    rope_theta=1e6,
)
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"


def write_shard(path: pathlib.Path, shapes: dict[str, tuple[int, ...]], dtypes: dict[str, str] | None = None) -> None:
    """A safetensors file of zeros; float32 but for those in ``dtypes``."""
    header = {}
    at = 0
    for name, shape in shapes.items():
        dtype = (dtypes or {}).get(name, "F32")
        size = math.prod(shape) * (1 if dtype.startswith("F8") else 4)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    head = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + bytes(at))


def write(folder: pathlib.Path, **fields) -> pathlib.Path:
    """A whole one; layer 1's tensors are alone in the second shard. ``fields``: over ``CONFIG``."""
    folder.mkdir(parents=True)
    config = CONFIG | fields
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(
        json.dumps({"model": {"type": "BPE", "vocab": {chr(97 + i): i for i in range(26)}}})
    )
    (folder / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|im_end|>"}}')
    (folder / "chat_template.jinja").write_text(CHATML)
    shapes = tensors.required(config)
    for shard, second in zip(SHARDS, (False, True), strict=True):
        write_shard(
            folder / shard,
            {name: shape for name, shape in shapes.items() if name.startswith("model.layers.1.") == second},
        )
    index = {name: SHARDS[name.startswith("model.layers.1.")] for name in shapes}
    (folder / INDEX).write_text(json.dumps({"weight_map": index}))
    return folder


def unlist(folder: pathlib.Path, word: str) -> None:
    """Takes the lines of all tensors with ``word`` in their names out of the index."""
    found = json.loads((folder / INDEX).read_text())
    found["weight_map"] = {name: shard for name, shard in found["weight_map"].items() if word not in name}
    (folder / INDEX).write_text(json.dumps(found))


def write_dist(folder: pathlib.Path) -> None:
    """What says that a folder is a torch_dist checkpoint: one without tensors."""
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    fields = b"}(U\x13state_dict_metadata}U\x0cstorage_data}u"
    (folder / ".metadata").write_bytes(
        b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81" + fields + b"b."
    )
