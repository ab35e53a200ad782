"""On-disk contracts between the stages. Torch-free.

``run.json``, ``checkpoint.json``, ``endpoint.json``, ``rollouts/NNNNNN/manifest.json`` and
``weights/vNNNNNN/manifest.json``; each a frozen struct below, written and read by :mod:`slime_cli.manifests.base`.
"""

from typing import Any

import msgspec

from slime_cli.manifests.base import POINTER, file_hash, read, read_json, write, write_bytes, write_json

__all__ = [
    "POINTER",
    "Adapter",
    "Checkpoint",
    "Claim",
    "Endpoint",
    "Engine",
    "Patch",
    "Probe",
    "Pushed",
    "Rollout",
    "Run",
    "Synced",
    "Tensor",
    "Weights",
    "file_hash",
    "read",
    "read_json",
    "write",
    "write_bytes",
    "write_json",
]


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One start of a run."""

    number: int
    started: float
    """Unix seconds."""
    argv: list[str]
    changed: dict[str, tuple[Any, Any]]
    """``section.name`` -> its values in the attempt before and in this one."""
    versions: dict[str, str]
    hardware: dict[str, Any]


class Run(msgspec.Struct, frozen=True, tag_field="schema", tag="slime.run/1", kw_only=True):
    """``run.json``: what a run is, complete enough to start it again."""

    options: dict[str, Any]
    """Resolved options: ``{"slime": {...}, "megatron": {...}, "sglang": {...}, "router": {...}}``."""
    origins: dict[str, str]
    """For each ``section.name``: ``default``, ``profile NAME`` or ``flag``."""
    argv: list[str]
    versions: dict[str, str]
    hardware: dict[str, Any]
    attempt: int
    """1 for the first start of this run directory, one more at each resume."""
    created: float
    """Unix seconds of the first start."""
    attempts: list[Attempt] = []
    """Every start, in order. ``options``, ``argv``, ``versions`` and ``hardware`` above are those of the last one."""


class Adapter(msgspec.Struct, frozen=True, kw_only=True):
    """A LoRA adapter: for each linear layer W that it is beside, W + (alpha / rank) B A."""

    rank: int
    """Rows of A and columns of B."""
    alpha: int
    dropout: float
    """The share of a layer's inputs that A does not see while it is trained."""
    modules: list[str]
    """Megatron's names of the layers, in the order of :data:`slime_cli.options.adapters.MODULES`."""


class Checkpoint(msgspec.Struct, frozen=True, tag_field="schema", tag="slime.checkpoint/1", kw_only=True):
    """``checkpoint.json`` beside a checkpoint's weights."""

    format: str
    """``torch_dist`` or ``hf``."""
    source: str
    source_hashes: dict[str, str]
    """SHA-256 of each file of the source that decided the weights."""
    architecture: str
    """The HF architecture's name, e.g. ``Qwen3ForCausalLM``."""
    megatron_args: dict[str, Any]
    """Architecture options in Megatron's own names."""
    tokenizer_hash: str
    chat_template_hash: str
    iteration: int
    dtype: str
    layout: dict[str, int]
    """Parallel sizes that wrote it: tensor, pipeline, data, context, expert."""
    files: dict[str, int] = {}
    """Bytes of each file beside the manifest, so that one cut short or lost is noticed; empty where nobody counted."""
    adapter: Adapter | None = None
    """The LoRA adapter that the checkpoint holds, over the weights of ``source``; None: it holds whole weights."""


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """One SGLang server behind an endpoint."""

    url: str
    role: str
    devices: list[int]
    pid: int
    host: str


class Endpoint(msgspec.Struct, frozen=True, tag_field="schema", tag="slime.endpoint/1", kw_only=True):
    """``endpoint.json``: where generation is served, by what, and who owns it."""

    router_url: str
    engines: list[Engine]
    model: str
    """Path of the HF checkpoint that the engines started from."""
    engine_name: str
    engine_version: str
    owner_pid: int
    owner_host: str
    created: float
    claim: str = ""
    """The file whose lock a process holds that updates the weights; beside the manifest where it is not named."""
    config: dict[str, Any] = {}
    """``config.json`` of the model, for those who cannot read its folder."""
    tokenizer: str = ""
    """Hash of what the tokenizer does (:func:`slime_cli.weights.matching.tokenizer_hash`)."""


