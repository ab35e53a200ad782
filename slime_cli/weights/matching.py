"""Whether the engines of an endpoint can take a model's weights: compared before anything is sent. Torch-free.

Weights of another shape end an engine, for everybody who uses it; those of another model with equal shapes, or
another tokenizer, are wrong without a word. What is served is asked of each engine (stock ``/model_info`` and
``/server_info``), and looked up in the folder that it names where that is on this machine, else in ``endpoint.json``,
which may be old or of another machine: what the engine says itself comes first. Called by a run that attaches, and by
``slime sync``.
"""

import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from slime_cli import engine_api, manifests
from slime_cli.errors import DataError, UsageError
from slime_cli.models import architecture, schemes, tensors

_FIX = "give the model that the endpoint serves, or start one for yours: slime serve-rollout --hf-checkpoint {model}"


class Model(msgspec.Struct, frozen=True):
    """What is known of a model: enough to say whether another one's weights fit it."""

    where: str
    architecture: str
    config: dict[str, Any] = {}
    """Empty where nobody here can read it."""
    tokenizer: str = ""
    dtype: str = "auto"
    """What an engine computes in."""
    drafts: str = ""
    """The model with which it drafts, where that is another one."""


def identity(folder: str | os.PathLike) -> dict[str, Any]:
    """Fields of :class:`slime_cli.manifests.Endpoint` that say which model is served."""
    return {"config": architecture.read_config(str(folder)), "tokenizer": tokenizer_hash(folder)}


def require(
    folder: str,
    endpoint: manifests.Endpoint,
    urls: list[str],
    dtype: str | None,
    say: Callable[[str], None],
    *,
    quantises: bool = False,
) -> None:
    """Raises DataError unless every engine at ``urls`` can take the weights of the model in ``folder``.

    ``dtype``: what its trainer computes in; engines that compute in another are warned about. ``quantises``: the caller
    sends weights that are not quantised in the engines' format.
    """
    found = identity(folder)
    ours = Model(str(folder), architecture.name(found["config"]), **found)
    for url in urls:
        theirs = served(url, endpoint)
        for difference in differences(ours, theirs, quantises=quantises):
            raise DataError(
                f"{folder} does not fit what {theirs.where} serves: {difference}", _FIX.format(model=folder)
            )
        if theirs.drafts:
            raise DataError(
                f"{url} drafts with {theirs.drafts}, into which SGLang would load the policy's weights as well",
                "serve without --sglang-speculative-draft-model-path: a model's own MTP layers draft",
            )
        _require_reloader(url, theirs.config or ours.config)
        if not theirs.config:
            say(
                f"warning: the model of {theirs.where} can be read nowhere here, so its architecture alone was compared"
            )
        if dtype and theirs.dtype not in ("auto", dtype):
            say(
                f"warning: {url} computes in {theirs.dtype}, the trainer in {dtype}, so log-probabilities differ: "
                f"--sglang-dtype {dtype}"
            )


def _require_reloader(url: str, config: dict[str, Any]) -> None:
    """Raises UsageError for an engine that could not load quantised weights a second time. SGLang's own loader (0.5.16)
    can for FP8 in blocks alone."""
    scheme = schemes.of_config(config)
    if scheme is None or isinstance(scheme, schemes.Fp8) and scheme.strategy == "block":
        return
    if not engine_api.has_loader(engine_api.get(url, "/server_info"), engine_api.RELOADER):
        raise UsageError(
            f"{url} serves {scheme.words}, which it cannot load a second time",
            f"start it with slime serve-rollout, or with --custom-weight-loader {engine_api.RELOADER} where slime is"
            " installed",
        )


def require_no_prefix_cache(urls: list[str]) -> None:
    """``--in-flight pause``: weights change under requests, so the cache cannot be flushed then. Raises UsageError for
    an
    engine whose prefix cache would serve what older weights computed."""
    for url in urls:
        if not engine_api.get(url, "/server_info").get("disable_radix_cache"):
            raise UsageError(
                f"--in-flight pause: {url} has a prefix cache, which would serve keys and values of older weights",
                "start it with --sglang-disable-radix-cache --sglang-incremental-streaming-output, or choose another"
                " --in-flight",
            )


