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
    Part,
    Simple,
    Substitution,
    Text,
    Unread,
    Variable,
    While,
    Word,
)

RESERVED = frozenset("if then elif else fi for do done while until case esac { } function select".split())
_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[([^]]*)\])?(\+?)=")
_ESCAPED = re.compile(r"\$'((?:\\.|[^'\\])*)'", re.S)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}
_SPECIAL = "@*#?$!-0123456789"
_OPERATORS = ("&&", "||", ";;", "&>>", "&>", ">>", ">&", "<<<", "<<-", "<<", "<&", ";", "&", "|", "<", ">", "(", ")")
_REDIRECTIONS = ("&>>", "&>", ">>", ">&", "<<<", "<<-", "<<", "<&", "<", ">")


def parse(text: str) -> Body:
    """The tree of a script. Raises :class:`Unread`."""
    parser = _Parser(text)
    body = parser.body(())
    if parser.at < len(text):
        raise Unread(parser.line, f"{text[parser.at : parser.at + 20]!r} was not expected")
    return body


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.line = 1
        self.documents: list[tuple[str, bool]] = []
        """Ends of here-documents that begin with the next line."""

    # -- characters ----------------------------------------------------------------------------------------------------

    def ahead(self, text: str) -> bool:
        return self.text.startswith(text, self.at)

    def take(self, count: int = 1) -> str:
        found = self.text[self.at : self.at + count]
        self.at += count
        self.line += found.count("\n")
        return found

    def blank(self) -> None:
        """Spaces, continued lines and comments up to the end of the line."""
        while self.at < len(self.text):
            if self.ahead("\\\n"):
                self.take(2)
            elif self.text[self.at] in " \t\r":
                self.take()
            elif self.text[self.at] == "#" and (self.at == 0 or self.text[self.at - 1] in " \t\r\n;"):
                while self.at < len(self.text) and self.text[self.at] != "\n":
                    self.take()
            else:
                return

    def newline(self) -> None:
        self.take()
        for end, indented in self.documents:
            while self.at < len(self.text):
                stop = self.text.find("\n", self.at)
                found = self.take((stop if stop >= 0 else len(self.text)) - self.at)
                self.take()
                if (found.lstrip("\t") if indented else found) == end:
                    break
        self.documents = []

    def space(self) -> None:
        """Blanks, ends of lines and ``;``."""
        self.blank()
        while self.at < len(self.text) and (self.text[self.at] == "\n" or self.ahead(";") and not self.ahead(";;")):
            self.newline() if self.text[self.at] == "\n" else self.take()
            self.blank()

    def operator(self) -> str:
        self.blank()
        return next((found for found in _OPERATORS if self.ahead(found)), "")

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

    # -- commands ------------------------------------------------------------------------------------------------------

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
        found = _NAME.match(self.text, self.at)
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

    # -- words ---------------------------------------------------------------------------------------------------------

    def word(self) -> Word | None:
        """The next word on this line; None where there is none."""
        self.blank()
        line = self.line
        parts: list[Part] = []
        while self.at < len(self.text) and self.text[self.at] not in " \t\r\n;&|<>()":
            parts += self.part()
        return Word(tuple(parts), line) if parts else None

    def part(self) -> list[Part]:
        one = self.text[self.at]
        if one == "'":
            return [Text(self.balanced("'", "'"), True)]
        if one == '"':
            return self.quoted()
        if self.ahead("$'"):
            return [Text(self.escaped(), True)]
        if one == "\\":
            self.take()
            found = self.take()
            return [] if found == "\n" else [Text(found, True)]
        if one in "$`":
            return [self.expansion(False)]
        return [Text(self.take(), False)]

    def escaped(self) -> str:
        """``$'...'`` with its escapes."""
        found = _ESCAPED.match(self.text, self.at)
        if not found:
            raise Unread(self.line, "a text in quotes without its end")
        self.take(len(found[0]))
        return re.sub(r"\\(.)", lambda escape: _ESCAPES.get(escape[1], escape[1]), found[1], flags=re.S)

    def quoted(self) -> list[Part]:
        self.take()
        parts: list[Part] = [Text("", True)]
        while not self.ahead('"'):
            if self.at >= len(self.text):
                raise Unread(self.line, "a text in quotes without its end")
            if self.text[self.at] == "\\" and self.text[self.at + 1 : self.at + 2] in ('"', "\\", "$", "`", "\n"):
                self.take()
                found = self.take()
                parts.append(Text("" if found == "\n" else found, True))
            elif self.text[self.at] in "$`":
                parts.append(self.expansion(True))
            else:
                parts.append(Text(self.take(), True))
        self.take()
        return parts

    def balanced(self, begin: str, end: str) -> str:
        """What stands between two marks, the same ones inside it kept."""
        line = self.line
        self.take(len(begin))
        start = self.at
        depth = 1
        while self.at < len(self.text):
            if self.ahead(end):
                depth -= 1
                if not depth:
                    found = self.text[start : self.at]
                    self.take(len(end))
                    return found
                self.take(len(end))
            elif begin != end and self.ahead(begin[0]):
                depth += 1 if len(begin) == 1 or self.ahead(begin) else 0
                self.take(len(begin) if self.ahead(begin) else 1)
            elif begin == "(" and self.text[self.at] in "'\"":
                self.take(len(self.text[self.at]))
                quote = self.text[self.at - 1]
                while self.at < len(self.text) and not self.ahead(quote):
                    self.take(2 if self.ahead("\\") and quote == '"' else 1)
                self.take()
            else:
                self.take()
        raise Unread(line, f"{begin!r} without its end")

    def expansion(self, quoted: bool) -> Part:
        start = self.at
        if self.ahead("`"):
            inside = self.balanced("`", "`")
            return Substitution(self.text[start : self.at], inside, quoted)
        self.take()
        if self.ahead("(("):
            inside = self.balanced("((", "))")
            return Substitution(self.text[start : self.at], inside, quoted, arithmetic=True)
        if self.ahead("("):
            inside = self.balanced("(", ")")
            return Substitution(self.text[start : self.at], inside, quoted)
        if self.ahead("{"):
            return self.braces(start, quoted)
        found = _NAME.match(self.text, self.at)
        name = found[0] if found else self.text[self.at : self.at + 1]
        if not found and (not name or name not in _SPECIAL):
            return Text("$", quoted)
        self.take(len(name))
        return Variable(name, self.text[start : self.at], quoted)

    def braces(self, start: int, quoted: bool) -> Part:
        line = self.line
        inside = self.balanced("{", "}")
        source = self.text[start : self.at]
        found = re.fullmatch(r"(#?)([A-Za-z_]\w*|[@*0-9])(?:\[([^]]*)\])?(.*)", inside, re.S)
        if not found:
            return Variable("", source, quoted, operator=inside)
        mark, name, index, rest = found.groups()
        operator = re.match(r":[-=+?]|[-=+?]|[:%#/^,@].*", rest, re.S)
        if not operator:
            return Variable(name, source, quoted, index, length=bool(mark))
        sign = operator[0] if len(operator[0]) <= 2 else operator[0][0]
        operand = _Parser(rest[len(sign) :])
        operand.line = line
        parts = operand.quoted_rest()
        return Variable(name, source, quoted, index, sign, Word(tuple(parts), line), bool(mark))

    def quoted_rest(self) -> list[Part]:
        """All that is left, as the operand of an expansion."""
        parts: list[Part] = []
        while self.at < len(self.text):
            parts += self.part()
        return parts
