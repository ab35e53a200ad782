"""One option as argparse would know it, without argparse: its flags, how a value is read and how it is written back.

slime's own options and the engines' options are the same dataclass, so that a flag, a profile entry and a phase all go
through :func:`from_words` or :func:`from_yaml` and are checked alike. Invariant, for every native option and value that
these return: the genuine parser, given :func:`to_words` of the value, stores the same value.
"""

import dataclasses
import json
import math
import re
from decimal import Decimal
from typing import Any

from slime_cli.errors import UsageError
from slime_cli.options.characters import BOOLEANS, Plain, absent, as_json

UNSET = type("Unset", (), {"__repr__": lambda self: "UNSET"})()
"""The value that a profile's ``flag: false`` or ``--flag=false`` gives: the flag is taken back, the default holds."""

FLAG_ACTIONS = ("store_true", "store_false", "store_const", "boolean_optional")
_ARGPARSE_NEGATIVE = re.compile(r"-\d+|-\d*\.\d+")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """One option of an engine or of Megatron."""

    dest: str
    """Name of the value in the parsed namespace."""
    flags: tuple[str, ...]
    """Its spellings, the usual one first."""
    action: str = "store"
    """store, append or one of FLAG_ACTIONS."""
    type: str = "str"
    """int, float, str, json, or other: a parser of the engine's own, whose text passes through unread."""
    nargs: int | str | None = None
    choices: tuple[Any, ...] | None = None
    default: Any = None
    const: Any = None
    """The value that the flag alone stores: for store_const, and for nargs ``?``."""
    deprecated: bool = False
    help: str = ""

    @property
    def flag(self) -> str:
        return self.flags[0]

    @property
    def takes_value(self) -> bool:
        return self.action not in FLAG_ACTIONS

    @property
    def many(self) -> bool:
        """The value is a list of words."""
        return self.nargs in ("*", "+") or isinstance(self.nargs, int)

    def set_by(self, flag: str) -> Any:
        """The value that ``flag`` alone, without a word after it, stores."""
        if self.action == "boolean_optional":
            return not flag.startswith("--no-")
        return {"store_true": True, "store_false": False}.get(self.action, self.const)


def from_words(option: Option, words: list[str], where: str) -> Any:
    """The value that ``words`` after a flag mean. ``where`` names the flag, or the profile and key, in errors."""
    if option.nargs == "?" and not words:
        return option.const
    if option.nargs is None or option.nargs == "?":
        value = _one(option, words[0], where)
    else:
        if isinstance(option.nargs, int) and len(words) != option.nargs:
            raise UsageError(f"{where} takes {option.nargs} values, got {len(words)}: {' '.join(words)}")
        value = [_one(option, word, where) for word in words]
    return [value] if option.action == "append" else value


def from_yaml(option: Option, key: str, value: Any, where: str) -> Any:
    """The value that a profile's ``key: value`` means; UNSET for a flag with ``false`` and for an entry with nothing.

    ``key`` has hyphens, ``value`` is what :mod:`slime_cli.options.characters` reads, or Python's own.
    """
    if not option.takes_value:
        given = BOOLEANS.get(value) if isinstance(value, str) else value
        if not isinstance(given, bool):
            raise UsageError(f"{where} is a flag and takes true (given) or false (not given), got {_written(value)!r}")
        return option.set_by(f"--{key}") if given else UNSET
    if absent(value):
        return UNSET
    if isinstance(value, list) and option.action == "append":
        items = [item if isinstance(item, list) else [item] for item in value]
        return [from_words(option, [_word(option, word, where) for word in item], where)[0] for item in items]
    if isinstance(value, list) and option.many:
        return from_words(option, [_word(option, item, where) for item in value], where)
    if isinstance(value, list) and option.type == "other":
        return from_words(option, [_written(value)], where)
    return from_words(option, [_word(option, value, where)], where)


