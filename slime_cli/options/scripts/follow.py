"""A launch script followed without running anything: what its variables hold where it starts slime.

Variables and arrays, ``source``, conditions, loops that count and ``printf -v`` are followed as bash would. What cannot
be known (a command's output, a variable that nobody set, a condition on those) stays as it is written and carries a
:class:`Note` with its line, wherever it goes; so a value that nothing needs costs nothing.
"""

import dataclasses
import fnmatch
import itertools
import os
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence

from slime_cli.errors import UsageError
from slime_cli.options.scripts import tree
from slime_cli.options.scripts.expand import NOTHING, Array, Note, Notes, Value, Variables
from slime_cli.options.scripts.numbers import tested
from slime_cli.options.scripts.parse import parse
from slime_cli.options.scripts.tree import Body, Node

PROGRAMS = ("train.py", "train_async.py")
"""slime's own."""
TURNS = 10_000
DEPTH = 20


@dataclasses.dataclass(frozen=True)
class Start:
    """Where the script starts slime."""

    file: str
    line: int
    program: str
    """One of PROGRAMS."""
    words: tuple[Value, ...]
    """Those behind the program."""
    notes: Notes
    """About words that may be lacking."""


@dataclasses.dataclass(frozen=True)
class Followed:
    """What a script does, as far as it is of interest."""

    start: Start
    exported: tuple[str, ...]
    """Names of variables that it hands to what it starts."""
    read: tuple[str, ...]
    """The files that it consists of."""


def follow(path: pathlib.Path, environment: Mapping[str, str] = os.environ) -> Followed:
    """Raises UsageError for a script that cannot be read, or that does not start slime once."""
    if path.suffix == ".py":
        fix = "print its train_args, and give them to slime train"
        raise UsageError(f"--from-script {path}: only shell scripts are read, this is a program", fix)
    follower = _Follower(path, environment)
    follower.file(path)
    starts = {(start.file, start.line): start for start in follower.starts}
    if len(starts) != 1:
        where = ", ".join(f"{file}:{line}" for file, line in starts) or "nowhere"
        fix = f"one of {', '.join(PROGRAMS)} must stand in one command, as a word of its own"
        raise UsageError(f"--from-script {path} starts slime {len(starts)} times: {where}", fix)
    return Followed(next(iter(starts.values())), tuple(dict.fromkeys(follower.exported)), tuple(follower.read))


