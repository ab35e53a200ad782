"""What bash's arithmetic and its tests come to, from texts without expansions. Called by :mod:`.follow`."""

import ast
import contextlib
import fnmatch
import pathlib
from collections.abc import Sequence

_NUMBERS = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}


def tested(words: Sequence[str]) -> bool | None:
    """What ``[ ... ]`` says; None for a test of another kind."""
    for operator, unit in (("||", any), ("-o", any), ("&&", all), ("-a", all)):
        if operator in words:
            at = words.index(operator)
            parts = (tested(words[:at]), tested(words[at + 1 :]))
            return None if None in parts else unit(bool(part) for part in parts)
    match list(words):
        case ["!", *rest]:
            found = tested(rest)
            return None if found is None else not found
        case [one]:
            return bool(one)
        case ["-z", one]:
            return not one
        case ["-n", one]:
            return bool(one)
        case [("-f" | "-d" | "-e") as kind, one]:
            path = pathlib.Path(one)
            return {"-f": path.is_file, "-d": path.is_dir, "-e": path.exists}[kind]()
        case [one, ("=" | "==" | "!=") as sign, other]:
            return fnmatch.fnmatchcase(one, other) == (sign != "!=")
        case [one, sign, other] if sign in _NUMBERS:
            with contextlib.suppress(ValueError):
                return bool(calculated(f"{int(one)} {_NUMBERS[sign]} {int(other)}"))
    return None


_ALLOWED: tuple[type[ast.AST], ...] = (
    *(ast.Expression, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.Constant),
    *(ast.operator, ast.unaryop, ast.boolop, ast.cmpop),
)


def calculated(text: str) -> int | None:
    """A number from digits and signs alone; None where it is anything else."""
    try:
        parsed = ast.parse(text, mode="eval")
        good = all(isinstance(node, _ALLOWED) for node in ast.walk(parsed)) and "**" not in text and len(text) < 200
        numbers = all(isinstance(node.value, int) for node in ast.walk(parsed) if isinstance(node, ast.Constant))
        return int(_evaluated(parsed.body)) if good and numbers else None
    except (SyntaxError, ZeroDivisionError, TypeError, ValueError):
        return None


def _evaluated(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return int(value)
        case ast.UnaryOp():
            value = _evaluated(node.operand)
            return {ast.USub: -value, ast.UAdd: value, ast.Not: int(not value), ast.Invert: ~value}[type(node.op)]
        case ast.BoolOp():
            values = [bool(_evaluated(one)) for one in node.values]
            return int(all(values) if isinstance(node.op, ast.And) else any(values))
        case ast.Compare(left=left, ops=[sign], comparators=[right]):
            one, other = _evaluated(left), _evaluated(right)
            signs = {ast.Eq: one == other, ast.NotEq: one != other, ast.Lt: one < other, ast.LtE: one <= other}
            return int((signs | {ast.Gt: one > other, ast.GtE: one >= other})[type(sign)])
        case ast.BinOp():
            return _combined(node.op, _evaluated(node.left), _evaluated(node.right))
    raise ValueError("not a number")


def _combined(sign: ast.operator, one: int, other: int) -> int:
    match sign:
        case ast.Add():
            return one + other
        case ast.Sub():
            return one - other
        case ast.Mult():
            return one * other
        case ast.FloorDiv():
            return int(one / other)  # towards zero, as bash does
        case ast.Mod():
            return one - other * int(one / other)
    raise ValueError("not a sign that is followed")
