"""Is this HF checkpoint whole? Its configuration, tokenizer and weights, from files alone: seconds even for a large
model.

Looked at before a process is started: by ``slime doctor``, ``train``, ``serve-rollout``, ``convert`` and ``sync``, all
through :mod:`slime_cli.commands.doctor_checkpoint`, which adds the chat template, or through :func:`check`. Torch-free,
no transformers. What an architecture must hold is said by :mod:`slime_cli.models.tensors`; what is not known there is
never called whole.
"""

import os
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

from slime_cli.errors import DataError
from slime_cli.findings import Finding
from slime_cli.manifests import checkpoints, read_json
from slime_cli.models import headers, schemes, tensors

AGAIN = "download the checkpoint again"
QUANTISED = {
    "fp8": None,
    "compressed-tensors": ("pack-quantized", "float-quantized", "int-quantized", "naive-quantized"),
}
"""Method -> its formats whose tensor names are known here; None for all."""
SCALED = ("F8_E4M3", "F8_E5M2", "I8")
"""Dtypes of weights that mean nothing without their scale."""
_OF_NUMBERS = re.compile(r"(num|n|max)_.*|.*_(size|dim|rank|theta|eps|heads|layers|experts)")
"""Fields of a config.json."""
_DTYPES = ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2")
OF_QUANTISATION = (
    "_scale_inv",
    "_scale",
    "_shape",
    "_zero_point",
    "_packed",
    "_g_idx",
    "input_scale",
    "k_scale",
    "v_scale",
)


def check(folder: str | os.PathLike, say: Callable[[str], None]) -> None:
    """Raises DataError when the configuration or the weights are not whole; ``say`` is told of what is not well
    otherwise.
    """
    folder = pathlib.Path(folder)
    for finding in (check_folder(folder), check_config(folder), check_weights(folder)):
        act_on(finding, folder, True, say)


def act_on(finding: Finding, folder: str | os.PathLike, needed: bool, say: Callable[[str], None]) -> None:
    """Raises DataError for a failure of what is ``needed``; any other that is not ok is said in a line."""
    if finding.status == "fail" and needed:
        raise DataError(f"{folder}: {finding.name}: {finding.detail}", finding.fix)
    if finding.status != "ok":
        say(f"warning: {finding.name}: {finding.detail} ({finding.fix})")


def findings(folder: pathlib.Path) -> Iterator[Finding]:
    found = check_folder(folder)
    yield found
    if found.status == "ok":
        yield check_config(folder)
        yield check_tokenizer(folder)
        yield check_weights(folder)


def read_config(folder: pathlib.Path) -> dict[str, Any]:
    """``config.json``, its numbers numbers. Raises ValueError with a message for people."""
    config = read_json(folder / "config.json")
    for field, value in config.items():
        if isinstance(value, str) and value.isdigit() and _OF_NUMBERS.fullmatch(field):
            raise ValueError(f'{folder / "config.json"}: {field} takes a number, got "{value}" in quotes')
    dtype = config.get("dtype") or config.get("torch_dtype")
    if isinstance(dtype, str) and dtype not in _DTYPES:
        raise ValueError(f"{folder / 'config.json'}: the dtype {dtype!r} is none of {', '.join(_DTYPES)}")
    return config


def again_or_another(folder: pathlib.Path) -> str:
    """What to do about a folder whose config.json is missing or damaged."""
    if (folder / "config.json").exists():
        return AGAIN
    if checkpoints.any_in(folder):
        return "that is a Megatron checkpoint, which --load takes; here give the folder of the HF model"
    return f"give the folder of an HF checkpoint; if that is one, {AGAIN}"


def _nearer(folder: pathlib.Path) -> str:
    """What to do where ``folder`` is none."""
    if folder.is_file():
        return f"that is a file: give its folder, {folder.parent}"
    if folder.parts[:1] and folder.parts[0].startswith("~"):
        return "the shell left ~ as it is (after = and in quotes it does): write $HOME"
    if folder.parts[:1] and folder.parts[0].startswith("tiny:"):
        return "train and serve-rollout make tiny models, in model/ of their --run-dir: give that folder"
    if len(folder.parts) == 2 and not folder.parent.exists():
        return f"slime downloads nothing: hf download {folder} --local-dir DIR, then give DIR"
    return "give the folder of an HF checkpoint"


