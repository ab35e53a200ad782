"""The part of bash that launch scripts are written in, as a tree. Nothing is run or expanded here.

Words keep their parts, so that :mod:`.follow` can say what a part is and on which line it stands. What this does not
read raises :class:`.tree.Unread` with the line; a command of no interest need not be understood, only its end be found.
"""

import re

from slime_cli.options.scripts.tree import (
    Apart,
    Arithmetic,
    Assignment,
    Body,
    Case,
    Chain,
    For,
    Function,
    Group,
    If,
    Node,
    Simple,
    Text,
    Unread,
    While,
    Word,
)
from slime_cli.options.scripts.words import NAME, Words

RESERVED = frozenset("if then elif else fi for do done while until case esac { } function select".split())
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[([^]]*)\])?(\+?)=")
_REDIRECTIONS = ("&>>", "&>", ">>", ">&", "<<<", "<<-", "<<", "<&", "<", ">")


def parse(text: str) -> Body:
    """The tree of a script. Raises :class:`Unread`."""
    parser = _Parser(text)
    body = parser.body(())
    if parser.at < len(text):
        raise Unread(parser.line, f"{text[parser.at : parser.at + 20]!r} was not expected")
    return body


class _Parser(Words):
    def reserved(self) -> str:
        """The reserved word that comes next, which stays."""
        self.blank()
        found = re.compile(r"[a-z]+|[{}]").match(self.text, self.at)
        if not found or found[0] not in RESERVED:
            return ""
        after = self.text[found.end() : found.end() + 1]
        return found[0] if after in ("", *" \t\r\n;&|()<>") else ""

    def expect(self, word: str) -> None:
        self.space()
        if not self.ahead(word):
            raise Unread(self.line, f"{word!r} was expected, not {self.text[self.at : self.at + 20]!r}")
        self.take(len(word))

    def body(self, ends: tuple[str, ...]) -> Body:
        """Commands up to one of the reserved words or operators ``ends``, which stays."""
        found: list[Node] = []
        while True:
            self.space()
            if self.at >= len(self.text) or self.reserved() in ends and self.reserved() or self.operator() in ends:
                return tuple(found)
            before = self.at
            found.append(self.chain())
            if self.at == before:
                raise Unread(self.line, f"{self.text[self.at : self.at + 20]!r} was not expected")

    def chain(self) -> Node:
        line = self.line
        links = [("", self.pipe())]
        while (operator := self.operator()) in ("&&", "||"):
            self.take(2)
            self.space()
            links.append((operator, self.pipe()))
        node = links[0][1] if len(links) == 1 else Chain(line, tuple(links))
        if operator == "&":
            self.take()
            return Apart(line, (node,))
        return node

    def pipe(self) -> Node:
        line = self.line
        found = [self.command()]
        while self.operator() == "|":
            self.take()
            if self.ahead("&"):
                self.take()
            self.space()
            found.append(self.command())
        return found[0] if len(found) == 1 else Apart(line, tuple(found))

    def command(self) -> Node:
        line = self.line
        word = self.reserved()
        compound = {"if": self.if_, "for": self.for_, "case": self.case, "while": self.loop, "until": self.loop}
        if word in compound:
            self.take(len(word))
            node = compound[word](line)
        elif word == "function":
            self.take(len(word))
            self.blank()
            node = self.function(line)
        elif word == "{":
            self.take()
            node = Group(line, self.body(("}",)))
            self.expect("}")
        elif word:
            raise Unread(line, f"{word!r} is not read here")
        elif self.ahead("(("):
            node = Arithmetic(line, self.balanced("((", "))"))
        elif self.ahead("("):
            self.take()
            node = Apart(line, self.body((")",)))
            self.expect(")")
        elif re.compile(r"[A-Za-z_][\w-]*[ \t]*\([ \t]*\)").match(self.text, self.at):
            node = self.function(line)
        else:
            return self.simple(line)
        while self.operator() in _REDIRECTIONS:
            self.redirection()
        return node

    def function(self, line: int) -> Node:
        found = re.compile(r"([A-Za-z_][\w-]*)[ \t]*(\([ \t]*\))?").match(self.text, self.at)
        if not found:
            raise Unread(line, "a function without a name")
        self.take(len(found[0]))
        self.space()
        body = self.command()
        return Function(line, found[1], (body,))

    def if_(self, line: int) -> Node:
        branches: list[tuple[Body | None, Body]] = []
        while True:
            condition = self.body(("then",))
            self.expect("then")
            branches.append((condition, self.body(("elif", "else", "fi"))))
            word = self.reserved()
            self.take(len(word))
            if word == "else":
                branches.append((None, self.body(("fi",))))
                self.expect("fi")
            if word != "elif":
                if word not in ("else", "fi"):
                    raise Unread(line, "an `if` without `fi`")
                return If(line, tuple(branches))

    def for_(self, line: int) -> Node:
        self.blank()
        words: list[Word] = []
        counting = None
        name = ""
        if self.ahead("(("):
            parts = self.balanced("((", "))").split(";")
            if len(parts) != 3:
                raise Unread(line, "a `for` of another kind")
            counting = (parts[0].strip(), parts[1].strip(), parts[2].strip())
        else:
            name = self.name(line)
            self.space()
            if not self.ahead("in"):
                raise Unread(line, "a `for` over the script's own arguments")
            self.take(2)
            while (word := self.word()) is not None:
                words.append(word)
        self.expect("do")
        body = self.body(("done",))
        self.expect("done")
        return For(line, name, tuple(words), counting, body)

    def loop(self, line: int) -> Node:
        self.body(("do",))
        self.expect("do")
        body = self.body(("done",))
        self.expect("done")
        return While(line, body)

    def case(self, line: int) -> Node:
        word = self.word()
        if word is None:
            raise Unread(line, "a `case` without a word")
        self.expect("in")
        branches: list[tuple[tuple[Word, ...], Body]] = []
        while True:
            self.space()
            if self.reserved() == "esac":
                self.take(4)
                return Case(line, word, tuple(branches))
            if self.ahead("("):
                self.take()
            patterns = []
            while (pattern := self.word()) is not None:
                patterns.append(pattern)
                if self.operator() == "|":
                    self.take()
            self.expect(")")
            branches.append((tuple(patterns), self.body((";;", "esac"))))
            if self.ahead(";;"):
                self.take(2)

    def name(self, line: int) -> str:
        found = NAME.match(self.text, self.at)
        if not found:
            raise Unread(line, "a name was expected")
        return self.take(len(found[0]))

    def simple(self, line: int) -> Simple:
        assignments: list[Assignment] = []
        words: list[Word] = []
        while True:
            self.blank()
            if self.operator() in _REDIRECTIONS:
                self.redirection()
            elif not words and (assignment := self.assignment()) is not None:
                assignments.append(assignment)
            elif (
                words
                and words[0].bare in ("export", "declare", "local", "readonly", "typeset")
                and (assignment := self.assignment())
            ):
                assignments.append(assignment)
            elif words and words[0].bare == "[[" and words[-1].bare != "]]" and self.operator():
                operator = self.operator()
                words.append(Word((Text(self.take(len(operator)), False),), self.line))
            elif (word := self.word()) is not None:
                if re.fullmatch(r"\d+", word.bare or "") and self.at < len(self.text) and self.text[self.at] in "<>":
                    continue  # the number of a redirection
                words.append(word)
            else:
                return Simple(line, tuple(assignments), tuple(words))

    def assignment(self) -> Assignment | None:
        found = _ASSIGNMENT.match(self.text, self.at)
        if not found:
            return None
        line = self.line
        self.take(len(found[0]))
        value: Word | tuple[Word, ...]
        if self.ahead("("):
            self.take()
            value = self.array()
        else:
            value = self.word() or Word((), line)
        return Assignment(found[1], value, bool(found[3]), line, found[2] is not None)

    def array(self) -> tuple[Word, ...]:
        words = []
        while True:
            self.blank()
            if self.at >= len(self.text):
                raise Unread(self.line, "an array without its end")
            if self.text[self.at] == "\n":
                self.newline()
            elif self.ahead(")"):
                self.take()
                return tuple(words)
            elif (word := self.word()) is not None:
                words.append(word)
            else:
                raise Unread(self.line, f"{self.text[self.at]!r} in an array")

    def redirection(self) -> None:
        operator = self.operator()
        self.take(len(operator))
        self.blank()
        word = self.word()
        if operator.startswith("<<") and operator != "<<<" and word is not None:
            self.documents.append((word.plain or "", operator == "<<-"))