def to_words(option: Option, value: Any) -> list[str]:
    """The argv words with which the genuine parser stores ``value`` at ``option.dest``."""
    if option.action == "boolean_optional":
        return [next(flag for flag in option.flags if flag.startswith("--no-") != bool(value))]
    if not option.takes_value:
        return [option.flag]
    if option.action == "append":
        once = dataclasses.replace(option, action="store")
        return [word for item in value for word in to_words(once, item)]
    if option.nargs == "?" and value == option.const:
        return [option.flag]
    texts = [_argv_text(option, item) for item in value] if option.many else [_argv_text(option, value)]
    if option.many and len(texts) != 1:
        return [option.flag, *texts]
    text = texts[0]
    return [f"{option.flag}={text}"] if text.startswith("-") else [option.flag, text]


def check_passable(option: Option, value: Any, where: str) -> None:
    """Refuses what no argv can say to a genuine parser: a list of several words of which one looks like a flag."""
    lists = [] if not option.many else value if option.action == "append" else [value]
    for words in ([_argv_text(option, item) for item in one] for one in lists):
        for word in words if len(words) > 1 else []:
            if word.startswith("-") and not _ARGPARSE_NEGATIVE.fullmatch(word):
                raise UsageError(f"{where}: {word!r} looks like a flag", "the engine cannot be given it within a list")


def _one(option: Option, word: str, where: str) -> Any:
    value = _convert(option, word, where)
    if option.choices is not None and value not in option.choices and word not in option.choices:
        raise UsageError(f"{where} got {word!r}", f"choose from {', '.join(map(str, option.choices))}")
    return value


def _convert(option: Option, word: str, where: str) -> Any:
    try:
        if option.type == "int":
            return int(word)
        if option.type == "float" and not math.isnan(float(word)):
            return float(word)
        if option.type == "json":
            return json.loads(word, parse_constant=_no_number)
    except ValueError:
        pass
    if option.type in ("int", "float", "json"):
        raise UsageError(f"{where} takes {_kind(option)}, got {word!r}")
    if option.type == "other" and word.removeprefix("-").isdecimal() and str(int(word)) == word:
        return int(word)
    return word


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _kind(option: Option) -> str:
    one = {"int": "a whole number", "float": "a number", "json": "JSON"}.get(option.type, "text")
    return f"a list, each item {one}" if option.many else one


def _word(option: Option, value: Any, where: str) -> str:
    """A YAML scalar (or, for json, any value) as the word one would type."""
    empty = isinstance(value, Plain) and not value
    if isinstance(value, str) and not empty:
        return str(value)
    if option.type == "json":
        return json.dumps(as_json(value))
    if isinstance(value, bool | int | float):
        return _written(value)
    raise UsageError(f"{where} takes {_kind(option)}, got {_written(value)}", 'write "" for an empty text' * empty)


def _written(value: Any) -> str:
    """A value from YAML as it could be written there on one line."""
    if isinstance(value, list):
        return f"[{', '.join(map(_written, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_written(item)}' for key, item in value.items())}}}"
    return str(value).lower() if isinstance(value, bool) else str(value) or "nothing"


def _argv_text(option: Option, value: Any) -> str:
    if option.type == "json":
        return json.dumps(value)
    if isinstance(value, float) and "e" in repr(value) and value < 0:
        return format(Decimal(repr(value)), "f")  # argparse takes -1e-05 for a flag, -0.00001 for a number
    return str(value)


def expand(pattern: str) -> list[int] | None:
    """The list that a pattern of plain runs means, ``[0]+[1]*2`` or ``[0,1,1]``; None for anything more elaborate."""
    out: list[int] = []
    for run in pattern.replace(" ", "").removeprefix("(").removesuffix(")").split("+"):
        found = re.fullmatch(r"\[([\d,]+)\](?:\*(\d+))?", run)
        if not found:
            return None
        out += [int(item) for item in found[1].split(",")] * int(found[2] or 1)
    return out
