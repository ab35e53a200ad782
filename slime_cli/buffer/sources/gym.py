"""Endless checked questions from reasoning-gym: ``reasoning-gym:TASK?size=2000&seed=1&part=0:0.9&ARG=value``.

Invariants: an item depends only on (task, arguments, seed, position); ``part`` cuts by the question's hash, so two
sources with disjoint parts never share a question whatever their seeds and sizes; ``distinct=true`` gives each question
once. Importing this module does not import reasoning_gym (seconds); opening a source does.
"""

import collections.abc
import dataclasses
import enum
import hashlib
import types
import typing
from array import array
from typing import Any

from slime_cli.buffer.sources.base import PromptSource, parse_query
from slime_cli.buffer.types import PromptRow
from slime_cli.errors import DataError, UsageError
from slime_cli.gym import freeze, load_library, make_task
from slime_cli.text import nearest

DEFAULT_SIZE = 100_000
TRIES_PER_ROW = 20
MAX_TRIES = 200_000
REFUSED = {
    "game_of_life_halting": "its verifier pays full reward for any text",
    "composite": "it mixes other tasks, which a URI cannot spell; give each task a source of its own",
}
TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def convert(texts: list[str], kind: Any, default: Any) -> Any:
    """Query values as a configuration field's type; raises ValueError."""
    origin = typing.get_origin(kind)
    inner = typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        kinds = [part for part in inner if part is not type(None)]
        return None if texts == ["none"] else convert(texts, kinds[0], default)
    sequence = origin or kind
    if sequence in (list, tuple, collections.abc.Sequence):
        sample = next(iter(default), "") if isinstance(default, list | tuple) else ""
        element = inner[0] if inner else type(sample)
        return (list if sequence is list else tuple)(convert([text], element, sample) for text in texts)
    if len(texts) != 1:
        raise ValueError(f"takes one value, not {len(texts)}")
    return convert_one(texts[0], kind, origin, inner)


def convert_one(text: str, kind: Any, origin: Any, inner: tuple) -> Any:
    if origin is typing.Literal:
        if text not in map(str, inner):
            raise ValueError(f"{text!r} is none of {', '.join(map(str, inner))}")
        return next(choice for choice in inner if str(choice) == text)
    if kind is bool:
        if text.lower() not in TRUTH:
            raise ValueError(f"{text!r} is neither true nor false")
        return TRUTH[text.lower()]
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        if text not in kind.__members__:
            raise ValueError(f"{text!r} is none of {', '.join(kind.__members__)}")
        return kind[text]
    if kind in (int, float, str):
        return kind(text)
    raise ValueError("cannot be given in a URI")


@dataclasses.dataclass(frozen=True)
class GymOptions:
    """A parsed URI: what this project reads, and what goes to the task."""

    task: str
    size: int
    seed: int
    distinct: bool
    part: tuple[float, float]
    rm_type: str
    """The grader of the answers: the task's own verifier, or another that takes its answer as the label."""
    arguments: dict[str, Any]

    @classmethod
    def parse(cls, rest: str, uri: str) -> "GymOptions":
        """Checks the task and every argument against the library, with the nearest name for a wrong one."""
        task, _, query = rest.partition("?")
        if task in REFUSED:
            raise UsageError(f"{uri}: the task {task!r} is refused: {REFUSED[task]}", "choose another task")
        known = load_library().factory.DATASETS
        if task not in known:
            raise UsageError(
                f"{uri}: unknown task {task!r}{nearest(task, known)}", f"one of {', '.join(sorted(known))}"
            )
        texts = parse_query(query, uri)

        def special(name: str, kind: Any, default: Any) -> Any:
            return checked(uri, name, texts.pop(name), kind, default) if name in texts else default

        size = special("size", int, DEFAULT_SIZE)
        seed = special("seed", int, 0)
        distinct = special("distinct", bool, False)
        part = parse_part(uri, texts.pop("part", ["0:1"]))
        rm_type = special("rm_type", str, "reasoning-gym")
        if size < 1:
            raise UsageError(f"{uri}: size={size}", "size must be at least 1")
        fields = {field.name: field for field in dataclasses.fields(known[task][1])}
        for name in texts:
            if name not in fields:
                names = [*fields, "distinct", "part", "rm_type"]
                raise UsageError(
                    f"{uri}: {task} has no argument {name!r}{nearest(name, names)}", f"one of {', '.join(names)}"
                )
        hints = typing.get_type_hints(known[task][1])
        values = {name: checked(uri, name, texts[name], hints[name], fields[name].default) for name in texts}
        return cls(task, size, seed, distinct, part, rm_type, values)


