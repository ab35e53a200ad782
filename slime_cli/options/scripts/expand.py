"""Words expanded as bash would, from variables that are known; what is not known stays as it is written, with a note.

Called by :mod:`.follow`, which is what sets the variables.
"""

import dataclasses
import fnmatch
import pathlib
import re
from collections.abc import Mapping

from slime_cli.options.scripts import tree
from slime_cli.options.scripts.numbers import calculated
from slime_cli.options.scripts.tree import Word

_FOLDER = re.compile(r"dirname.*(BASH_SOURCE|\$0)", re.S)
"""``$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)`` and its kind: the script's folder."""
_JOINED = re.compile(r"""\s*IFS=(['"]?)(.)[^;]*\1;\s*echo\s+"\$\{(\w+)\[\*\]\}"\s*""")
"""``$(IFS=', '; echo "${NAME[*]}")``: the items of an array, joined."""


@dataclasses.dataclass(frozen=True, order=True)
class Note:
    """Something in a script that cannot be known without running it, and its place."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


Notes = frozenset[Note]
NOTHING: Notes = frozenset()


@dataclasses.dataclass(frozen=True)
class Value:
    """A text, with what is not known of it."""

    text: str
    notes: Notes = NOTHING

    def __add__(self, other: "Value") -> "Value":
        return Value(self.text + other.text, self.notes | other.notes)


@dataclasses.dataclass(frozen=True)
class Array:
    """Items, with what is not known of them all."""

    items: tuple[Value, ...]
    notes: Notes = NOTHING


class Variables:
    """The variables that are known at one place of a script, and their values."""

    def __init__(self, path: pathlib.Path, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self.folder = path.resolve().parent
        """The script's own."""
        self.current = str(path)
        """The file that is read."""
        self.read: list[str] = []
        self.variables: dict[str, Value | Array] = {}
        self.lacking: list[Note] = []
        """Files that are read there and are not here."""
        self.empty = False
        """A variable that nobody set is empty: in a condition."""
        self.line = 0
        """Where the word that is expanded stands."""

    def note(self, line: int, text: str) -> Notes:
        return frozenset({Note(self.current, line, text)})

    # -- words ---------------------------------------------------------------------------------------------------------

    def words(self, word: Word) -> tuple[list[Value], Notes]:
        """The words that one becomes, and notes about some that may be lacking."""
        out: list[Value] = []
        current: Value | None = None
        notes: Notes = NOTHING
        self.line = word.line
        gone = self.vanishes(word)
        if gone is not None:
            return [], gone
        for part in word.parts:
            if isinstance(part, tree.Text):
                current = (current or Value("")) + Value(part.text)
                continue
            items, more = self.items(part)
            notes |= more
            if items is None:
                value = self.part(part)
                if part.quoted or value.notes:
                    current = (current or Value("")) + value
                    continue
                items = tuple(Value(text, value.notes) for text in value.text.split())
            for place, item in enumerate(items):
                if place:
                    out.append(current or Value(""))
                    current = None
                current = (current or Value("")) + item
        if current is not None:
            out.append(current)
        return out, notes

    def vanishes(self, word: Word) -> Notes | None:
        """Notes where it is ``"${NAME[@]}"`` alone, of an array without items; None for any other word."""
        texts = [part for part in word.parts if isinstance(part, tree.Text)]
        others = [part for part in word.parts if not isinstance(part, tree.Text)]
        if any(part.text for part in texts) or len(others) != 1:
            return None
        items, notes = self.items(others[0])
        return notes if items == () else None

    def items(self, part: tree.Part) -> tuple[tuple[Value, ...] | None, Notes]:
        """The items of ``"${NAME[@]}"``; None for anything else."""
        if not isinstance(part, tree.Variable) or part.length:
            return None, NOTHING
        if part.name in ("@", "*"):
            return (), NOTHING
        if part.index == "*" and part.quoted:
            return None, NOTHING
        held = self.variables.get(part.name)
        if part.index not in ("@", "*") and not (isinstance(held, Array) and part.index is None and not part.quoted):
            return None, NOTHING
        if isinstance(held, Value):
            return (held,), held.notes
        if held is None:
            missing = "".join(f"; {note}" for note in self.lacking)
            return (), self.note(self.line, f"{part.name} is set nowhere{missing}")
        return (held.items if part.index else held.items[:1]), held.notes

    def joined(self, word: Word) -> Value:
        """The word as one text, as in an assignment."""
        out = Value("")
        self.line = word.line
        for part in word.parts:
            if isinstance(part, tree.Text):
                out += Value(part.text)
                continue
            items, notes = self.items(part)
            if items is None:
                out += self.part(part)
            else:
                out += Value(" ".join(item.text for item in items), notes.union(*(item.notes for item in items)))
        return out

    def part(self, part: tree.Part) -> Value:
        if isinstance(part, tree.Text):
            return Value(part.text)
        if isinstance(part, tree.Substitution):
            return self.substitution(part)
        held = self.variables.get(part.name)
        if part.length:
            return Value(str(len(held.items if isinstance(held, Array) else held.text if held else "")))
        if isinstance(held, Array) and part.index == "*":
            held = self.all_of(held)
        elif isinstance(held, Array):
            held = self.element(held, part)
        if part.name == "BASH_SOURCE" or part.name == "0":
            held = Value(self.current)
        if held is None and part.name in self.environment:
            held = Value(self.environment[part.name])
        if part.operator in (":-", "-", ":=", "=") and part.operand is not None:
            return held if held is not None and (held.text or part.operator == "-") else self.joined(part.operand)
        if part.operator in (":+", "+") and part.operand is not None:
            return self.joined(part.operand) if held is not None and held.text else Value("")
        if part.operator in (":?", "?"):
            part = dataclasses.replace(part, operator="")
        if part.operator in ("%", "#") and held is not None and part.operand is not None and not held.notes:
            return self.trimmed(held, part)
        if held is None and self.empty and not part.operator:
            return Value("")
        if part.operator or held is None:
            what = f"{part.source} is not followed" if part.operator else f"{part.source} is not set here"
            return Value(part.source, self.note(self.line, f"{what}: it stays as it is written"))
        return held

    def all_of(self, held: Array, between: str = " ") -> Value:
        notes = held.notes.union(*(item.notes for item in held.items))
        return Value(between.join(item.text for item in held.items), notes)

    def element(self, held: Array, part: tree.Variable) -> Value:
        index = self.number(part.index) if part.index else 0
        if index is None or held.notes or not -len(held.items) <= index < len(held.items):
            return Value(part.source, held.notes | self.note(self.line, f"{part.source} is not known here"))
        return held.items[index]

    def trimmed(self, held: Value, part: tree.Variable) -> Value:
        """``${NAME%pattern}`` and ``${NAME##pattern}``."""
        assert part.operand is not None
        pattern = self.joined(part.operand).text
        greedy = pattern.startswith(part.operator)
        pattern = pattern[1:] if greedy else pattern
        text = held.text
        lengths = range(len(text) + 1)
        for length in reversed(lengths) if greedy else lengths:
            end = text[len(text) - length :] if part.operator == "%" else text[:length]
            if fnmatch.fnmatchcase(end, pattern):
                return Value(text[: len(text) - length] if part.operator == "%" else text[length:])
        return held

    def substitution(self, part: tree.Substitution) -> Value:
        if part.arithmetic:
            found = self.number(part.inside)
            if found is not None:
                return Value(str(found))
        elif _FOLDER.search(part.inside):
            return Value(str(self.folder if self.current == self.read[0] else pathlib.Path(self.current).parent))
        elif joined := _JOINED.fullmatch(part.inside):
            held = self.variables.get(joined[3])
            if isinstance(held, Array):
                return self.all_of(held, joined[2])
        return Value(part.source, self.note(self.line, f"{part.source} is not run: it stays as it is written"))

    # -- conditions and numbers ----------------------------------------------------------------------------------------

    def tested(self, word: Word) -> Value:
        """The word in a condition, where a variable that nobody set is empty, as in bash."""
        self.empty = True
        try:
            return self.joined(word)
        finally:
            self.empty = False

    def count(self, text: str) -> None:
        """An assignment of numbers: ``i=0``, ``i++``, ``i+=2``."""
        for one in filter(None, (part.strip() for part in text.split(","))):
            found = re.fullmatch(r"(\w+)\s*(\+\+|--|[-+*]?=)\s*(.*)", one, re.S) or re.fullmatch(
                r"()(\+\+|--)(\w+)", one
            )
            if not found:
                continue
            name = found[1] or found[3]
            sign = found[2]
            before = self.number(name) or 0
            given = 1 if sign in ("++", "--") else self.number(found[3])
            if given is None:
                self.variables[name] = Value(f"${name}", self.note(0, f"{one} is not known here"))
                continue
            after = {"++": before + 1, "--": before - 1, "=": given, "+=": before + given, "-=": before - given}
            self.variables[name] = Value(str(after.get(sign, before * given)))

    def number(self, text: str) -> int | None:
        """The value of an arithmetic expression; None where it is not known."""
        unknown = False

        def value(found: re.Match[str]) -> str:
            nonlocal unknown
            name = found[1] or found[2]
            held = self.variables.get(name)
            if held is None and name in self.environment:
                held = Value(self.environment[name])
            if held is None:
                return "0"
            size = re.fullmatch(r"\$\{#(\w+)\[[@*]\]\}", found[0])
            if isinstance(held, Array) and size:
                return str(len(held.items))
            if not isinstance(held, Value) or held.notes or not re.fullmatch(r"\s*-?\d+\s*", held.text):
                unknown = True
                return "0"
            return f"({held.text})"

        text = text.replace("$((", "((")
        plain = re.sub(r"\$?\{?#?\b([A-Za-z_]\w*)(?:\[[@*]\])?\}?|\$(\w+)", value, text)
        plain = plain.replace("&&", " and ").replace("||", " or ")
        plain = re.sub(r"!(?!=)", " not ", plain).replace("/", "//")
        return None if unknown else calculated(plain.strip() or "0")
