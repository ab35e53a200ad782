"""A script as a tree: made by :mod:`.parse`, followed by :mod:`.follow`."""

import dataclasses


class Unread(Exception):
    """A construct that this does not read."""

    def __init__(self, line: int, what: str) -> None:
        super().__init__(f"line {line}: {what}")
        self.line = line
        self.what = what


@dataclasses.dataclass(frozen=True)
class Text:
    """Characters that stand for themselves."""

    text: str
    quoted: bool


@dataclasses.dataclass(frozen=True)
class Variable:
    """``$NAME``, ``${NAME:-word}``, ``${NAME[@]}``, ``${#NAME[@]}``."""

    name: str
    source: str
    """As it is written."""
    quoted: bool
    index: str | None = None
    operator: str = ""
    """What stands behind the name: ``:-``, ``-``, ``:=``, ``:+``, ``%``...; empty for nothing."""
    operand: "Word | None" = None
    length: bool = False


@dataclasses.dataclass(frozen=True)
class Substitution:
    """``$(...)``, ``$((...))`` or backquotes, as they are written."""

    source: str
    inside: str
    quoted: bool
    arithmetic: bool = False


Part = Text | Variable | Substitution


@dataclasses.dataclass(frozen=True)
class Word:
    """One word."""

    parts: tuple[Part, ...]
    line: int

    @property
    def plain(self) -> str | None:
        """Its text where it has no expansion."""
        texts = [part.text for part in self.parts if isinstance(part, Text)]
        return "".join(texts) if len(texts) == len(self.parts) else None

    @property
    def bare(self) -> str | None:
        """Its text where nothing in it is quoted either."""
        return None if any(part.quoted for part in self.parts) else self.plain


@dataclasses.dataclass(frozen=True)
class Assignment:
    """``NAME=word``, ``NAME=(words)``, with ``+=`` appended to."""

    name: str
    value: Word | tuple[Word, ...]
    append: bool
    line: int
    element: bool = False
    """``NAME[index]=word``, which is not followed."""


@dataclasses.dataclass(frozen=True)
class Simple:
    """A command with its words; the assignments before them."""

    line: int
    assignments: tuple[Assignment, ...]
    words: tuple[Word, ...]


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """``((...))`` as a command."""

    line: int
    text: str


@dataclasses.dataclass(frozen=True)
class Chain:
    """Commands joined by ``&&`` and ``||``: each with the operator before it."""

    line: int
    links: tuple[tuple[str, "Node"], ...]


@dataclasses.dataclass(frozen=True)
class Apart:
    """Commands of a pipe, a subshell or the background: what they set is lost."""

    line: int
    body: "Body"


@dataclasses.dataclass(frozen=True)
class If:
    """Conditions with what follows; the last one of ``else`` has none."""

    line: int
    branches: tuple[tuple["Body | None", "Body"], ...]


@dataclasses.dataclass(frozen=True)
class For:
    """``for NAME in words`` or ``for ((a; b; c))``."""

    line: int
    name: str
    words: tuple[Word, ...]
    counting: tuple[str, str, str] | None
    body: "Body"


@dataclasses.dataclass(frozen=True)
class Case:
    """``case word in pattern) ... esac``."""

    line: int
    word: Word
    branches: tuple[tuple[tuple[Word, ...], "Body"], ...]


@dataclasses.dataclass(frozen=True)
class While:
    """A loop whose end is not known without running it."""

    line: int
    body: "Body"


@dataclasses.dataclass(frozen=True)
class Function:
    """A definition."""

    line: int
    name: str
    body: "Body"


@dataclasses.dataclass(frozen=True)
class Group:
    """``{ ... }``."""

    line: int
    body: "Body"


type Node = Simple | Arithmetic | Chain | Apart | If | For | Case | While | Function | Group
type Body = tuple[Node, ...]
