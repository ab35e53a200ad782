"""How an option of slime's own is declared: once, as a typed field of a frozen dataclass in
:mod:`slime_cli.options.groups`.

Everything that is known of an option is here: parser, ``--help``, bounds, what it needs, who reads it and whether a
resume may change it are read from the field. The field's annotation says what a value is: ``int``, ``float``, ``str``,
``bool`` (a flag), ``dict`` (JSON), a list of those, or a ``Literal`` of choices; ``| None`` where it may be left out.
It is the type once everything is resolved and checked: what :mod:`slime_cli.options.derive` fills in and what
:mod:`slime_cli.options.checks` require has no ``| None``, and is None only until then.
"""

import copy
import dataclasses
import math
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any, Literal

from slime_cli.options.spec import Option

Resume = Literal["same", "free"]
"""May a resumed run have another value? no, because what was trained so far would not be what it says; or
yes."""
EITHER = ("train", "serve-rollout")
"""Commands of an option that both of them read."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bounds:
    """Numbers that make sense."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    also: tuple[float, ...] = ()
    """Numbers outside the bounds that have a meaning of their own; infinity is one only if it is here."""

    def allow(self, value: float) -> bool:
        if value in self.also:
            return True
        return (
            math.isfinite(value)
            and (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (self.lt is None or value < self.lt)
        )

    def __str__(self) -> str:
        """Completes "it must be"."""
        if self.ge is not None and self.le is not None:
            text = f"between {self.ge} and {self.le}"
        else:
            words = {"at least": self.ge, "above": self.gt, "at most": self.le, "below": self.lt}
            text = " and ".join(f"{word} {bound}" for word, bound in words.items() if bound is not None)
        if math.inf in self.also:
            return f"{text}, or inf"
        return " or ".join([*map(str, self.also), text])


AT_LEAST_0 = Bounds(ge=0)
AT_LEAST_1 = Bounds(ge=1)
ABOVE_0 = Bounds(gt=0)
PORT = Bounds(ge=1, le=65535)


@dataclasses.dataclass(frozen=True)
class Need:
    """The condition under which an option has an effect."""

    options: tuple[str, ...]
    """One of these is given, or (with ``values``) the only one has one of those."""
    values: tuple[str, ...] = ()

    def met(self, options: Any) -> bool:
        """``options``: slime's own, resolved."""
        found = [getattr(options, name) for name in self.options]
        return found[0] in self.values if self.values else any(found)


def given(*options: str) -> Need:
    return Need(options)


def having(option: str, *values: str) -> Need:
    return Need((option,), values)


POLICY = having("loss_type", "policy_loss", "custom_loss")
SUPERVISED = having("loss_type", "sft_loss")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnOption(Option):
    """An option of slime's own."""

    group: str
    bounds: Bounds | None = None
    """None: any number, or no number at all."""
    needs: tuple[Need, ...] = ()
    """All of them."""
    commands: tuple[str, ...] = ("train",)
    resume: Resume = "same"
    secret: bool = False
    """Its value is shown and recorded nowhere."""

    @property
    def spelling(self) -> str:
        """The flag with what its value looks like."""
        if not self.takes_value:
            return self.flag
        if self.choices:
            value = "{" + ",".join(map(str, self.choices)) + "}"
        else:
            value = {"int": "N", "float": "X", "json": "JSON"}.get(self.type, "TEXT")
        return f"{self.flag} {value}{' ...' if self.many else ''}"


def option(
    default: Any,
    help: str,
    *,
    flag: str = "",
    bounds: Bounds | None = None,
    needs: Need | tuple[Need, ...] = (),
    commands: tuple[str, ...] = ("train",),
    resume: Resume = "same",
    secret: bool = False,
) -> Any:
    """A field of a group. ``flag`` where it is not the name with hyphens.

    A flag that is on by default stores False, so that code reads a positive.
    """
    needs = (needs,) if isinstance(needs, Need) else needs
    metadata = dict(flag=flag, help=help, bounds=bounds, needs=needs, commands=commands, resume=resume, secret=secret)
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: copy.deepcopy(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@typing.dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(option,))
def group[T](name: str, *, needs: Need | None = None) -> Callable[[type[T]], type[T]]:
    """A frozen dataclass of options; ``needs`` is needed by all of them."""

    def made(declared: type[T]) -> type[T]:
        # Nobody makes a group by itself: only fields are read, and generated methods would cost every start 15 ms.
        found: Any = dataclasses.dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)(declared)
        found.NAME = name
        found.NEEDS = (needs,) if needs else ()
        return found

    return made


def options_of(declared: Any) -> Iterator[OwnOption]:
    """Every option that the fields of a group declare."""
    for field in dataclasses.fields(declared):
        more = dict(field.metadata)
        flag = more.pop("flag") or f"--{field.name.replace('_', '-')}"
        factory: Any = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        kind = _kind(field.type)
        if kind["type"] == "bool":
            kind["action"] = "store_false" if default else "store_true"
        more["needs"] = declared.NEEDS + more["needs"]
        yield OwnOption(dest=field.name, flags=(flag,), default=default, group=declared.NAME, **kind, **more)


def _kind(annotation: Any) -> dict[str, Any]:
    """Type, choices and number of words."""
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        (annotation,) = (arm for arm in typing.get_args(annotation) if arm is not types.NoneType)
    origin = typing.get_origin(annotation)
    if origin is list:
        return _kind(typing.get_args(annotation)[0]) | {"nargs": "+"}
    if origin is Literal:
        return {"type": "str", "choices": typing.get_args(annotation)}
    if origin is dict:
        return {"type": "json"}
    return {"type": annotation.__name__}
