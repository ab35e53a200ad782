"""Characters and words of a launch script: quotes, expansions and what is between blanks. :mod:`.parse` makes commands
of them."""

import re

from slime_cli.options.scripts.tree import Part, Substitution, Text, Unread, Variable, Word

NAME = re.compile(r"[A-Za-z_]\w*")
_ESCAPED = re.compile(r"\$'((?:\\.|[^'\\])*)'", re.S)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}
_SPECIAL = "@*#?$!-0123456789"
_OPERATORS = ("&&", "||", ";;", "&>>", "&>", ">>", ">&", "<<<", "<<-", "<<", "<&", ";", "&", "|", "<", ">", "(", ")")


class Words:
    """Reads ``text`` from the place :attr:`at` on."""

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
        """The text between two marks; marks nested in it stay."""
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
        found = NAME.match(self.text, self.at)
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
        operand = Words(rest[len(sign) :])
        operand.line = line
        parts = operand.quoted_rest()
        return Variable(name, source, quoted, index, sign, Word(tuple(parts), line), bool(mark))

    def quoted_rest(self) -> list[Part]:
        """All that is left, as the operand of an expansion."""
        parts: list[Part] = []
        while self.at < len(self.text):
            parts += self.part()
        return parts