class _Follower(Variables):
    def __init__(self, path: pathlib.Path, environment: Mapping[str, str]) -> None:
        super().__init__(path, environment)
        self.functions: dict[str, Body] = {}
        self.exported: list[str] = []
        self.starts: list[Start] = []
        self.depth = 0

    def file(self, path: pathlib.Path) -> None:
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--from-script {path}: cannot be read ({error})", "give a shell script") from None
        before, self.current = self.current, str(path)
        self.read.append(str(path))
        try:
            self.body(parse(text))
        except tree.Unread as error:
            fix = "write it more plainly, or give the options to slime train yourself"
            raise UsageError(f"{path}:{error.line}: {error.what}", fix) from None
        finally:
            self.current = before

    # -- commands ------------------------------------------------------------------------------------------------------

    def body(self, nodes: Body) -> None:
        for node in nodes:
            self.node(node)

    def node(self, node: Node) -> None:
        self.depth += 1
        try:
            if self.depth > DEPTH * 3:
                raise tree.Unread(node.line, "functions or files that call themselves")
            self._node(node)
        finally:
            self.depth -= 1

    def _node(self, node: Node) -> None:
        match node:
            case tree.Simple():
                self.simple(node)
            case tree.Chain():
                self.chain(node)
            case tree.Apart():
                kept = dict(self.variables)
                self.body(node.body)
                self.variables = kept
            case tree.If():
                self.if_(node)
            case tree.For():
                self.for_(node)
            case tree.Case():
                self.case(node)
            case tree.While():
                self.perhaps([node.body, ()], node.line, "a loop whose turns are not counted here")
            case tree.Function():
                self.functions[node.name] = node.body
            case tree.Group():
                self.body(node.body)
            case tree.Arithmetic():
                self.count(node.text)

    def simple(self, node: tree.Simple) -> None:
        first = node.words[0].plain if node.words else None
        if not node.words or first in ("export", "declare", "local", "readonly", "typeset"):
            for assignment in node.assignments:
                self.assign(assignment)
            if first == "export":
                self.exported += [assignment.name for assignment in node.assignments]
            return
        if first in ("source", "."):
            self.source(node)
        elif first == "printf" and len(node.words) > 3 and node.words[1].plain == "-v":
            self.printf(node)
        elif first == "unset":
            for word in node.words[1:]:
                self.variables.pop(word.plain or "", None)
        elif first in ("read", "mapfile", "readarray"):
            for word in node.words[1:]:
                if word.plain and not word.plain.startswith("-"):
                    self.variables[word.plain] = Value(f"${word.plain}", self.note(node.line, f"{first} is not run"))
        elif first in self.functions:
            self.body(self.functions[first])
        else:
            self.look(node)

    def look(self, node: tree.Simple) -> None:
        """Whether the command starts slime."""
        notes: Notes = NOTHING
        words: list[Value] = []
        for word in node.words:
            found, more = self.words(word)
            words += found
            notes |= more
        at = next((i for i, word in enumerate(words) if pathlib.PurePath(word.text).name in PROGRAMS), None)
        if at is not None and pathlib.PurePath(words[0].text).name not in (
            "echo",
            "cp",
            "cat",
            "ls",
            "test",
            "[",
            "[[",
        ):
            program = pathlib.PurePath(words[at].text).name
            self.starts.append(Start(self.current, node.line, program, tuple(words[at + 1 :]), notes))
            return
        inside = next((word for word in words if re.search(r"\btrain(_async)?\.py\b.*--", word.text, re.S)), None)
        if inside is not None:
            raise tree.Unread(node.line, "slime is started by a text that another shell reads")

    def source(self, node: tree.Simple) -> None:
        found = self.words(node.words[1])[0] if len(node.words) > 1 else []
        text = found[0].text if found else ""
        for path in (pathlib.Path(text), self.folder / text):
            if text and path.is_file():
                if len(self.read) > DEPTH:
                    raise tree.Unread(node.line, "files that read one another without end")
                self.file(path)
                return
        self.lacking.append(Note(self.current, node.line, f"{text or 'a file'} is not here"))

    def printf(self, node: tree.Simple) -> None:
        name = node.words[2].plain or ""
        form, *given = [value for word in node.words[3:] for value in self.words(word)[0]]
        places = re.findall(r"%[sd]", form.text)
        if re.search(r"%(?![sd%])", form.text) or not places:
            self.variables[name] = Value(f"${name}", self.note(node.line, "this printf is not followed"))
            return
        out = Value("")
        for turn in itertools.batched(given or [Value("")], len(places)):
            text = form.text
            for value in turn:
                text = re.sub(r"%[sd]", lambda _, value=value: value.text, text, count=1)
                out = Value(out.text, out.notes | value.notes)
            out = Value(out.text + re.sub(r"%[sd]", "", text).replace("%%", "%"), out.notes | form.notes)
        self.variables[name] = out

    def assign(self, assignment: tree.Assignment) -> None:
        name = assignment.name
        before = self.variables.get(name)
        if assignment.element:
            kept = before if isinstance(before, Array) else Array(())
            notes = self.note(assignment.line, f"{name}[...] is set by its index, which is not followed")
            self.variables[name] = Array(kept.items, kept.notes | notes)
        elif isinstance(assignment.value, tuple):
            items: list[Value] = list(before.items) if assignment.append and isinstance(before, Array) else []
            notes = before.notes if assignment.append and isinstance(before, Array) else NOTHING
            for word in assignment.value:
                found, more = self.words(word)
                items += found
                notes |= more
            self.variables[name] = Array(tuple(items), notes)
        else:
            value = self.joined(assignment.value)
            if assignment.append and isinstance(before, Value):
                value = before + value
            self.variables[name] = value

    def chain(self, node: tree.Chain) -> None:
        known: bool | None = True
        for operator, link in node.links:
            if operator and known is None:
                self.perhaps([(link,), ()], node.line, "a condition that is not known here")
                continue
            if operator == "&&" and known is False or operator == "||" and known is True:
                continue
            self.node(link)
            known = self.true(link)

    def if_(self, node: tree.If) -> None:
        left = list(node.branches)
        while left:
            condition, body = left[0]
            known = True if condition is None else self.true_all(condition)
            if known is None:
                rest = (tree.If(node.line, tuple(left[1:])),) if left[1:] else ()
                self.perhaps([body, rest], node.line, "a condition that is not known here")
                return
            if known:
                self.body(body)
                return
            left.pop(0)

    def case(self, node: tree.Case) -> None:
        word = self.tested(node.word)
        if word.notes:
            self.perhaps([*(body for _, body in node.branches), ()], node.line, "a `case` that is not known here")
            return
        for patterns, body in node.branches:
            if any(fnmatch.fnmatchcase(word.text, self.joined(pattern).text) for pattern in patterns):
                self.body(body)
                return

    def for_(self, node: tree.For) -> None:
        if node.counting is None:
            found = [self.words(word) for word in node.words]
            if any(notes for _, notes in found) or any(value.notes for values, _ in found for value in values):
                self.perhaps([node.body, ()], node.line, "a loop over what is not known here")
                return
            for value in (value for values, _ in found for value in values):
                self.variables[node.name] = value
                self.body(node.body)
            return
        begin, condition, step = node.counting
        self.count(begin)
        for _ in range(TURNS):
            known = self.number(condition)
            if known is None:
                self.perhaps([node.body, ()], node.line, "a loop whose end is not known here")
                return
            if not known:
                return
            self.body(node.body)
            self.count(step)
        raise tree.Unread(node.line, f"a loop of more than {TURNS} turns")

    def perhaps(self, bodies: Sequence[Body], line: int, why: str) -> None:
        """One of the bodies runs, nobody knows which: what they leave alike is known, what they do not is noted."""
        before = dict(self.variables)
        ends: list[dict[str, Value | Array]] = []
        starts = list(self.starts)
        for body in bodies:
            self.variables = dict(before)
            self.body(body)
            ends.append(self.variables)
        if self.starts != starts and len(bodies) > 1:
            self.starts = [
                dataclasses.replace(s, notes=s.notes | self.note(line, f"it is started under {why}"))
                if s not in starts
                else s
                for s in self.starts
            ]
        self.variables = before
        for name in dict.fromkeys(name for end in ends for name in end):
            found = [end.get(name) for end in ends]
            if all(value == found[0] for value in found):
                if found[0] is not None:
                    self.variables[name] = found[0]
                continue
            arrays = [value for value in found if isinstance(value, Array)]
            notes = self.note(line, f"{name} depends on {why}")
            if arrays:
                kept = before.get(name)
                items = kept.items if isinstance(kept, Array) else ()
                self.variables[name] = Array(items, notes.union(*(array.notes for array in arrays)))
            else:
                self.variables[name] = Value(f"${{{name}}}", notes)

    # -- conditions and numbers ----------------------------------------------------------------------------------------

    def true_all(self, nodes: Body) -> bool | None:
        for node in nodes[:-1]:
            self.node(node)
        return self.true(nodes[-1]) if nodes else None

    def true(self, node: Node) -> bool | None:
        """Whether a command succeeds; None where that is not known."""
        match node:
            case tree.Arithmetic():
                found = self.number(node.text)
                return None if found is None else bool(found)
            case tree.Chain():
                known: bool | None = True
                for operator, link in node.links:
                    if (
                        operator == "&&"
                        and known is not False
                        or operator == "||"
                        and known is not True
                        or not operator
                    ):
                        found = self.true(link)
                        known = None if known is None else found
                return known
            case tree.Simple():
                return self.test(node)
            case tree.Group() | tree.Apart():
                return self.true_all(node.body)
        return None

    def test(self, node: tree.Simple) -> bool | None:
        plain = node.words[0].plain if node.words else None
        if not node.words:
            return True  # an assignment
        if plain in ("true", ":"):
            return True
        if plain == "false":
            return False
        if plain == "!" and len(node.words) > 1:
            found = self.test(dataclasses.replace(node, words=node.words[1:]))
            return None if found is None else not found
        if plain not in ("[", "[[", "test"):
            return None
        words = node.words[1:] if plain == "test" else node.words[1:-1]
        values = [self.tested(word) for word in words]
        if any(value.notes for value in values):
            return None
        return tested([value.text for value in values])


def told(notes: Iterable[Note]) -> list[str]:
    """Notes in the order of the script."""
    return [str(note) for note in sorted(notes)]