class Claim(msgspec.Struct, frozen=True, tag_field="schema", tag="slime.claim/1", kw_only=True):
    """``endpoint.claim.json`` beside ``endpoint.json``: who updates the engines' weights. Empty when nobody does."""

    holder: str
    """A run directory, or the command."""
    host: str
    pid: int
    since: float
    """Unix seconds."""


class Pushed(msgspec.Struct, frozen=True, kw_only=True):
    """A version that ``slime sync`` sent to the engines of an endpoint."""

    version: str
    folder: str
    """Where it lies; of the weights that engines were started with, the model."""


class Synced(msgspec.Struct, frozen=True, tag_field="schema", tag="slime.synced/1", kw_only=True):
    """``sync.json`` beside ``endpoint.json``: what ``slime sync`` has sent, by which it finds the way back."""

    history: list[Pushed] = []
    """Versions that all engines held, each after the one before; the last was pushed last."""
    pending: Pushed | None = None
    """One whose push has not come to an end."""


class Rollout(msgspec.Struct, frozen=True, tag_field="schema", tag="slime.rollout/1", kw_only=True):
    """``rollouts/NNNNNN/manifest.json`` beside ``samples.parquet``."""

    rollout_id: int
    groups: int
    samples: int
    trajectories: int | None = None
    """Fewer than ``samples`` where they fanned out; None in older manifests, which may say ``executions``."""
    fates: dict[str, int]
    """Trajectories by what became of them while this batch was made: ``batched`` and ``dropped:REASON``."""
    weight_versions: list[str]
    prompt_cursor_before: dict[str, int]
    prompt_cursor_after: dict[str, int]
    files: dict[str, str]
    """SHA-256 of each file beside the manifest."""


class Tensor(msgspec.Struct, frozen=True, kw_only=True):
    """One published tensor."""

    dtype: str
    shape: list[int]
    file: str
    """Beside the manifest; empty in a delta, whose tensors lie where it is applied."""
    checksum: str
    """First 16 hex digits of SHA-256 over the tensor's bytes (what SGLang's CPU engine reports as well)."""
    digest: str = ""
    """xxh3-128 over the same bytes, by which a copy is checked; empty where no delta will follow."""


class Patch(msgspec.Struct, frozen=True, kw_only=True):
    """Where a delta has what changed of one tensor (:mod:`slime_cli.weights.encoding`)."""

    file: str
    begin: int
    size: int
    digest: str
    """xxh3-128 over these bytes."""


class Probe(msgspec.Struct, frozen=True, tag_field="schema", tag="slime.probe/1", kw_only=True):
    """``probe.json`` beside a published LoRA adapter: what an engine that has it must compute."""

    tokens: list[int]
    log_probs: list[float]
    """The trainer's, of each token but the first, given those before it; natural logarithms, at temperature 1."""


class Weights(msgspec.Struct, frozen=True, tag_field="schema", tag="slime.weights/1", kw_only=True):
    """``weights/vNNNNNN/manifest.json`` beside safetensors that an engine can load, or beside the patches of a
    delta."""

    version: str
    base: str | None
    """The version that a delta applies to, in the folder of this name beside its own; None for full weights."""
    encoding: str
    """``full``, ``xor``, ``overwrite``, or ``adapter`` for a LoRA adapter alone in PEFT's format."""
    tensors: dict[str, Tensor]
    """All of the model's, changed or not; of an adapter, its own."""
    training_step: int
    run: str
    base_digest: str = ""
    """:func:`slime_cli.weights.applying.identity` of the base: a version of the same name is not always the same."""
    patches: dict[str, Patch] = {}
    """Where a delta changes tensors: by name."""