def require_adapters(urls: list[str], wanted: dict[str, Any]) -> None:
    """Raises UsageError for an engine that was not started for LoRA adapters of this rank beside these layers.
    ``wanted``: SGLang's options, by dest, of engines that are."""
    names = wanted["lora_target_modules"]
    fix = (
        f"start it with --sglang-enable-lora --sglang-max-lora-rank {wanted['max_lora_rank']}"
        f" --sglang-lora-target-modules {' '.join(names)}, or give --lora-sync merged"
    )
    for url in urls:
        server = engine_api.get(url, "/server_info")
        theirs = set(server.get("lora_target_modules") or ())
        if not server.get("enable_lora"):
            raise UsageError(f"--lora-rank: {url} serves no LoRA adapters", fix)
        if (server.get("max_lora_rank") or 0) < wanted["max_lora_rank"]:
            raise UsageError(f"--lora-rank: {url} takes ranks up to {server.get('max_lora_rank')}", fix)
        if "all" not in theirs and (lacking := [name for name in names if name not in theirs]):
            raise UsageError(f"--lora-rank: {url} takes no adapters beside {', '.join(lacking)}", fix)


def served(url: str, endpoint: manifests.Endpoint) -> Model:
    """What the engine at ``url`` serves. Raises EngineError when it does not say."""
    info = engine_api.get(url, "/model_info")
    server = engine_api.get(url, "/server_info")
    folder = info.get("model_path") or endpoint.model
    host = next((engine.host for engine in endpoint.engines if engine.url == url), None)
    known = {"config": endpoint.config, "tokenizer": endpoint.tokenizer}
    if host == os.uname().nodename and (pathlib.Path(folder) / "config.json").is_file():
        known = identity(folder)
    overridden = json.loads(server.get("json_model_override_args") or "{}") if known["config"] else {}
    named = (info.get("architectures") or [architecture.name(known["config"])])[0]
    drafts = server.get("speculative_draft_model_path") or ""
    if drafts in (folder, endpoint.model):
        drafts = ""
    config = known["config"] | overridden
    return Model(f"{url} ({folder})", named, config, known["tokenizer"], engine_api.dtype(server), drafts)


def differences(ours: Model, theirs: Model, *, quantises: bool = False) -> Iterator[str]:
    """In words, the plainest first. What is not known of one of them is passed over. ``quantises``: of
    :func:`require`."""
    if ours.architecture != theirs.architecture:
        yield f"{ours.architecture}, not {theirs.architecture}"
    if not theirs.config:
        return
    one, other = (_rows(model.config) for model in (ours, theirs))
    if one != other:
        yield f"a vocabulary of {one}, not {other}"
    one = tensors.required(ours.config) or {}
    other = tensors.required(theirs.config) or {}
    for name in [*one, *other] if one and other else ():
        if one.get(name) != other.get(name):
            yield f"{name} is {_shape(one.get(name))}, not {_shape(other.get(name))}"
    one, other = (schemes.of_config(model.config) for model in (ours, theirs))
    if one != other and not (quantises and one is None):
        yield f"its weights are {_words(one)}, not {_words(other)}"
    one, other = (architecture.megatron_args(model.config) for model in (ours, theirs))
    if one is not None and other is not None:
        for dest in sorted(one.keys() | other.keys()):
            if dest not in architecture.CHOICES and one.get(dest) != other.get(dest):
                yield f"{dest} is {one.get(dest)}, not {other.get(dest)}"
    if ours.tokenizer and theirs.tokenizer and ours.tokenizer != theirs.tokenizer:
        yield "its tokenizer has other entries, so answers would be decoded by the wrong one"


def _words(scheme: schemes.Scheme | None) -> str:
    return "not quantised" if scheme is None else scheme.words


def _rows(config: dict[str, Any]) -> Any:
    return (config if "vocab_size" in config else config.get("text_config", {})).get("vocab_size")


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else " x ".join(map(str, shape))


def tokenizer_hash(folder: str | os.PathLike) -> str:
    """Hash of what the tokenizer does (entries and ids, merges, special tokens), however its file is written; empty
    without one.
    """
    path = pathlib.Path(folder) / "tokenizer.json"
    if path.is_file():
        stat = path.stat()
        return _hash_of(path, stat.st_size, stat.st_mtime_ns)
    other = next(
        (p for p in sorted(pathlib.Path(folder).glob("*.model")) if p.is_file()), None
    )  # SentencePiece, tiktoken
    return hashlib.sha256(other.read_bytes()).hexdigest() if other else ""


@functools.cache  # megabytes of JSON
def _hash_of(path: pathlib.Path, size: int, mtime: int) -> str:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        model = found["model"]
        added = found.get("added_tokens") or []
        vocabulary = model.get("vocab") or []
        entries = sorted(vocabulary.items()) if isinstance(vocabulary, dict) else vocabulary
        merges = [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model.get("merges") or []]
        tokens = sorted((token["id"], token["content"]) for token in added)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path}: not a tokenizer ({type(error).__name__}: {error})", "download the checkpoint again"
        ) from None
    return hashlib.sha256(json.dumps([model.get("type"), entries, merges, tokens]).encode()).hexdigest()
