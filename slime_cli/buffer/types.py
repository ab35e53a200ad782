"""Prompts, samples and groups: the types that the stages share. Torch-free; imported by every stage.

Field names are the ones that hooks of slime scripts read and write. A group has the trajectories that answer one dealt
prompt. The unit of accounting is the trajectory: one generation for one place in a group, whose ``index`` is unique in
a run and is the journal's key. It ends in one sample, or fans out into several siblings that share ``index`` and
``group_index``; they are kept, trained and dropped together. A sample's response consists of spans: consecutive tokens
that one weight version wrote.
"""

import dataclasses
import enum
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from slime_cli.buffer.values import unstorable
from slime_cli.errors import DataError
from slime_cli.manifests.layout import step_of


class Status(str, enum.Enum):
    """How generation of a sample ended."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


class Fate(str, enum.Enum):
    """Where a sample stands in the journal; TRAINED and DROPPED are final."""

    PENDING = "PENDING"
    LEASED = "LEASED"
    GENERATED = "GENERATED"
    REWARDED = "REWARDED"
    BATCHED = "BATCHED"
    TRAINED = "TRAINED"
    DROPPED = "DROPPED"


@dataclasses.dataclass(frozen=True, slots=True)
class PromptRow:
    """One row of a prompt source, already checked."""

    prompt: str | list[dict[str, Any]]
    """Plain text, or chat messages ``[{"role": ..., "content": ...}]``."""
    label: str | None
    """Reference answer, as text; None when the data has none."""
    metadata: dict[str, Any]
    """Whatever else the row carries (``rm_type``, ``tools``, a verifier's entry)."""
    source: str
    """The file or URI that the row came from."""
    row: int
    """1-based line of a JSONL file, or 1-based row of any other source."""

    @property
    def where(self) -> str:
        """Source and row, as messages name them."""
        return f"{self.source}:{self.row}"


class RowError(DataError):
    """A row that cannot be made into a prompt or an example; ``--on-bad-row skip`` passes it over and counts it by
    ``kind``."""

    def __init__(self, row: PromptRow, kind: str, reason: str, fix: str):
        super().__init__(f"{row.where}: {reason}", fix)
        self.kind = kind


class Span(NamedTuple):
    """Consecutive response tokens that one weight version wrote."""

    length: int
    version: str | None
    """``v000012``; None: no engine wrote them (a tool's answer, a user's text)."""


PER_TOKEN = ("loss_mask", "rollout_log_probs", "teacher_log_probs")
"""Fields of a sample with one entry for each response token, or None."""
MAX_LOG_PROB = 1e-3
MAX_ID = 2**31
"""The ids that top-p left are below it: a batch's file has 32 bits for each."""


@dataclasses.dataclass(slots=True)
class Sample:
    """One response to one prompt occurrence, from dispatch to training.

    ``tokens`` is prompt + response; the per-token lists (:data:`PER_TOKEN`) cover the response only.
    """

    index: int
    """The trajectory's: unique in the run, the journal's key; siblings share it."""
    group_index: int
    """Samples of one prompt occurrence share it."""
    prompt: str | list[dict[str, Any]] = ""
    """Text after the chat template was applied, or raw messages."""
    tokens: list[int] = dataclasses.field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    """1 where the token is trained; None means all ones."""
    rollout_log_probs: list[float] | None = None
    """The engine's log-probability of each response token (natural log, after temperature), among the tokens that
    sampling had left where ``rollout_top_p_token_ids`` names them."""
    teacher_log_probs: list[float] | None = None
    """A teacher endpoint's log-probability of each response token (on-policy distillation; at temperature 1)."""
    rollout_top_p_token_ids: list[int] | None = None
    """Tokens that top-p and top-k left to choose from, response token after response token (``--use-top-p-replay``)."""
    rollout_top_p_token_offsets: list[int] | None = None
    """Where each response token's begin in that list, and its end; nothing between two: the token was not sampled."""
    rollout_routed_experts: bytes | None = None
    """int16 (little endian) [len(tokens) - 1, layers, K]: the K experts that the engine's routers chose for every token
    but the last."""
    routed_experts_shape: list[int] | None = None
    """[layers, K] of the former."""
    weight_versions: list[str] = dataclasses.field(default_factory=list)
    """One per engine call that produced tokens of this sample."""
    spans: list[Span] = dataclasses.field(default_factory=list)
    """Which version wrote which response tokens, in order, over the whole response; empty: not known."""
    rollout_id: int | None = None
    part: int = 0
    """The sample's place among the siblings that one trajectory fanned out into."""
    remove_sample: bool = False
    """Keeps its place in the group's statistics but is masked out of the loss."""
    status: Status = Status.PENDING
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)

    def reward_value(self, key: str | None = None) -> float:
        """The scalar reward; ``key`` picks it from a dict reward (``--reward-key``)."""
        value: Any = self.reward
        if isinstance(value, dict):
            value = value[key]
        return float(value)

    def effective_mask(self) -> list[int]:
        """Length ``response_length``; all zero when ``remove_sample``."""
        if self.remove_sample:
            return [0] * self.response_length
        return [1] * self.response_length if self.loss_mask is None else list(self.loss_mask)

    @property
    def trained(self) -> bool:
        """At least one token is trained."""
        return not self.remove_sample and self.response_length > 0 and (self.loss_mask is None or any(self.loss_mask))

    def append(
        self,
        tokens: list[int],
        *,
        log_probs: list[float] | None,
        version: str | None,
        trained: bool,
        text: str = "",
    ) -> None:
        """Appends ``tokens`` to the response, and ``text`` to its text; the other lists stay in step.

        ``log_probs``: one for each token, as the engine gave them; None, where no engine wrote the tokens, stands for
        0.0. ``version``: of the weights that wrote them, None where none did. Raises ValueError when the numbers of
        tokens and log-probabilities differ, or when tokens without log-probabilities are to be ``trained``.
        """
        self.append_spans(tokens, [Span(len(tokens), version)], log_probs=log_probs, trained=trained, text=text)

    def append_spans(
        self,
        tokens: list[int],
        spans: Sequence[Span],
        *,
        log_probs: list[float] | None,
        trained: bool,
        text: str = "",
    ) -> None:
        """As :meth:`append`, of tokens that several versions wrote: the lists are copied once, whatever the number of
        spans. Copies of the sample keep theirs."""
        if log_probs is None and trained and tokens:
            raise ValueError(
                f"sample {self.index}: {len(tokens)} tokens to train come without log-probabilities; give those that"
                " they were sampled with, or trained=False"
            )
        if log_probs is not None and len(log_probs) != len(tokens):
            raise ValueError(f"sample {self.index}: {len(log_probs)} log-probabilities for {len(tokens)} tokens")
        if (covered := sum(span.length for span in spans)) != len(tokens):
            raise ValueError(f"sample {self.index}: spans cover {covered} tokens of {len(tokens)}")
        before = self.response_length
        if tokens and (self.spans or not before):  # what is not known of the beginning is not known of the whole
            self.spans = merged([*self.spans, *spans])
        self.tokens = [*self.tokens, *tokens]
        self.response += text
        self.response_length = before + len(tokens)
        if (offsets := self.rollout_top_p_token_offsets) is not None:  # nothing is kept where nobody says what
            self.rollout_top_p_token_offsets = [*offsets, *offsets[-1:] * len(tokens)]
        given = [0.0] * len(tokens) if log_probs is None else log_probs
        self.rollout_log_probs = [*(self.rollout_log_probs or [0.0] * before), *given]
        self.loss_mask = [*([1] * before if self.loss_mask is None else self.loss_mask), *[int(trained)] * len(tokens)]

    @property
    def oldest_step(self) -> int | None:
        """The step of the oldest version that wrote any of it; None when none is known."""
        named = [span.version for span in self.spans] if self.spans else self.weight_versions
        return min((step for step in map(step_of, named) if step is not None), default=None)

    @property
    def step_spans(self) -> list[tuple[int, int]]:
        """(length, step of the version that wrote them) over the response; -1 where none did, or it is not known.

        Where only ``weight_versions`` says something, and all of it the same, it counts for every token.
        """
        spans = self.spans
        if not spans and self.response_length:
            versions = {*self.weight_versions}
            spans = [Span(self.response_length, versions.pop() if len(versions) == 1 else None)]
        steps = [(length, step_of(version)) for length, version in spans]
        return [(length, -1 if step is None else step) for length, step in steps]

    def check(self, rows: int | None = None) -> None:
        """Raises ValueError for what can't be stored or trained: ids beyond the ``rows`` of the embedding, per-token
        lists and spans that do not fit ``response_length``, numbers that are not finite where a token is trained,
        values that are not plain."""
        if not isinstance(self.tokens, list):
            raise ValueError(f"sample {self.index}: tokens is {type(self.tokens).__name__}, not a list of ids")
        if not isinstance(self.response_length, int) or not 0 <= self.response_length <= len(self.tokens):
            raise ValueError(
                f"sample {self.index}: response_length {self.response_length} of {len(self.tokens)} tokens"
            )
        self._check_types("tokens", {int})
        if self.tokens and not 0 <= min(self.tokens) <= max(self.tokens) < (rows or math.inf):
            wrong = next(i for i in self.tokens if not 0 <= i < (rows or math.inf))
            raise ValueError(
                f"sample {self.index}: token {wrong} is not among the {rows} rows of the model's embedding"
            )
        for name in PER_TOKEN:
            values = getattr(self, name)
            if values is not None and len(values) != self.response_length:
                raise ValueError(
                    f"sample {self.index}: {name} has {len(values)} entries for {self.response_length} response tokens"
                )
        self._check_spans()
        strange = {*(self.loss_mask or ())} - {0, 1}
        if strange:
            raise ValueError(f"sample {self.index}: loss_mask holds {strange.pop()!r}, not only 0 and 1")
        for name in ("rollout_log_probs", "teacher_log_probs"):
            if getattr(self, name) is not None:
                self._check_log_probs(name)
        self._check_stored()
        self._check_nucleus(rows)
        self._check_experts()

    def _check_nucleus(self, rows: int | None) -> None:
        """Raises ValueError for kept tokens that do not fit the response or the embedding."""
        offsets = self.rollout_top_p_token_offsets
        ids = self.rollout_top_p_token_ids
        if (offsets is None) != (ids is None):
            raise ValueError(
                f"sample {self.index}: rollout_top_p_token_ids and rollout_top_p_token_offsets go together"
            )
        if ids is not None:
            self._check_types("rollout_top_p_token_ids", {int})
            self._check_types("rollout_top_p_token_offsets", {int})
            if not 0 <= min(ids, default=0) <= max(ids, default=0) < (rows or MAX_ID):
                raise ValueError(
                    f"sample {self.index}: rollout_top_p_token_ids are not among the {rows} rows of the model's"
                    " embedding"
                )
        if (
            offsets is not None
            and ids is not None
            and (
                len(offsets) != self.response_length + 1
                or offsets[0] != 0
                or offsets[-1] != len(ids)
                or sorted(offsets) != list(offsets)
            )
        ):
            raise ValueError(
                f"sample {self.index}: rollout_top_p_token_offsets do not cut {len(ids)} ids for {self.response_length}"
                " tokens"
            )

    def _check_experts(self) -> None:
        """Raises ValueError for chosen experts that do not fit the tokens."""
        routes = self.rollout_routed_experts
        shape = self.routed_experts_shape
        if routes is not None and len(routes) != 2 * math.prod(shape or ()) * (len(self.tokens) - 1):
            raise ValueError(
                f"sample {self.index}: rollout_routed_experts has {len(routes)} bytes for {len(self.tokens)} tokens of"
                f" {shape}"
            )

    def _check_spans(self) -> None:
        for span in self.spans:
            fits = isinstance(span, Span) and type(span.length) is int and span.length > 0
            if not fits or not isinstance(span.version, str | None):
                raise ValueError(f"sample {self.index}: spans holds {span!r}, no Span of a length and a version")
        if self.spans and (covered := sum(span.length for span in self.spans)) != self.response_length:
            raise ValueError(
                f"sample {self.index}: spans cover {covered} tokens of {self.response_length}; Sample.append keeps them"
                " in step, and an empty list says that the versions are not known"
            )

    def _check_stored(self) -> None:
        """Raises ValueError for what the journal or a batch's file does not take."""
        if not isinstance(self.metadata, dict):
            raise ValueError(f"sample {self.index}: metadata is {type(self.metadata).__name__}, not a dict")
        for name in ("response", "label"):
            value = getattr(self, name)
            if not isinstance(value, str) and (name, value) != ("label", None):
                raise ValueError(f"sample {self.index}: {name} is {type(value).__name__}, not text")
        if self.routed_experts_shape is not None:
            self._check_types("routed_experts_shape", {int})
        self._check_types("weight_versions", {str})
        kept = {name: getattr(self, name) for name in ("metadata", "prompt", "response", "label", "weight_versions")}
        if why := unstorable(list(kept.values())):
            name = next((name for name, value in kept.items() if unstorable(value)), "a field")
            raise ValueError(f"sample {self.index}: {name} can't be stored: {why}")

    def _check_types(self, name: str, allowed: set[type]) -> None:
        if strange := {*map(type, getattr(self, name))} - allowed:
            raise ValueError(f"sample {self.index}: {name} holds {sorted(t.__name__ for t in strange)}")

    def _check_log_probs(self, name: str) -> None:
        """Numbers, and where a token is trained finite ones of a probability. Rounding may take one a little above
        1."""
        values = getattr(self, name)
        self._check_types(name, {int, float})
        if all(map(math.isfinite, values)) and max(values, default=0.0) <= MAX_LOG_PROB:
            return
        wrong = next(
            (v for v, m in zip(values, self.effective_mask()) if m and not -math.inf < v <= MAX_LOG_PROB), None
        )
        if wrong is not None:
            raise ValueError(
                f"sample {self.index}: {name} holds {wrong}, no logarithm of a probability, where a token is trained"
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain values only (msgpack and JSON friendly)."""
        out = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        out["status"] = self.status.value
        return out

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Sample":
        """Inverse of :meth:`to_dict`; unknown keys raise TypeError."""
        spans = [Span(*span) for span in values.get("spans") or ()]
        return cls(**{**values, "status": Status(values["status"]), "spans": spans})


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same with neighbours of one version as one."""
    found: list[Span] = []
    for span in spans:
        if found and found[-1].version == span.version:
            found[-1] = Span(found[-1].length + span.length, span.version)
        elif span.length:
            found.append(span)
    return found


@dataclasses.dataclass
class Group:
    """One dealt prompt under way: the trajectories that answer it."""

    index: int
    row: PromptRow
    rendered: Any
    """The prompt as generation needs it, from the phase's render function."""
    finished: list[Sample]
    """Rewarded; with siblings where a trajectory fanned out."""
    pending: list[Sample]
    """One for each trajectory that is to be finished: empty, partial (ABORTED, its response is to be continued), or
    whole (COMPLETED, TRUNCATED) and only without its reward."""
    partial: dict[int, list[Sample]] = dataclasses.field(default_factory=dict)
    """Siblings by the index of a pending trajectory that had fanned out already, and lack only their rewards."""
    leased_at: int | None = None
    """The version, in rollouts trained, at which its oldest tokens can have been written: the staleness gate counts
    from it. None: it is to be dealt, and has no token."""

    @property
    def samples(self) -> list[Sample]:
        """All that it holds: finished, and pending ones as far as they are there."""
        fanned_out = [sample for siblings in self.partial.values() for sample in siblings]
        return [*self.finished, *(s for s in self.pending if s.index not in self.partial), *fanned_out]

    @property
    def oldest_step(self) -> int | None:
        """The step of the oldest version that wrote any of its tokens; None when none is known."""
        return min((step for s in self.samples if (step := s.oldest_step) is not None), default=None)


def trajectories(samples: Iterable[Sample]) -> dict[int, list[Sample]]:
    """Siblings by their trajectory's index, both in order."""
    found: dict[int, list[Sample]] = {}
    for sample in samples:
        found.setdefault(sample.index, []).append(sample)
    return found
