"""``tiny:`` checkpoints: a small model of a real architecture with a tokenizer and chat template of its own.

``--hf-checkpoint tiny:qwen3?hidden_size=128&num_hidden_layers=3`` (or ``tiny:qwen3_moe``, ``tiny:mimo``) makes one in
the run directory, from a seed, so that a whole run needs nothing from outside. Query arguments are fields of the HF
config; ``seed`` is the only other one.
"""

import copy
import json
import os
import pathlib
import shutil
import tempfile
from typing import Any
from urllib.parse import parse_qsl

from slime_cli.errors import UsageError

PREFIX = "tiny:"
ROLES = ("system", "user", "assistant", "tool")
END = "<|end|>"
PAD = "<|pad|>"
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CORPUS = ["Calculate 12 + 34 - 56 * 78 / 90.", "What is the sum of 1, 2 and 3? Answer: ", "\n"] * 4
"""Enough to make words of arithmetic prompts single tokens; everything else is spelled in bytes."""
VOCABULARY = 320
"""Rows of the embedding, unless ``vocab_size`` asks for more: each of those is a token of its own name."""
SHAPE = dict(
    hidden_size=128,
    intermediate_size=512,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=512,
    rope_theta=10000.0,
    tie_word_embeddings=True,
    initializer_range=0.08,
    rms_norm_eps=1e-6,
    vocab_size=VOCABULARY,
)
DEPTHS = "num_nextn_predict_layers"
MODELS: dict[str, tuple[str, dict]] = {
    "qwen3": ("Qwen3", {}),
    # SGLang's Qwen3-MoE has an output layer of its own and would not tie it.
    "qwen3_moe": (
        "Qwen3Moe",
        dict(
            num_experts=16,
            num_experts_per_tok=4,
            moe_intermediate_size=128,
            norm_topk_prob=True,
            tie_word_embeddings=False,
        ),
    ),
    # transformers has no MiMo: a Qwen2 with layers of multi-token prediction (MTP), which SGLang reads as such too.
    "mimo": ("Qwen2", {DEPTHS: 1}),
}
"""Name -> prefix of transformers' classes, and fields of its config beside ``SHAPE``."""
ARCHITECTURES = {"mimo": "MiMoForCausalLM"}
"""Where they are not transformers' own."""


def config(uri: str) -> dict[str, Any]:
    """The fields of its ``config.json`` that say what the model is. Torch-free; raises UsageError for a bad URI."""
    name, settings, _ = _read(uri)
    return {"architectures": [_architecture(name)], **settings}


def _architecture(name: str) -> str:
    return ARCHITECTURES.get(name) or f"{MODELS[name][0]}ForCausalLM"


def make(uri: str, folder: str | os.PathLike) -> pathlib.Path:
    """Makes the checkpoint at ``folder`` unless it is there already; returns the folder. Raises UsageError for a bad
    URI."""
    folder = pathlib.Path(folder)
    name, settings, seed = _read(uri)
    prefix = MODELS[name][0]
    if (folder / "config.json").exists():
        _check_same(uri, folder)
        return folder
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    tokenizer = _tokenizer(settings["vocab_size"])
    described = getattr(transformers, f"{prefix}Config")(
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="float32",
        **settings,
    )
    torch.manual_seed(seed)
    # A folder names the class that wrote it.
    model = type(_architecture(name), (getattr(transformers, f"{prefix}ForCausalLM"),), {})(described)
    if settings.get(DEPTHS):
        model.model.mtp_layers = _drafting(model, settings[DEPTHS])
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.")
    model.save_pretrained(building)
    tokenizer.save_pretrained(building)
    os.chmod(building, 0o755)  # mkdtemp and safetensors give theirs to the owner alone; other stages read the model
    for path in pathlib.Path(building).iterdir():
        path.chmod(0o644)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(building, folder)
    return folder


def _drafting(model: Any, depths: int) -> Any:
    """MiMo's layers of multi-token prediction: two norms, a projection of both, a layer as the model's, a norm."""
    import torch

    layers = torch.nn.ModuleList(copy.deepcopy(model.model.layers[0]) for _ in range(depths))
    for layer in layers:
        for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
            setattr(layer, norm, copy.deepcopy(model.model.norm))
        layer.input_proj = torch.nn.Linear(2 * model.config.hidden_size, model.config.hidden_size, bias=False)
        layer.apply(model._init_weights)
    return layers


def _check_same(uri: str, folder: pathlib.Path) -> None:
    """Raises UsageError when the model that is there has other fields. (Its seed is not written anywhere.)"""
    there = json.loads((folder / "config.json").read_text())
    for field, wanted in config(uri).items():
        if there.get(field, wanted) != wanted:
            raise UsageError(
                f"--hf-checkpoint {uri}: {folder} holds a model with {field} {there[field]}, not {wanted}",
                "give another --run-dir, or that folder itself as --hf-checkpoint",
            )


def _read(uri: str) -> tuple[str, dict[str, Any], int]:
    """Name of the kind, fields of the config, seed."""
    name, _, query = uri.removeprefix(PREFIX).partition("?")
    if name not in MODELS:
        known = ", ".join(PREFIX + model for model in MODELS)
        raise UsageError(f"--hf-checkpoint {uri}: no tiny model {name!r}", f"there are {known}")
    own = MODELS[name][1]
    fields: dict[str, Any] = SHAPE | own | {"seed": 0}
    fields |= {key: _typed(uri, fields, key, text) for key, text in parse_qsl(query, keep_blank_values=True)}
    seed = fields.pop("seed")
    for field, value in fields.items():
        if type(value) is int and value < 1:
            raise UsageError(f"--hf-checkpoint {uri}: {field} is {value}", "it must be at least 1")
    if fields["vocab_size"] < VOCABULARY:
        raise UsageError(
            f"--hf-checkpoint {uri}: vocab_size is {fields['vocab_size']}", f"it must be at least {VOCABULARY}"
        )
    if fields["num_attention_heads"] % fields["num_key_value_heads"]:
        raise UsageError(
            f"--hf-checkpoint {uri}: num_key_value_heads does not divide num_attention_heads", "give one that does"
        )
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": fields.pop("rope_theta")}
    return name, fields, seed


def _typed(uri: str, fields: dict[str, Any], name: str, text: str) -> int | float | bool:
    """A query argument as the kind of number that its field holds."""
    if name not in fields:
        raise UsageError(f"--hf-checkpoint {uri}: unknown field {name}", f"fields: {', '.join(fields)}")
    kind = type(fields[name])
    try:
        return {"true": True, "false": False}[text] if kind is bool else kind(text)
    except (KeyError, ValueError):
        wanted = {bool: "true or false", int: "a whole number", float: "a number"}[kind]
        raise UsageError(f"--hf-checkpoint {uri}: {name} takes {wanted}, got {text!r}") from None


def _tokenizer(size: int = VOCABULARY) -> Any:
    """Byte-level BPE with single digits (arithmetic is learned digit by digit) and one special token a role. Tokens
    beyond its own are words that no text is split into, so that whatever a wider model draws can be decoded."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    special = [PAD, END, *(f"<|{role}|>" for role in ROLES)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(CORPUS, trainer)
    known = core.get_vocab_size()
    if size > VOCABULARY:
        told = json.loads(core.to_str())
        told["model"]["vocab"] |= {f"word{index}": index for index in range(known, size)}
        core = Tokenizer.from_str(json.dumps(told))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END, pad_token=PAD)
    tokenizer.chat_template = TEMPLATE
    return tokenizer