def check_folder(folder: pathlib.Path) -> Finding:
    name = "checkpoint"
    if not folder.is_dir():
        return Finding(name, "fail", "no such folder", _nearer(folder))
    if (folder / headers.STATE).exists():
        again = "give the command that began it again"
        return Finding(name, "fail", f"its conversion has not ended ({headers.STATE} is there)", again)
    return Finding(name, "ok", str(folder))


def check_config(folder: pathlib.Path) -> Finding:
    try:
        config = read_config(folder)
    except ValueError as error:
        return Finding("model config", "fail", str(error), again_or_another(folder))
    architectures = config.get("architectures")
    if not architectures:
        return Finding("model config", "fail", "config.json names no architectures", 'add "architectures": ["..."]')
    detail = f"{', '.join(architectures)}, {config.get('model_type', 'no model_type')}"
    try:
        scheme = schemes.of_config(config)
    except DataError as error:
        return Finding("model config", "warn", f"{detail}; {error.message.removeprefix('config.json: ')}", error.fix)
    return Finding("model config", "ok", detail + (f", {scheme.words}" if scheme else ""))


# -- tokenizer ---------------------------------------------------------------------------------------------------------


IDS = "token ids"
"""Name of the finding that a tokenizer has ids beyond the embedding's rows: no stage can use such a model."""


def check_tokenizer(folder: pathlib.Path) -> Finding:
    """It is there, and the embedding has a row for each of its ids: an id beyond them ends the engine that gets it."""
    name = "tokenizer"
    others = [file for file in ("tokenizer.model", "tiktoken.model", "vocab.json") if (folder / file).is_file()]
    if others and not (folder / "tokenizer.json").exists():
        fix = "make it: AutoTokenizer.from_pretrained(PATH, use_fast=True).save_pretrained(PATH)"
        return Finding(
            name, "warn", f"{others[0]} and no tokenizer.json: its ids are not compared with the embedding's rows", fix
        )
    try:
        found = read_json(folder / "tokenizer.json")
        kind, count, last, token = _largest(folder, found)
    except ValueError as error:
        fix = f"{AGAIN}, or make it: AutoTokenizer.from_pretrained(PATH, use_fast=True).save_pretrained(PATH)"
        return Finding(name, "fail", str(error), fix)
    rows = _rows(folder)
    if rows is not None and last >= rows:
        rows_for_all = "model.resize_token_embeddings(len(tokenizer))"
        fix = f"take the tokenizer that the model was trained with, or give the model rows: {rows_for_all}"
        return Finding(
            IDS, "fail", f"{token!r} has id {last}, and the embedding has {rows} rows (0 to {rows - 1})", fix
        )
    return Finding(name, "ok", f"{kind}, {count:,} entries" + ("" if rows is None else f" for {rows:,} rows"))


def _largest(folder: pathlib.Path, found: dict[str, Any]) -> tuple[str, int, int, str]:
    """Kind, entries, largest id and its token. Tokens added later may be in files of their own."""
    try:
        vocabulary = found["model"]["vocab"]
        if isinstance(vocabulary, list):  # of a unigram model: pairs of text and score, in the order of ids
            vocabulary = {entry[0]: number for number, entry in enumerate(vocabulary)}
        ids = [(number, text) for text, number in vocabulary.items()]
        ids += [(entry["id"], entry["content"]) for entry in found.get("added_tokens") or ()]
        for file, field in (("added_tokens.json", None), ("tokenizer_config.json", "added_tokens_decoder")):
            more = read_json(folder / file) if (folder / file).exists() else {}
            if field is None:
                ids += [(number, text) for text, number in more.items()]
            else:
                ids += [(int(number), entry["content"]) for number, entry in (more.get(field) or {}).items()]
        largest, token = max(ids, default=(-1, ""))
        return found["model"].get("type") or "unknown kind", len(vocabulary), largest, token
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"{folder / 'tokenizer.json'}: not a tokenizer ({error!r})") from None


def _rows(folder: pathlib.Path) -> int | None:
    """How many the embedding has by the configuration; :func:`check_weights` finds weights that have another number."""
    try:
        config = read_config(folder)
    except ValueError:
        return None
    rows = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    return rows if isinstance(rows, int) else None


# -- weights -----------------------------------------------------------------------------------------------------------