def checked(uri: str, name: str, texts: list[str], kind: Any, default: Any) -> Any:
    try:
        return convert(texts, kind, default)
    except ValueError as error:
        wanted = getattr(kind, "__name__", None) if isinstance(kind, type) else str(kind).replace("typing.", "")
        raise UsageError(f"{uri}: {name}={','.join(texts)}: {error}", f"{name} is {wanted}") from None


def parse_part(uri: str, texts: list[str]) -> tuple[float, float]:
    try:
        start, end = map(float, ",".join(texts).split(":"))
        if not 0 <= start < end <= 1:
            raise ValueError
    except ValueError:
        raise UsageError(f"{uri}: part={','.join(texts)}", "write part=a:b with 0 <= a < b <= 1") from None
    return start, end


class GymSource(PromptSource):
    """Rows are generated when asked for; with ``distinct`` or ``part``, opening enumerates and keeps positions."""

    def __init__(self, name: str, rest: str, window: slice) -> None:
        super().__init__(name)
        self.options = options = GymOptions.parse(rest, name)
        self.tried = 0
        """Items generated on opening."""
        enumerate_first = options.distinct or options.part != (0.0, 1.0)
        share = options.part[1] - options.part[0]
        tries = min(MAX_TRIES, int(TRIES_PER_ROW * options.size / share)) if enumerate_first else options.size
        try:
            self._items = make_task(options.task, {**options.arguments, "size": tries, "seed": options.seed})
        except (AssertionError, ValueError, TypeError) as error:
            message = f"{name}: {options.task} refuses these arguments: {error or type(error).__name__}"
            raise UsageError(message, "see the task's configuration in reasoning-gym") from None
        self._chosen = self._enumerate(tries) if enumerate_first else range(options.size)
        if not self._chosen:
            raise DataError(
                f"{name}: none of the {self.tried} questions tried is in part={options.part}", "widen the part"
            )
        self._select(len(self._chosen), window)

    def _enumerate(self, tries: int) -> array:
        """Positions of the questions in the part (first occurrences only if ``distinct``), at most ``size``."""
        options = self.options
        seen = set()
        chosen = array("Q")
        low, high = (int(edge * 2**64) for edge in options.part)
        for position in range(tries):
            self.tried += 1
            digest = hashlib.sha256(self._item(position)["question"].encode()).digest()
            place = int.from_bytes(digest[:8])
            if not low <= place < high or (options.distinct and digest[:16] in seen):
                continue
            if options.distinct:
                seen.add(digest[:16])
            chosen.append(position)
            if len(chosen) == options.size:
                break
        return chosen

    def _item(self, position: int) -> dict[str, Any]:
        try:
            return self._items[position]
        except Exception as error:
            message = f"{self.name}: item {position + 1} cannot be generated: {type(error).__name__}: {error}"
            raise DataError(message, "other arguments or another seed may do") from error

    def _get(self, good: int) -> PromptRow:
        position = self._chosen[good]
        item = self._item(position)
        entry = {key: freeze(item[key]) for key in ("question", "answer", "metadata")}
        gym = {"task": self.options.task, "arguments": freeze(plain_arguments(self.options.arguments)), "entry": entry}
        label = None if item["answer"] is None else str(item["answer"])
        metadata = {"rm_type": self.options.rm_type, "reasoning_gym": gym}
        return PromptRow(item["question"], label, metadata, self.name, position + 1)

    def fingerprint(self) -> str:
        import importlib.metadata

        version = importlib.metadata.version("reasoning-gym")
        options = dataclasses.asdict(self.options)
        if options["rm_type"] == "reasoning-gym":
            del options["rm_type"]  # as before there was a choice, so that older runs resume
        parts = (version, tuple(options.values()), self._order)
        return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def plain_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments as a worker can be given them again: enum members by value."""
    return {name: value.value if isinstance(value, enum.Enum) else value for name, value in arguments.items()}