def check_weights(folder: pathlib.Path) -> Finding:
    """Every file is whole, and every tensor of the architecture is there, in its shape."""
    name = "weights"
    try:
        contents = headers.read(folder)
    except ValueError as error:
        fix = (
            "save the model with safe_serialization=True"
            if "no *.safetensors" in str(error)
            else f"{AGAIN}, or only the files named"
        )
        return Finding(name, "fail", str(error), fix)
    size = (
        f"{len(contents.files)} safetensors file{'s' * (len(contents.files) != 1)}, {contents.size / (1 << 30):.2f} GiB"
    )
    try:
        config = read_config(folder)
        wanted = tensors.required(config, contents.tensors)
    except ValueError:
        return Finding(name, "warn", f"{size}; without a config.json nothing says which tensors belong there", AGAIN)
    except DataError as error:
        return Finding(name, "fail", error.message, error.fix)
    unknown = _unknown(config, wanted)
    if unknown or wanted is None:
        return Finding(
            name,
            "warn",
            f"{size}, none cut off; {unknown}, so a missing tensor is not noticed",
            "try the model by hand first",
        )
    problems = [found for tensor, shape in wanted.items() if (found := _problem(tensor, shape, contents))]
    if problems:
        more = f" (and {len(problems) - 1} more tensors)" if len(problems) > 1 else ""
        return Finding(name, "fail", problems[0] + more, f"{AGAIN}, or only the files named")
    if extra := _without_place(config, wanted, contents):
        more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        fix = "is config.json that of these weights? engines and Megatron leave them out"
        return Finding(name, "warn", f"{size}; the architecture has no place for {extra[0]}{more}", fix)
    if _head_differs(folder, config, contents):
        detail = (
            f"{size}; config.json ties lm_head to the embedding, and the lm_head.weight that is there is another one"
        )
        fix = "engines and Megatron leave it out; where it is the model's own head, set tie_word_embeddings to false"
        return Finding(name, "warn", detail, fix)
    return Finding(name, "ok", f"{size}, all {len(wanted):,} tensors of {config['architectures'][0]}")


def _head_differs(folder: pathlib.Path, config: dict[str, Any], contents: headers.Contents) -> bool:
    """A tied model's file may hold a copy of the embedding as its head. Anything else under that name goes unused."""
    head, embedding = (contents.tensors.get(name) for name in ("lm_head.weight", "model.embed_tokens.weight"))
    if not config.get("tie_word_embeddings", False) or head is None or embedding is None:
        return False
    return not headers.alike(folder, head, embedding)


def _unknown(config: dict[str, Any], wanted: tensors.Tensors | None) -> str:
    if wanted is None:
        return f"the tensors of {(config.get('architectures') or ['?'])[0]} are not known here"
    found = config.get("quantization_config") or config.get("compression_config") or {}
    method = found.get("quant_method")
    form = found.get("format")
    if method is not None and (method not in QUANTISED or QUANTISED[method] and form not in QUANTISED[method]):
        return f"tensors quantised by {method}{f' ({form})' if form else ''} are not known here"
    return ""


def _problem(name: str, shape: tensors.Shape, contents: headers.Contents) -> str:
    """What is wrong with a tensor that must be there, itself or packed to fewer bits; empty when nothing is."""
    held = contents.tensors
    parts = [name]
    if name in held:
        if held[name].shape != shape:
            found = f"{name} in {held[name].file} has the shape {list(held[name].shape)}"
            return f"{found}, config.json makes it {list(shape)}"
        if held[name].dtype in SCALED:
            parts.append(f"{name}_scale_inv" if f"{name}_scale_inv" in held else f"{name}_scale")
    elif f"{name}_packed" in held:
        parts = [f"{name}_packed", f"{name}_scale", f"{name}_shape"]
    if lost := [part for part in parts if part not in held]:
        return f"{lost[0]} is missing"
    if unlisted := [part for part in parts if part in contents.unlisted]:
        return f"{unlisted[0]} is in {held[unlisted[0]].file} and not in {headers.INDEX}"
    return ""


def _without_place(config: dict[str, Any], wanted: tensors.Tensors, contents: headers.Contents) -> list[str]:
    layers = (
        config["num_hidden_layers"]
        if config.get("num_nextn_predict_layers") or config.get("num_mtp_modules")
        else 1 << 30
    )
    return sorted(
        name
        for name in contents.tensors.keys() - wanted.keys()
        if not (tensors.computed(name) or tensors.further(name, layers) or tensors.vision(name))
        and not name.endswith(OF_QUANTISATION)
    )
